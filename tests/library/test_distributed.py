"""Processes that meet, wait for each other, and notice that one of them is gone: real ones, with gloo, on this machine."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.parallel.peers import PeerLost, Peers, backend_of, join
from sd_scripts.library.parallel.sharding import check_optimizer, gathered, own, shard, sharded_optimizer_state, total_norm
from sd_scripts.library.train.ema import MovingAverage
from sd_scripts.library.train.environment import check_processes, with_global_batch
from sd_scripts.library.train.optim import make_optimizer
from sd_scripts.runs.launcher import INIT_FILE
from sd_scripts.runs.stopping import Stopped
from sd_scripts.schema.distributed import DistributedOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build
from sd_scripts.schema.optimizer import OptimizerOptions

SECONDS = 60.0
"""Far more than any of this takes."""


def meet(rank: int, world: int, folder: Path, patience: float, limit_minutes: int = 1) -> Peers:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ[INIT_FILE] = str(folder / "meeting")
    join(DistributedOptions(distributed_timeout=limit_minutes))
    said = folder / f"last-{rank}.txt"
    return Peers(patience, lambda err: said.write_text(f"{err}", encoding="utf-8") and None)


def process(rank: int, world: int, folder: Path, work: Callable[[Peers, Path], str], patience: float) -> None:
    """One process: what `work` returns or raises is written to result-<rank>.txt."""
    torch.set_num_threads(1)
    peers = meet(rank, world, folder, patience)
    try:
        said = work(peers, folder)
    except Stopped:
        said = "stopped"
    except PeerLost as err:
        said = f"lost: {err} | {err.advice} | speaks {peers.speaks}"
    (folder / f"result-{rank}.txt").write_text(said, encoding="utf-8")
    peers.leave()


class Together:
    """Starts processes that all do the same work."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[BaseProcess]()

    def start(self, work: Callable[[Peers, Path], str], world: int = 2, patience: float = 30.0) -> Together:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sd_scripts.library.train.session"])
        for rank in range(world):
            one = context.Process(target=process, args=(rank, world, self.folder, work, patience))
            one.start()
            self.processes.append(one)
        return self

    def results(self) -> list[str]:
        """What each process has said; `ended <code>` for one that could not."""
        said = []
        for rank, one in enumerate(self.processes):
            one.join(SECONDS)
            file = self.folder / f"result-{rank}.txt"
            said.append(file.read_text(encoding="utf-8") if file.exists() else f"ended {one.exitcode}")
        return said

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"{name} did not come"
            time.sleep(0.005)


@pytest.fixture
def together(tmp_path: Path) -> Iterator[Together]:
    made = Together(tmp_path)
    yield made
    for one in made.processes:
        one.kill()


def _texts_and_order(peers: Peers, folder: Path) -> str:
    text = peers.same_text("of the first, Größe 1" if peers.is_first else "of another")
    with peers.first_before_others():
        order = folder / "order.txt"
        order.write_text((order.read_text() if order.exists() else "") + str(peers.rank))
        if peers.is_first:
            time.sleep(0.2)
            order.write_text(order.read_text() + "!")
    peers.barrier()
    return f"{text} {order.read_text()}"


def test_the_first_goes_before_the_others_and_its_text_is_everybodys(together: Together) -> None:
    assert together.start(_texts_and_order).results() == ["of the first, Größe 1 0!1"] * 2


def _killed_while(what: str, peers: Peers, folder: Path) -> str:
    peers.barrier()
    if peers.rank == 1:
        (folder / "there").write_text("")
        time.sleep(SECONDS)
    if what == "barrier":
        peers.barrier()
    elif what == "text":
        peers.same_text("")
    else:
        with peers.exchanging():
            torch.distributed.all_reduce(torch.ones(3))
    return "nothing was noticed"


def _killed_in_barrier(peers: Peers, folder: Path) -> str:
    return _killed_while("barrier", peers, folder)


def _killed_in_sum(peers: Peers, folder: Path) -> str:
    return _killed_while("sum", peers, folder)


@pytest.mark.parametrize("work", [_killed_in_barrier, _killed_in_sum])
def test_a_process_that_is_killed_is_missed_by_name_and_at_once(work: Any, together: Together) -> None:
    together.start(work).wait_for("there")
    time.sleep(0.3)
    victim = together.processes[1]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    # Waiting for the timeout would have it say so.
    assert together.results() == ["lost: process 2 of 2 ended without a word: it was killed, or it crashed |  | speaks True", "ended -9"]


def _first_is_killed(peers: Peers, folder: Path) -> str:
    peers.barrier()
    if peers.is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    peers.same_text("")
    return "nothing was noticed"


def test_without_the_first_process_the_next_one_speaks(together: Together) -> None:
    lost = "lost: process 1 of 3 ended without a word: it was killed, or it crashed |  | speaks"
    assert together.start(_first_is_killed, world=3).results() == ["ended -9", f"{lost} True", f"{lost} False"]


def _one_fails(peers: Peers, folder: Path) -> str:
    if peers.rank == 1:
        peers.tell_end("no memory is left", "a smaller batch")
        os._exit(7)
    with peers.exchanging():
        torch.distributed.all_reduce(torch.ones(3))
    return "nothing was noticed"


