"""States on disk: whole or not there, read only when whole, removed when no longer wanted."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sd_scripts.library.train.checkpoint import (
    Checkpointer,
    Identity,
    NoRoomLeft,
    ends_period,
    mismatch,
    pack,
    read_state,
    remove_leftovers,
    unpack,
)
from sd_scripts.runs import resume
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.states import BrokenState, newest_whole
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import TEMPORARY_MARK
from sd_scripts.schema.output import AdapterOutputOptions


def checkpointer(folder: Path, total: int = 100, steps_per_epoch: int = 10, **options: Any) -> Checkpointer:
    return Checkpointer(
        RunDirectory(folder),
        AdapterOutputOptions(**options),
        Identity("settings", "images", 1),
        lambda step: step // steps_per_epoch,
        total,
    )


def state(step: int) -> dict[str, Any]:
    return {"weights": {"a": torch.full((3, 2), float(step)), "b": torch.randn(4)}, "loop": {"step": step, "scaler": {}}, "average": None}


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(
        [torch.zeros(0), torch.arange(5), torch.randn(2, 3), torch.tensor(1.5, dtype=torch.float64), torch.ones(2, dtype=torch.uint8)]
    ),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@given(values)
@settings(max_examples=150, deadline=None)
def test_any_nested_value_comes_back_as_it_was(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(value, tensors, "x"), allow_nan=False))
    assert equal(unpack(packed, tensors), value)


def test_infinite_numbers_come_back_and_code_is_refused() -> None:
    found = unpack(pack({"a": math.inf, "b": -math.inf, "c": math.nan}, {}, "x"), {})
    assert found["a"] == math.inf and found["b"] == -math.inf and math.isnan(found["c"])
    with pytest.raises(TypeError, match=r"x.f is a function"):
        pack({"f": checkpointer}, {}, "x")


def test_tensors_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    path = checkpointer(tmp_path).save_state(1, {"optimizer": {0: {"map": shared}, 1: {"map": shared, "view": shared[2:]}}})
    groups, _ = read_state(path)
    assert torch.equal(groups["optimizer"][1]["view"], shared[2:]) and torch.equal(groups["optimizer"][0]["map"], shared)


def test_a_state_is_safetensors_and_json_with_the_sum_of_every_file(tmp_path: Path) -> None:
    path = checkpointer(tmp_path).save_state(8, state(8))
    assert path.name == "000008"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.json", "weights.safetensors"]
    assert torch.equal(load_file(path / "weights.safetensors")["weights.a"], torch.full((3, 2), 8.0))
    groups, manifest = read_state(path)
    assert groups["loop"]["step"] == manifest["step"] == 8
    assert set(manifest["files"]) == {"state.json", "weights.safetensors"}


def test_only_the_newest_states_stay(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path, save_last_n_states=2)
    for step in (5, 10, 100, 1000):
        keeper.save_state(step, state(step))
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["000100", "001000"]


def test_states_beyond_the_one_that_training_goes_back_to_are_removed(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path, save_last_n_states=4)
    for step in (5, 10, 15, 20):
        keeper.save_state(step, state(step))
    assert keeper.drop_states_after(10) == [15, 20]
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["000005", "000010"]


def damage(path: Path, how: str) -> None:
    weights = path / "weights.safetensors"
    if how == "cut off":
        weights.write_bytes(weights.read_bytes()[:-3])
    elif how == "one bit":
        data = bytearray(weights.read_bytes())
        data[random.randrange(len(data))] ^= 1
        weights.write_bytes(data)
    elif how == "file gone":
        weights.unlink()
    elif how == "manifest gone":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text('{"format": 1, "step":')


@pytest.mark.parametrize("how", ["cut off", "one bit", "file gone", "manifest gone", "half a manifest"])
def test_a_broken_state_is_named_and_the_one_before_is_used(how: str, tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    keeper.save_state(3, state(3))
    damage(keeper.save_state(6, state(6)), how)
    found, broken = newest_whole(tmp_path / "state")
    assert found is not None and found.name == "000003"
    assert len(broken) == 1 and "step 6 is broken" in broken[0]
    with pytest.raises(BrokenState):
        read_state(tmp_path / "state" / "000006")
    keeper.save_state(6, state(6))
    assert newest_whole(tmp_path / "state")[0] == tmp_path / "state" / "000006"


def test_a_full_disk_is_a_sentence_and_leaves_the_earlier_state_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import resource

    keeper = checkpointer(tmp_path)
    keeper.save_state(3, state(3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"weights": {"a": torch.zeros(200_000)}, "loop": {"step": 6}}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(NoRoomLeft, match="What was saved earlier is untouched") as caught:
            keeper.save_state(6, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    whole = shutil.disk_usage(tmp_path).total / 2**30
    assert 0 < float(re.search(r"\(([\d.]+) GiB are free there\)", str(caught.value)).group(1)) <= round(whole, 2)
    assert os.listdir(tmp_path / "state") == ["000003"]
    assert newest_whole(tmp_path / "state")[0] == tmp_path / "state" / "000003"
    keeper.save_state(6, large)


def test_a_folder_that_takes_no_states_is_a_sentence(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    (tmp_path / "state").write_text("somebody's file in place of the folder")
    with pytest.raises(NoRoomLeft, match=r"could not be written to .* What was saved earlier is untouched"):
        keeper.save_state(3, state(3))


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    keeper.save_state(3, state(3))
    (tmp_path / "state" / f".000006{TEMPORARY_MARK}ab").mkdir()
    (tmp_path / "state" / f".000006{TEMPORARY_MARK}ab" / "weights.safetensors").write_bytes(b"half")
    (tmp_path / f".lora.safetensors{TEMPORARY_MARK}cd").write_bytes(b"half")
    assert len(remove_leftovers(RunDirectory(tmp_path))) == 2
    assert sorted(path.name for path in tmp_path.rglob("*") if TEMPORARY_MARK in path.name) == []
    assert newest_whole(tmp_path / "state")[0] is not None


def saves(keeper: Checkpointer, folder: Path, total: int) -> list[int]:
    """Plays a run; the steps of the files that are there at its end."""
    for step in range(1, total + 1):
        if keeper.export_due(step) or step == total:
            path = keeper.export_path(step)
            path.write_bytes(b"file")
            keeper.exported(step, path)
    assert (folder / "lora.safetensors").exists(), "the final file always stays"
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("lora-*.safetensors"))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, []),
        ({"save_every_n_steps": 30}, [30, 60, 90]),
        ({"save_every_n_steps": 20, "save_last_n_steps": 40}, [80]),
        ({"save_every_n_epochs": 2}, [20, 40, 60, 80]),
        ({"save_every_n_epochs": 1, "save_last_n_epochs": 3}, [80, 90]),
        # kohya's scripts remove the file of epoch e - N every when that of epoch e is written; the final file is that of epoch 10.
        ({"save_every_n_epochs": 2, "save_last_n_epochs": 3}, [60, 80]),
        ({"save_every_n_epochs": 3, "save_last_n_epochs": 2}, [60, 90]),
        ({"save_n_epoch_ratio": 5, "save_last_n_epochs": 2}, [80]),
        ({"save_n_epoch_ratio": 5}, [20, 40, 60, 80]),
        ({"save_n_epoch_ratio": 1000, "save_last_n_epochs": 2}, [90]),
        ({"save_every_n_steps": 25, "save_last_n_steps": 25, "save_every_n_epochs": 5}, [50]),
    ],
)
def test_files_are_saved_and_kept_as_the_options_say(options: dict[str, int], kept: list[int], tmp_path: Path) -> None:
    assert saves(checkpointer(tmp_path, **options), tmp_path, 100) == kept


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "lora-final.safetensors", tmp_path / "lora-2-000010.safetensors", tmp_path / "before.safetensors"]
    for path in others:
        path.write_bytes(b"mine")
    keeper = checkpointer(tmp_path, save_every_n_steps=10, save_last_n_steps=10)
    for step in (10, 20, 30):
        keeper.export_path(step).write_bytes(b"file")
        keeper.exported(step, keeper.export_path(step))
    assert all(path.exists() for path in others)
    assert (tmp_path / "lora-000030.safetensors").exists() and not (tmp_path / "lora-000010.safetensors").exists()


def test_states_are_due_with_files_and_by_their_own_interval(tmp_path: Path) -> None:
    both = checkpointer(tmp_path, save_every_n_steps=30, save_state_every_n_steps=20)
    assert [step for step in range(1, 100) if both.state_due(step)] == [20, 30, 40, 60, 80, 90]
    none = checkpointer(tmp_path, save_every_n_steps=30, save_state=False)
    assert not any(none.state_due(step) for step in range(1, 100))


def test_an_epoch_that_is_passed_over_still_counts() -> None:
    # Small data sets: an epoch may take no step at all, so two epochs can end with one step.
    done = [0, 0, 2, 2, 3, 5].__getitem__
    assert [step for step in range(6) if ends_period(done, step, 1)] == [2, 4, 5]
    assert [step for step in range(6) if ends_period(done, step, 2)] == [2, 5]


@pytest.mark.parametrize("total", [5, pytest.param(6, marks=pytest.mark.long)])
def test_every_order_of_saves_bests_and_stops_keeps_the_best_the_final_and_the_newest(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All histories of up to total saves, each with or without a new best, of which one may be a stop, against the rules in words."""
    number = 0
    # Thousands of saves; that they survive a power cut is not the question here.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for keep_states, keep_files in ((1, None), (2, 1), (3, 2), (1, 3)):
        for length in range(1, total + 1):
            for bests in itertools.product((False, True), repeat=length):
                number += 1
                folder = tmp_path / f"{number}"
                folder.mkdir()
                options = {"save_every_n_steps": 1, "save_last_n_steps": keep_files, "save_last_n_states": keep_states, "save_best": True}
                keeper = checkpointer(folder, total=total, **options)
                run_history(keeper, folder, bests, total)
                files = {path.name for path in folder.glob("lora*")}
                # The last step of a history that ends early is a stop: its state is there, and its file as it was due.
                kept = range(1, length + 1) if keep_files is None else range(max(1, length - keep_files + 1), length + 1)
                wanted = {f"lora-{step:06d}.safetensors" for step in kept if step < total}
                wanted |= {"lora.safetensors"} if length == total else set()
                wanted |= {"lora-best.safetensors"} if any(bests) else set()
                assert files == wanted, (options, bests)
                if any(bests):
                    last_best = max(step for step, best in enumerate(bests, 1) if best)
                    assert (folder / "lora-best.safetensors").read_text() == str(last_best)
                states = sorted(int(path.name) for path in (folder / "state").iterdir())
                assert states == list(range(1, length + 1))[-keep_states:]


