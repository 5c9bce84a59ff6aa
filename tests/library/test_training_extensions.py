"""A foreign loop with a few calls in it: resumed to the same bits, never from the wrong weights, seen by the studio."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kohya_like import monitor
from kohya_like.supervisor import JobSupervisor
from sd_scripts.library.core.errors import OptionError, TrainingError
from sd_scripts.library.train.checkpoint import read_state
from sd_scripts.library.train.training_extensions import TrainingExtensions
from sd_scripts.runs.rundir import RunDirectory
from tests.forked import forked_script

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "training-extensions.md"


def program(folder: Path) -> Path:
    """The example of the page, as a file."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    file = folder / "loop.py"
    file.write_text(found[1], encoding="utf-8")
    return file


def run_to_end(file: Path, output: Path) -> None:
    console = file.with_name("console.txt")
    process = forked_script(file, [str(output)], console)
    process.join(240)
    assert process.exitcode == 0, console.read_text(encoding="utf-8")


def folders(output: Path) -> list[RunDirectory]:
    return [RunDirectory(path.parent) for path in sorted(output.glob("*/config.toml"))]


def test_the_example_of_the_page_is_killed_and_continues_to_the_same_bytes(tmp_path: Path) -> None:
    file = program(tmp_path)
    assert len(file.read_text().splitlines()) < 45
    run_to_end(file, tmp_path / "undisturbed")
    output = tmp_path / "out"
    process = forked_script(file, [str(output)], tmp_path / "killed.txt")
    end = time.monotonic() + 240
    while not any((run.state / "000030").exists() for run in folders(output)):
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.002)
    process.kill()
    process.join()
    (killed,) = folders(output)
    assert killed.events()[0][-1]["kind"] != "finished" and not (killed.path / "regression.safetensors").exists()

    run_to_end(file, output)
    (run,) = folders(output)
    (undisturbed,) = folders(tmp_path / "undisturbed")
    assert (run.path / "regression.safetensors").read_bytes() == (undisturbed.path / "regression.safetensors").read_bytes()
    starts = [event["start_step"] for event in run.events()[0] if event["kind"] == "started"]
    assert starts[0] == 0 and starts[1] >= 30 and starts[1] % 10 == 0
    assert run.events()[0][-1]["kind"] == "finished"

    # What the studio makes of it.
    (job,) = JobSupervisor(output).jobs()
    assert job.state == "finished" and job.summary.farewell is not None
    assert monitor.summary(run.events_file).farewell is not None
    curve = {event["step"]: event["loss"] for event in run.events()[0] if event["kind"] == "step"}
    assert sorted(curve) == list(range(1, 301))
    assert sum(curve[step] for step in range(281, 301)) < 0.2 * sum(curve[step] for step in range(1, 21)), "it learns"

    # A third start has nothing to do, and says so in the exit code of a run that is finished.
    before = (run.path / "regression.safetensors").stat().st_mtime_ns
    run_to_end(file, output)
    assert len(folders(output)) == 1 and (run.path / "regression.safetensors").stat().st_mtime_ns == before


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """What the end of a process does."""
    yield
    for run in opened:
        run.close()
    opened.clear()


opened: list[TrainingExtensions] = []