def test_a_process_that_fails_tells_the_others_why(together: Together) -> None:
    expected = "lost: process 2 of 2 failed: no memory is left | a smaller batch | speaks True"
    assert together.start(_one_fails).results() == [expected, "ended 7"]


def _one_is_stopped(peers: Peers, folder: Path) -> str:
    if peers.rank == 1:
        peers.tell_end("stopped", stopped=True)
        return "was asked to stop"
    peers.barrier()
    return "nothing was noticed"


def test_when_one_is_asked_to_stop_the_others_stop_too(together: Together) -> None:
    assert together.start(_one_is_stopped).results() == ["stopped", "was asked to stop"]


def _one_hangs(peers: Peers, folder: Path) -> str:
    gave_up = folder / "gave up"
    if peers.rank == 1:
        while not gave_up.exists():
            time.sleep(0.05)
        return "hung"
    try:
        peers.barrier()
    except PeerLost as err:
        gave_up.touch()
        return str(err)
    return "waited"


def test_a_process_that_hangs_is_not_waited_for(together: Together) -> None:
    said = together.start(_one_hangs, patience=1.5).results()
    assert said[0] == ("process 2 of 2 has not answered for 0.025 minutes (distributed_timeout), so this one does not wait any longer")


def _one_is_slow(peers: Peers, folder: Path) -> str:
    peers._told = -1e9
    for _ in range(17) if peers.rank == 1 else ():
        time.sleep(0.3)
        peers._told = -1e9
        peers.progress()
    peers.barrier()
    return "met"


def test_a_process_that_gets_on_is_waited_for_longer_than_the_limit(together: Together) -> None:
    assert together.start(_one_is_slow, patience=4.0).results() == ["met", "met"]


def _deaf(peers: Peers, folder: Path) -> str:
    exchanges = folder / "exchanges"
    if peers.rank == 1:
        while not exchanges.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    with peers.exchanging():
        exchanges.touch()
        # An exchange that does not return, as those between GPUs do not when one is gone.
        time.sleep(SECONDS)
    return "nothing was noticed"


def test_an_exchange_that_never_returns_is_ended_with_a_last_word(together: Together, tmp_path: Path) -> None:
    assert together.start(_deaf).results() == ["ended 1", "ended -9"]
    assert (tmp_path / "last-0.txt").read_text() == "process 2 of 2 ended without a word: it was killed, or it crashed"


def _other_errors(peers: Peers, folder: Path) -> str:
    try:
        with peers.exchanging():
            torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as err:
        return type(err).__name__
    return "no error"


def test_errors_that_have_nothing_to_do_with_others_pass(together: Together) -> None:
    assert together.start(_other_errors).results() == ["RuntimeError"] * 2


def _shares(peers: Peers, folder: Path) -> str:
    """Three steps of each optimizer on shares, with clipping, an average and a state in the middle, against one whole network."""
    worst = 0.0
    for name in ("AdamW", "Lion", "SGD"):
        torch.manual_seed(1)
        whole = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        shared = copy.deepcopy(whole)
        shard(shared, [], torch.device("cpu"), 2)
        chosen = OptimizerOptions(optimizer_type=name, learning_rate=0.01, optimizer_args=["eps=0.001"] if name == "AdamW" else [])
        networks = {"whole": whole, "shared": shared}
        optimizers = {key: make_optimizer(chosen, [{"params": list(one.parameters()), "lr": 0.01}]) for key, one in networks.items()}
        averages = {key: MovingAverage(dict(one.named_parameters()), 0.9) for key, one in networks.items()}
        for step in range(4):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            norms = []
            for key, one in networks.items():
                mine = x if key == "whole" else x[2 * peers.rank : 2 * peers.rank + 2]
                ((one(mine) - 1).square().sum() / 4).backward()
                gradients = [weight.grad for weight in one.parameters()]
                norms.append(float(total_norm(gradients)))
                torch._foreach_mul_([own(gradient) for gradient in gradients], 0.5)
                optimizers[key].step()
                optimizers[key].zero_grad()
                averages[key].update(step)
            worst = max(worst, abs(norms[0] - norms[1]))
            # Whole, and sharded again: nothing is lost on the way.
            state = gathered(optimizers["shared"].state_dict(), keep=True)
            optimizers["shared"].load_state_dict(sharded_optimizer_state(optimizers["shared"], state))
        found = gathered([dict(shared.named_parameters()), averages["shared"].state_dict(), optimizers["shared"].state_dict()], keep=True)
        wanted = [dict(whole.named_parameters()), averages["whole"].state_dict(), optimizers["whole"].state_dict()]
        pairs = [(found[i][key], wanted[i][key]) for i in (0, 1) for key in wanted[i]]
        pairs += [
            (found[2]["state"][n][key], value) for n, one in wanted[2]["state"].items() for key, value in one.items() if value is not None
        ]
        worst = max([worst, *(float((one - other).abs().max()) for one, other in pairs)])
        held = sum(own(weight).numel() for weight in shared.parameters())
        if held > 0.7 * sum(weight.numel() for weight in whole.parameters()):
            return f"{name}: this process holds {held} numbers"
        with averages["shared"].shown():
            shown = gathered(dict(shared.named_parameters()), keep=True)
        worst = max([worst, *(float((shown[key] - value).abs().max()) for key, value in averages["whole"].state_dict().items())])
    return "as one process" if worst < 1e-5 else f"differs by {worst}"


