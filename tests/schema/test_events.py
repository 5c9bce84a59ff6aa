"""The event log: what is written is read again, also what other versions wrote, and other programs are told how."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kohya_like.monitor import Progress
from sd_scripts.runs import events
from sd_scripts.runs.events import KINDS, Event, lines_of, read
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.docs import event_schema

FORMER = Path(__file__).parent / "events_0_1"
"""Logs of two runs of version 0.1 (commit 5452430), a LoRA with previews and a style transfer; of the lines on caches only the last."""
SCHEMAS = json.loads(event_schema())["oneOf"]
TYPES = {int: {"integer", "number"}, float: {"number"}, str: {"string"}, bool: {"boolean"}, dict: {"object"}, list: {"array"}}
NUMBERS = st.floats(-1e30, 1e30)
"""JSON has no others."""
EVENTS = st.one_of(
    st.builds(kind, **{field.name: NUMBERS for field in fields(kind) if field.type == "float" or field.name in ("loss", "lr")})
    for kind in KINDS.values()
)


@example(events.RunStarted(time=1.5, steps=2**53 + 1))
@given(EVENTS)
def test_what_is_written_is_read_again(event: Event) -> None:
    event = replace(event, time=1.5)
    assert read(lines_of(event.line(1.5).encode())) == [event]
    # Other programs are told all that may stand there, and what always does.
    line, (schema,) = json.loads(event.line(1.5)), [one for one in SCHEMAS if one["properties"]["kind"]["const"] == event.kind]
    assert set(schema["required"]) <= set(line) <= set(schema["properties"])
    for name, value in line.items():
        told = schema["properties"][name]
        types = {one["type"] for one in told.get("anyOf", [told]) if "type" in one}
        assert name == "kind" or TYPES[type(value)] & types, (name, value, types)


def former(name: str) -> list[Event]:
    run = RunDirectory(FORMER / name)
    found = run.history()
    assert len(found) == len(run.events_file.read_text().splitlines()), "no line is lost"
    return found


def of(kind: type[Any], found: list[Event]) -> list[Any]:
    return [event for event in found if isinstance(event, kind)]


def test_logs_of_version_0_1_are_read_for_ever() -> None:
    styles, lora = former("styles"), former("lora")
    steps = of(events.StepDone, styles)
    assert [step.loss for step in steps] == [11.251083374023438, 6.780645370483398, 10.206050872802734]
    assert set(steps[0].parts) == {"flow", "swd", "ssm", "low"} and steps[0].parts["flow"] == pytest.approx(3.091, abs=0.001)
    (epoch,) = of(events.EpochDone, styles)
    assert (epoch.epoch, epoch.loss, epoch.seconds) == (1, 9.412593205769857, 117.259) and set(epoch.parts) == set(steps[0].parts)
    first, last = of(events.Evaluated, styles)
    assert first.means["swd_target"] == 2.941512036654684 and len(last.means) == 5 and last.folder == "inference/epoch_0000_step_000003"
    assert [event.what for event in of(events.FileSaved, styles)] == ["state", "export"]
    (over,) = of(events.SessionOver, styles)
    assert (over.step_in_session, over.total_trained_seconds) == (3, 117.259)

    assert set(of(events.StepDone, lora)[0].parts) == {"unweighted"} and [shown.step for shown in of(events.Previewed, lora)] == [0, 2]
    (tried,) = read([{"kind": "rehearsed", "seconds": 1.0, "peak_gib": 2.0, "what": "a batch"}])
    assert isinstance(tried, events.PreflightDone)
    (refused,) = read([{"kind": "failed", "text": "It broke.", "remedy": "Mend it.", "refused": True}])
    assert isinstance(refused, events.RunFailed) and refused.advice == "Mend it." and refused.refused


def test_the_page_shows_a_log_of_version_0_1() -> None:
    progress = Progress()
    progress.fold(RunDirectory(FORMER / "styles").events()[0])
    assert (progress.step, progress.steps, progress.phase, progress.loss) == (3, 3, "finished", 10.206050872802734)
    assert set(progress.curve.part_names) == {"flow", "swd", "ssm", "low"} and set(progress.evaluations) == {0, 3}


def test_a_new_number_of_a_step_is_no_curve_by_accident() -> None:
    (step,) = read([{"kind": "step", "step": 1, "loss": 1.0, "parts": {"edge": 0.5}, "gpu_degrees": 71.0}])
    assert isinstance(step, events.StepDone) and step.parts == {"edge": 0.5}
