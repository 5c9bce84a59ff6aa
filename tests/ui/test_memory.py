"""The page's estimates of memory: what the script says becomes lines, and its refusals sentences."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kohya_like import form, memory
from kohya_like.monitor import Progress
from sd_scripts.families import RUNS
from sd_scripts.schema import flat
from sd_scripts.schema.runs import RunOptions


def options_of(**values: Any) -> RunOptions:
    return flat.build(RUNS["sd", "network"], {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", **values})


def payload_of(options: RunOptions) -> dict[str, Any]:
    return {"run": form.run_key(type(options)), "values": form.texts(type(options), flat.flatten(options))}


def test_a_plan_for_a_card_keeps_the_form_but_for_its_changes(tmp_path: Path) -> None:
    options = options_of(output_dir=str(tmp_path), network_dim=5)
    found = {
        "forecast": {"bytes": 1},
        "plan": {"card": 8, "fits": True, "steps": [], "forecast": {}, "changes": {"gradient_checkpointing": True, "blocks_to_swap": 3}},
    }
    plan = memory.answer(options, found, payload_of(options))["plan"]
    assert [(change["before"], change["after"]) for change in plan["changes"]] == [("off", "on"), ("0", "3")]
    assert plan["texts"] == {"gradient_checkpointing": True, "blocks_to_swap": "3"}
    assert plan["run"] == "sd/network"


def test_what_the_script_refuses_is_a_sentence(tmp_path: Path) -> None:
    options = options_of(output_dir=str(tmp_path), pretrained_model_name_or_path=str(tmp_path / "absent.safetensors"))
    last = list(memory.ask(options, None, payload_of(options)))[-1]
    assert "there is no file or folder" in last["problem"] and "Traceback" not in last["problem"]


def test_somebody_who_leaves_frees_the_place_and_the_next_estimate_comes_in_lines_and_ends_with_a_forecast(
    tmp_path: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    options = options_of(output_dir=str(tmp_path))
    lines = memory.ask(options, None, payload_of(options))
    next(lines)
    assert "Another estimate" in next(memory.ask(options, None, payload_of(options)))["problem"]
    lines.close()
    *said, last = memory.ask(options, None, payload_of(options))
    assert said and all(set(line) == {"say"} for line in said)
    assert [phase["name"] for phase in last["forecast"]["phases"]] == ["caching", "training"] and "plan" not in last


def test_a_run_page_knows_what_was_forecast() -> None:
    progress = Progress()
    progress.fold([{"kind": "started", "time": 1.0}, {"kind": "forecast", "time": 2.0, "gib": 11.5, "parts": {}}])
    assert progress.forecast_gib == 11.5