def test_optimizers_and_averages_work_on_shares_as_on_whole_weights(together: Together) -> None:
    assert together.start(_shares).results() == ["as one process"] * 2


@pytest.mark.parametrize("name", ["Adafactor", "AdamW8bit", "Prodigy", "CAME"])
def test_optimizers_that_need_whole_weights_are_refused(name: str) -> None:
    check_optimizer("AdamW")
    with pytest.raises(OptionError, match=f"{name} cannot work on weights that fsdp2 shards; take AdamW"):
        check_optimizer(name)


class Counting:
    """A store in memory that counts what each thread asks of it."""

    def __init__(self) -> None:
        self.inner, self.calls = torch.distributed.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.inner, name)


def _questions(world: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Questions to the store of one process among `world` living ones: in a barrier at which all others are, and in two looks around."""
    store = Counting()
    everybody = [{"host": str(one), "boot": 0.0, "pid": 1, "born": 0.0} for one in range(world)]
    everybody[rank] = {"host": platform.node(), "boot": psutil.boot_time(), "pid": os.getpid(), "born": psutil.Process().create_time()}
    store.inner.set("processes", json.dumps(everybody))
    for one, about in enumerate(everybody):
        store.inner.set(f"process/{one}", json.dumps(about))
        store.inner.set(f"barrier/1/{one}", "1")
    store.inner.set("barrier/1", "1")
    for name, value in {
        "is_initialized": lambda: True,
        "get_rank": lambda: rank,
        "get_world_size": lambda: world,
        "PrefixStore": lambda *_: store,
    }.items():
        monkeypatch.setattr(torch.distributed, name, value)
    monkeypatch.setattr("sd_scripts.library.parallel.peers._get_default_store", lambda: None)
    monkeypatch.setattr("sd_scripts.library.parallel.peers.LOOK_SECONDS", 1000.0)
    peers = Peers()
    before = store.calls
    peers.barrier()
    within = store.calls - before
    assert peers.lost() is None and peers.lost() is None
    return within, store.calls - before - within


def test_what_a_process_asks_the_store_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1024 processes that ask about each other, the store would answer a million times at every look."""
    assert _questions(1024, 7, monkeypatch) == _questions(8, 7, monkeypatch)
    assert _questions(1024, 0, monkeypatch) == _questions(8, 0, monkeypatch)
    within, looking = _questions(1024, 7, monkeypatch)
    assert within <= 4 and looking <= 4


def test_a_process_alone_waits_for_nobody() -> None:
    peers = Peers()
    peers.barrier()
    peers.progress()
    with peers.exchanging(), peers.first_before_others():
        pass
    peers.tell_end("x")
    peers.leave()
    assert peers.same_text("mine") == "mine" and peers.speaks and peers.is_first and peers.lost() is None


def test_the_backend_follows_from_the_machine() -> None:
    assert backend_of("auto", cuda=True, system="linux") == "nccl"
    assert [backend_of("auto", True, "win32"), backend_of("auto", False, "linux"), backend_of("gloo", True, "linux")] == ["gloo"] * 3
    assert backend_of("nccl", True, "linux") == "nccl"
    for cuda, system in ((True, "win32"), (False, "linux")):
        with pytest.raises(TrainingError, match="use auto or gloo"):
            backend_of("nccl", cuda, system)


def options(**values: Any) -> Any:
    return build(SdxlNetwork, {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", **values}, from_cli=True)


def test_one_process_of_several_is_refused_with_the_command_that_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["script.py", "--config_file", "run one.toml"])
    for values in ({"num_gpus": 2}, {"gpu_ids": ["0", "3"]}):
        with pytest.raises(OptionError, match=r"asks for 2 processes, but one was started.*sdxl_train_network\.py.*'run one\.toml'"):
            check_processes(options(multi_gpu=True, **values))
    check_processes(options(multi_gpu=True))
    check_processes(options())
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(options(multi_gpu=True, num_gpus=2))
    check_processes(options())


def test_accumulation_follows_from_the_global_batch_and_the_processes() -> None:
    def steps(processes: int, **values: Any) -> int:
        return int(with_global_batch(options(**values), processes).training.gradient_accumulation_steps)

    asked = {"global_batch_size": 12, "train_batch_size": 2}
    assert [steps(processes, **asked) for processes in (1, 2, 3, 6)] == [6, 3, 2, 1]
    assert steps(2, gradient_accumulation_steps=5) == 5, "without it nothing is changed"
    with pytest.raises(OptionError) as caught:
        steps(4, **asked)
    assert "12 samples cannot be shared evenly by 4 processes with train_batch_size 2" in str(caught.value)
    assert "the nearest that can are 8 and 16, or train_batch_size 1, 3" in str(caught.value)