def run_history(keeper: Checkpointer, folder: Path, bests: tuple[bool, ...], total: int) -> None:
    """What the loop does in a run whose steps all save, in its order; empty folders stand for states."""
    for step, best in enumerate(bests, 1):
        if best:
            keeper.best_path.write_text(str(step))
        keeper.save_state(step, {})
        path = keeper.export_path(step)
        path.write_text(str(step))
        keeper.exported(step, path)


def test_weights_that_do_not_fit_are_a_table_of_names_and_shapes() -> None:
    shapes = {"same": (2, 2), **{f"gone{number}": (number + 1,) for number in range(12)}, "grown": (3, 4)}
    run = {name: torch.zeros(shape) for name, shape in shapes.items()}
    saved = {"same": torch.zeros(2, 2), "grown": torch.zeros(3, 5), "foreign": torch.zeros(())}
    assert mismatch(run, run) == ""
    count, head, *lines = mismatch(saved, run).splitlines()
    assert count == "12 missing, 1 unexpected, 1 of another shape, of 14"
    assert head.split("  ")[-1] == "weight" and "in the state" in head
    rows = [line.split() for line in lines]
    assert rows[0] == ["missing", "-", "1", "gone0"] and rows[10] == ["and", "2", "more", "missing"]
    assert rows[11:] == [["unexpected", "scalar", "-", "foreign"], ["of", "another", "shape", "3x5", "3x4", "grown"]]
    assert len({line.index(name) for line, name in zip(lines[:2], ("gone0", "gone1"))} | {head.index("weight")}) == 1, "columns are aligned"


