"""The Tools tab without a browser: orders become command lines, places are confined, nothing is written over, a start is found again."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kohya_like import form, processes, tools
from sd_scripts.families import TOOLS
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.made_here import lora_of


def lora(path: Path) -> Path:
    """A LoRA file as a run of SDXL leaves it."""
    return lora_of("sdxl", path, target_modules=["to_q"])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[tools.ToolBench]:
    """A bench over an empty folder that may use nothing else; whatever it started is ended."""
    (tmp_path / "out").mkdir()
    bench = tools.ToolBench(tmp_path / "out", (tmp_path,))
    yield bench
    for started in bench.recent():
        bench.cancel(started)
        # A tool has ended for the page when its exit is written down; its supervisor then has a moment of its own left.
        _, left = psutil.wait_procs(processes.of_runs().get(started.order.run_id, []), timeout=120)
        assert left == []


@pytest.mark.parametrize("tool", [tool for tool in TOOLS.values() if tool.tab == "tools" and not tool.family], ids=lambda tool: tool.name)
def test_every_option_of_every_tool_has_one_field_but_the_reports_file(tool: Any, tmp_path: Path) -> None:
    drawn = next(each for each in tools.specification(tmp_path)["tools"] if each["name"] == tool.name)
    assert [field["name"] for field in drawn["fields"]] == [name for name in flat.fields(tool) if name != tools.REPORT]
    assert all(field["label"] and field["help"] for field in drawn["fields"])
    assert drawn["label"] and drawn["about"]


def test_what_the_form_holds_becomes_the_options_of_the_tool(bench: tools.ToolBench, tmp_path: Path) -> None:
    first, second = lora(tmp_path / "a.safetensors"), lora(tmp_path / "b c.safetensors")
    texts = form.texts(TOOLS["merge_lora"], {}) | {"models": f"{first}\n{second}\n", "ratios": "0.5, 1", "save_to": "both.safetensors"}
    values = flat.flatten(bench.options(TOOLS["merge_lora"], texts))
    assert values["models"] == (str(first), str(second)) and values["ratios"] == (0.5, 1.0)
    assert values["save_to"] == str(tmp_path / "out" / "both.safetensors"), "a name alone lies in the folder of runs"
    values = flat.flatten(bench.options(TOOLS["merge_lora"], texts | {"base_model": "toy"}))
    assert values["base_model"] == "toy", "what an option offers is no file"


def test_places_outside_the_roots_and_files_that_are_there_are_refused_together(bench: tools.ToolBench, tmp_path: Path) -> None:
    there = lora(tmp_path / "there.safetensors")
    with pytest.raises(OptionError) as caught:
        bench.options(TOOLS["resize_lora"], {"model": "/etc/passwd", "save_to": str(there), "new_rank": "0"})
    assert {problem.option for problem in caught.value.problems} == {"model", "save_to", "new_rank"}
    with pytest.raises(OptionError, match="outside the folders"):
        bench.options(TOOLS["merge_lora"], {"models": f"{there}\n{tmp_path}/../../etc/a.safetensors", "save_to": "x.safetensors"})
    with pytest.raises(OptionError, match="no tool"):
        bench.start("rm", {})


def test_a_cancelled_tool_leaves_no_process_and_says_so(bench: tools.ToolBench, tmp_path: Path) -> None:
    started = bench.start("verify_lora", {"model": str(lora(tmp_path / "a.safetensors")), "num_largest": "3"})
    assert started.state == "running" and "--num_largest=3" in started.order.argv
    other = tools.ToolBench(tmp_path / "out", (tmp_path,))
    again = other.find(started.name)
    assert (again.state, again.order.texts) == ("running", started.order.texts), "another studio on the same folder finds it"
    bench.cancel(started)
    assert bench.find(started.name).state == "cancelled"
    assert processes.of_runs().get(started.order.run_id, []) == []


def test_a_tool_outlives_the_bench_that_started_it_and_is_still_collected(bench: tools.ToolBench, tmp_path: Path) -> None:
    first = tools.ToolBench(tmp_path / "out", (tmp_path,))
    started = first.start("verify_lora", {"model": str(lora(tmp_path / "a.safetensors"))})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del first
        gc.collect()
    assert [str(one.message) for one in said] == []
    pid = bench.find(started.name).order.pid
    bench.cancel(started)
    bench.recent()
    assert not psutil.pid_exists(pid), "collected, not left as a zombie"