class Loop:
    """A loop in this process, epoch by epoch."""

    def __init__(self, output: Path, name: str = "cat", width: int = 4, optimizer: Any = torch.optim.AdamW, resume: bool = True) -> None:
        torch.manual_seed(5)
        self.network = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.2), nn.Linear(width, 1), nn.BatchNorm1d(1)).to(torch.float32)
        self.optimizer = optimizer(self.network.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.run = TrainingExtensions(output, name)
        opened.append(self.run)
        self.before = self.values()
        self.first, self.step = self.run.load_resume_state(self.network, self.optimizer, self.scheduler, resume)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    def epochs(self, total: int) -> Loop:
        for epoch in range(self.first, total):
            for _ in range(3):
                self.optimizer.zero_grad()
                self.network(torch.randn(8, 3)).square().mean().backward()
                self.optimizer.step()
                self.step += 1
            self.scheduler.step()
            self.run.save_epoch_checkpoint(self.network, self.optimizer, self.scheduler, epoch, self.step, torch.bfloat16)
        self.first = total
        return self

    def leave(self) -> Loop:
        """As a process that ends: its folder is free."""
        self.run.close()
        return self


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_name_that_begins_like_another_is_another_run(tmp_path: Path) -> None:
    Loop(tmp_path, "cat2").epochs(3).leave()
    Loop(tmp_path, "my-cat").epochs(3).leave()
    assert (Loop(tmp_path, "cat").first, Loop(tmp_path, "cat2").first) == (0, 3)


def test_an_old_final_file_does_not_replace_newer_epochs_when_a_run_is_made_longer(tmp_path: Path) -> None:
    first = Loop(tmp_path).epochs(2)
    first.run.save_final_checkpoint(first.network, first.step)
    first.run.log_training_complete(first.step)
    longer = Loop(tmp_path)
    assert not longer.run.is_training_complete(longer.first, 4) and longer.run.is_training_complete(longer.first, 2)
    at_three = longer.epochs(3).leave().values()
    undisturbed = Loop(tmp_path / "other").epochs(4).values()
    crashed = Loop(tmp_path)
    assert crashed.first == 3 and same(crashed.values(), at_three)
    assert same(crashed.epochs(4).values(), undisturbed)


def test_weights_resume_in_their_own_precision_and_with_their_own_optimizer(tmp_path: Path) -> None:
    loop = Loop(tmp_path).epochs(2).leave()
    exported = load_file(loop.run.run_dir / "cat-000006.safetensors")
    assert exported["0.weight"].dtype is torch.bfloat16 and exported["3.num_batches_tracked"].item() == 6
    again = Loop(tmp_path)
    assert same(again.values(), loop.values()) and not same(again.values(), again.before)
    assert again.scheduler.state_dict() == loop.scheduler.state_dict()
    assert again.optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.81)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 6}, "0.weight is (4, 3) in the state, (6, 3) in the network"),
        ({"optimizer": torch.optim.SGD}, "its optimizer is AdamW, this run's is SGD"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_touched(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path).epochs(2).leave()
    files = {path: path.stat().st_mtime_ns for path in loop.run.run_dir.rglob("*")}
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(3, values.get("width", 4)), nn.Dropout(0.2), nn.Linear(values.get("width", 4), 1), nn.BatchNorm1d(1))
    optimizer = values.get("optimizer", torch.optim.AdamW)(network.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}, json.dumps(optimizer.state_dict(), default=str)
    with pytest.raises(TrainingError) as caught:
        TrainingExtensions(tmp_path, "cat").load_resume_state(network, optimizer, scheduler)
    assert words in str(caught.value) and "Nothing was changed" in str(caught.value)
    assert same(before[0], network.state_dict()) and json.dumps(optimizer.state_dict(), default=str) == before[1]
    assert {path: path.stat().st_mtime_ns for path in loop.run.run_dir.rglob("*")} == files
    assert len(folders(tmp_path)) == 1, "and no fresh start beside it"
    assert Loop(tmp_path).first == 2


def test_a_broken_state_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    loop = Loop(tmp_path).epochs(3).leave()
    newest = loop.run.run_dir / "state" / "000009" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = Loop(tmp_path)
    assert (again.first, again.step) == (2, 6)
    warnings = [event["text"] for event in RunDirectory(again.run.run_dir).events()[0] if event["kind"] == "warning"]
    assert len(warnings) == 1 and "step 9 is broken" in warnings[0]
    again.leave()
    for path in (loop.run.run_dir / "state").glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(TrainingError, match="holds no whole state"):
        Loop(tmp_path)
    assert len(folders(tmp_path)) == 1 and Loop(tmp_path, resume=False).first == 0
    assert len(folders(tmp_path)) == 2