def started(folder: Path, how: str, run_dir: Path | None = None) -> resume.Start:
    """Where a start begins whose runs lie in a folder and are called lora."""
    output = AdapterOutputOptions(output_dir=str(folder), output_name="lora")
    return resume.choose(resume.Wanted(output, how, run_dir, {}, "d", 100))


def test_a_run_goes_on_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    run = tmp_path / "20260101-120000-lora"
    run.mkdir()
    (run / "config.toml").touch()
    keeper = checkpointer(run, steps_per_epoch=10, save_last_n_states=9)
    for step in (10, 15, 30):
        keeper.save_state(step, state(step))
    assert list(resume.epoch_states(run / "state")) == [1, 3]
    branch, same = started(tmp_path, "epoch:3"), started(tmp_path, "epoch:1", run)
    assert (branch.run, branch.step) == (None, 30), "without run_dir a new folder is made"
    assert same.run is not None and (same.run.path, same.step) == (run, 10), "a newer state does not win over what is named"
    with pytest.raises(OptionError, match=r"no state saved at the end of epoch 2; .* epochs 1, 3, and within epochs the steps 15"):
        started(tmp_path, "epoch:2")
    with pytest.raises(OptionError, match="no run named lora"):
        started(tmp_path / "elsewhere", "epoch:1")


@pytest.mark.parametrize(
    ("text", "epoch"), [("epoch:5", 5), ("epoch:0", 0), ("epoch:", None), ("epoch:-1", None), ("5", None), ("a:5", None)]
)
def test_only_epoch_and_a_number_name_an_epoch(text: str, epoch: int | None) -> None:
    assert resume.epoch_in(text) == epoch


def test_a_step_that_ends_several_epochs_is_the_end_of_each(tmp_path: Path) -> None:
    keeper = Checkpointer(RunDirectory(tmp_path), AdapterOutputOptions(), Identity("s", "d", 1), lambda step: 3 * step, 9)
    keeper.save_state(2, state(2))
    assert resume.epoch_states(tmp_path / "state") == dict.fromkeys((4, 5, 6), tmp_path / "state" / "000002")