def test_a_full_disk_leaves_the_earlier_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path).epochs(1)

    def full(*_arguments: object, **_names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sd_scripts.library.train.checkpoint.save_file", full)
    with pytest.raises(TrainingError, match="No space left"):
        loop.epochs(2)
    monkeypatch.undo()
    loop.leave()
    assert Loop(tmp_path).first == 1


def test_nothing_in_a_state_can_run_code(tmp_path: Path) -> None:
    loop = Loop(tmp_path).epochs(1)
    names = {path.name for path in (loop.run.run_dir / "state" / "000003").iterdir()}
    assert names == {"manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors"}


def test_a_frozen_base_is_not_part_of_the_state(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    network[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(network[1].parameters())
    run = TrainingExtensions(tmp_path, "cat")
    opened.append(run)
    assert run.load_resume_state(network, optimizer) == (0, 0)
    run.save_epoch_checkpoint(network, optimizer, None, 0, 1)
    assert read_state(run.run_dir / "state" / "000001")[0]["weights"].keys() == {"1.weight", "1.bias"}


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="call load_resume_state first"):
        _ = TrainingExtensions(tmp_path, "cat").run_dir
    with pytest.raises((OptionError, ValueError), match="output_name"):
        TrainingExtensions(tmp_path, "a/b")
    first = Loop(tmp_path).epochs(1)
    with pytest.raises(OptionError, match="another process"):
        Loop(tmp_path)
    first.leave()


PAIR = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from sd_scripts.library.train.training_extensions import TrainingExtensions

backend = TrainingExtensions.setup_distributed()
together = backend is not None
run = TrainingExtensions(sys.argv[1], "pair")
torch.manual_seed(0)
network = torch.nn.Linear(4, 1)
network = DistributedDataParallel(network) if together else network
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
first, step = run.load_resume_state(network, optimizer)
data = torch.randn(12, 8, 4, generator=torch.Generator().manual_seed(1))
run.log_training_start(int(sys.argv[2]), int(sys.argv[2]))
for epoch in range(first, int(sys.argv[2])):
    run.log_epoch(epoch, int(sys.argv[2]))
    x = data[epoch]
    if together:
        rank = torch.distributed.get_rank()
        x = x[4 * rank : 4 * rank + 4]
    optimizer.zero_grad()
    (network(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    step += 1
    run.print_step(step, int(sys.argv[2]), 0.0)
    run.save_epoch_checkpoint(network, optimizer, None, epoch, step)
run.save_final_checkpoint(network, step)
run.log_training_complete(step)
print("main" if run.is_main_process else "other", backend, flush=True)
"""


def test_two_processes_write_one_run_and_one_process_continues_it(tmp_path: Path) -> None:
    file = tmp_path / "pair.py"
    file.write_text(PAIR, encoding="utf-8")

    def started(output: str, epochs: int, processes: int) -> list[str]:
        meeting = str(tmp_path / f"meeting-{output}-{epochs}-{processes}")
        both, consoles = [], [Path(f"{meeting}-{rank}.txt") for rank in range(processes)]
        for rank, console in enumerate(consoles):
            environment = {"GLOO_SOCKET_IFNAME": "lo"}
            if processes > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "KOHYA_LIKE_INIT_FILE": meeting}
            both.append(forked_script(file, [str(tmp_path / output), str(epochs)], console, environment))
        for process in both:
            process.join(240)
        said = [console.read_text(encoding="utf-8") for console in consoles]
        assert [process.exitcode for process in both] == [0] * processes, said
        return said

    said = started("out", 5, 2)
    assert "main gloo" in said[0] and said[1].strip().splitlines() == ["other gloo"], "only the first process speaks"
    started("out", 9, 1)
    (run,) = folders(tmp_path / "out")
    started("alone", 9, 1)
    (alone,) = folders(tmp_path / "alone")
    mine, theirs = (load_file(one.path / "pair.safetensors") for one in (run, alone))
    assert mine.keys() == theirs.keys() == {"weight", "bias"}
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-6
    steps = [event["step"] for event in run.events()[0] if event["kind"] == "step"]
    assert steps == list(range(1, 10)), "each step is logged once"
