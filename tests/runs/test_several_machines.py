"""Two hosts that are two network namespaces of this machine: commands for several machines, and a network that breaks on the way."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sd_scripts.families import RUNS
from sd_scripts.library.train.launch import main
from sd_scripts.runs.cluster import ClusterSection, files
from sd_scripts.runs.command import SCRIPTS, launch_command, launch_environment, shown
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.runs import RunOptions
from tests.forked import forked

PORT = 29517
WIRE = "wire0"
CLONE_NEWUTS = 0x04000000
PATIENCE_SECONDS = 240.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class TwoHosts:
    """Two network namespaces with nothing but a wire between them; the disk is the same. Host 0 has the first address."""

    def __init__(self) -> None:
        self.names = [f"host{number}-{os.getpid()}" for number in (0, 1)]
        self.addresses = [f"10.213.{os.getpid() % 200}.{number}" for number in (1, 2)]
        self.started: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", WIRE, "netns", self.names[0], "type", "veth", "peer", "name", WIRE, "netns", self.names[1])
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", WIRE)
            ip("-n", name, "link", "set", WIRE, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def start(self, host: int, command: list[str], said: Path) -> subprocess.Popen[str]:
        """Runs a command on a host; what it says goes to a file."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": WIRE, "CUDA_VISIBLE_DEVICES": ""}
        with said.open("w") as output:
            # With a host name of its own, so that nobody there looks for the other's processes among those of this machine.
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[host]]
            words = ["ip", "netns", "exec", self.names[host], *named, *command]
            started = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
        self.started.append(started)
        return started

    def cut_the_wire(self) -> None:
        ip("-n", self.names[1], "link", "set", WIRE, "down")

    def mend_the_wire(self) -> None:
        ip("-n", self.names[1], "link", "set", WIRE, "up")

    def pids(self, host: int) -> list[int]:
        told = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in told.stdout.split()]

    def end(self) -> None:
        """Ends whatever still runs on the hosts and takes them away."""
        for host, name in enumerate(self.names):
            for pid in self.pids(host):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for process in self.started:
            process.wait(30)


def why_no_hosts() -> str:
    """Why this machine gives no network namespaces; empty when it does."""
    probe = f"probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
        ip("netns", "del", probe)
    except FileNotFoundError:
        return "iproute2 is not installed"
    except subprocess.CalledProcessError as err:
        return f"no network namespaces here: {err.stderr.strip()}"
    return ""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if reason := why_no_hosts():
        pytest.skip(f"needs network namespaces: {reason}")
    made = TwoHosts()
    try:
        made.connect()
        yield made
    finally:
        made.end()


SAME: dict[str, Any] = {
    "max_train_steps": 6,
    "save_state_every_n_steps": 2,
    "save_last_n_states": 99,
    "lr_scheduler": "constant",
    # Plain steps along the gradient: an optimizer that divides by the gradient's size makes rounding errors as large as its steps.
    "optimizer_type": "SGD",
    "learning_rate": 2.0,
    "shuffle_caption": True,
}


def options_of(runs: Any, **values: Any) -> RunOptions:
    return flat.with_absolute_paths(command_line.parse_cli(RUNS[runs.family, runs.method], runs.arguments(**values)).options)


def difference(a: Path, b: Path) -> float:
    first, second = (load_file(path / "weights.safetensors") for path in (a, b))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def printed(hosts: TwoHosts, options: RunOptions, folder: Path, launcher: str) -> list[list[str]]:
    """What Print shows for each of the machines, as a person pastes it."""
    lines = []
    for rank in (0, 1):
        several = {"multi_gpu": True, "num_gpus": 1, "num_machines": 2, "machine_rank": rank, "launcher": launcher}
        several |= {"main_process_ip": hosts.addresses[0], "main_process_port": PORT}
        values = {name: value for name, value in {**flat.flatten(options), **several}.items() if value is not None}
        mine = flat.build(type(options), values)
        config = folder / f"machine{rank}.toml"
        config.write_text(toml_files.to_toml(mine), encoding="utf-8")
        line = shown(launch_command(mine, config=config), environment=launch_environment(mine))
        lines.append(["bash", "-c", line])
    return lines


def ended(processes: list[subprocess.Popen[str]], logs: list[Path]) -> list[int]:
    """Exit codes of all, once all have ended."""
    end = time.monotonic() + PATIENCE_SECONDS
    for process in processes:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError("".join(path.read_text()[-3000:] for path in logs)) from None
    return [process.returncode for process in processes]


SAY = """
import json, os, sys
with open(sys.argv[2] + ".said", "w") as file:
    json.dump([dict(os.environ), sys.argv[1:]], file)
"""


def train_on(host: str, environment: dict[str, str], console: str, family: str, method: str, arguments: list[str]) -> None:
    """Trains on a host with the environment that a launcher has made there."""
    libc = ctypes.CDLL(None)
    with open(f"/var/run/netns/{host}") as place:
        assert libc.setns(place.fileno(), 0) == 0 and libc.unshare(CLONE_NEWUTS) == 0
    socket.sethostname(host)
    # The store of the launcher has ended with it; the first process keeps one of its own.
    os.environ |= environment | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    handle = os.open(console, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    main(family, method, arguments)


def test_what_the_printed_commands_tell_two_machines_is_enough_to_train_what_one_trains(runs: Any, hosts: TwoHosts, tmp_path: Path) -> None:
    """The launchers run a script that says what it was told; with this, processes that have the libraries train. Whole in the long test."""
    options = options_of(runs, train_batch_size=1, **SAME)
    logs = [tmp_path / "host 0.log", tmp_path / "host 1.log"]
    (tmp_path / "say.py").write_text(SAY)
    script = shlex.quote(str(SCRIPTS / RUNS[runs.family, runs.method].script))
    lines = [
        [*words, line.replace(script, shlex.quote(str(tmp_path / "say.py")))]
        for *words, line in printed(hosts, options, tmp_path, "accelerate")
    ]
    assert ended([hosts.start(host, lines[host], logs[host]) for host in (0, 1)], logs) == [0, 0], "".join(
        path.read_text() for path in logs
    )
    told = [json.loads((tmp_path / f"machine{rank}.toml.said").read_text()) for rank in (0, 1)]
    processes = [
        forked(train_on, name, environment, str(log), runs.family, runs.method, arguments)
        for name, log, (environment, arguments) in zip(hosts.names, logs, told, strict=True)
    ]
    for process in processes:
        process.join(PATIENCE_SECONDS)
    assert [process.exitcode for process in processes] == [0, 0], "".join(path.read_text()[-4000:] for path in logs)
    compare_with_one(runs)


def compare_with_one(runs: Any) -> None:
    assert len(runs.folders()) == 1, "both machines write one folder"
    two = runs.newest()
    runs.output = runs.output.parent / "one"
    one = runs.train(train_batch_size=2, **SAME)
    assert difference(one.state / "000002", one.state / "000006") > 1e-3, "it trains at all"
    assert difference(two.state / "000006", one.state / "000006") < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_the_printed_commands_of_two_machines_train_what_one_trains(runs: Any, hosts: TwoHosts, tmp_path: Path, launcher: str) -> None:
    options = options_of(runs, train_batch_size=1, **SAME)
    logs = [tmp_path / "host 0.log", tmp_path / "host 1.log"]
    lines = printed(hosts, options, tmp_path, launcher)
    started = [hosts.start(host, lines[host], logs[host]) for host in (0, 1)]
    assert ended(started, logs) == [0, 0], "".join(path.read_text()[-4000:] for path in logs)
    compare_with_one(runs)


def exported(hosts: TwoHosts, options: RunOptions, run_dir: Path, folder: Path) -> list[list[str]]:
    """The scripts of Export for cluster, for each host; they are told where the run lies."""
    cluster = ClusterSection(
        kind="torchrun",
        machines=2,
        gpus_per_machine=0,
        main_address=hosts.addresses[0],
        port=PORT,
        network_interface=WIRE,
        python=sys.executable,
        run_dir=str(run_dir),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(options, cluster).items():
        (folder / name).write_text(text, encoding="utf-8")
    return [["bash", str(folder / f"host{rank}.sh")] for rank in (0, 1)]


def wait_until(seen: Callable[[], bool], processes: list[subprocess.Popen[str]], seconds: float = PATIENCE_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "the moment did not come"
        assert any(process.poll() is None for process in processes), "all ended before the moment came"
        time.sleep(0.01)


def last_words(run: RunDirectory) -> list[tuple[str, str]]:
    return [(event["kind"], event.get("text", "")) for event in run.events()[0] if event["kind"] in ("finished", "stopped", "failed")]


@pytest.mark.long
def test_a_machine_that_is_cut_off_ends_the_run_with_a_sentence_and_it_goes_on_to_the_same_bits(
    runs: Any, hosts: TwoHosts, tmp_path: Path
) -> None:
    values = {**SAME, "max_train_steps": 60, "save_state_every_n_steps": 10, "distributed_timeout": 1, "train_batch_size": 1}
    options = options_of(runs, **values)
    logs = [tmp_path / "host 0.log", tmp_path / "host 1.log"]
    left_alone, cut_off = RunDirectory(runs.output / "left alone"), RunDirectory(runs.output / "cut off")

    lines = exported(hosts, options, left_alone.path, tmp_path / "files of one")
    started = [hosts.start(host, lines[host], logs[host]) for host in (0, 1)]
    assert ended(started, logs) == [0, 0], "".join(path.read_text()[-4000:] for path in logs)

    lines = exported(hosts, options, cut_off.path, tmp_path / "files of the other")
    started = [hosts.start(host, lines[host], logs[host]) for host in (0, 1)]
    wait_until(lambda: any(event["kind"] == "step" and event["step"] >= 12 for event in cut_off.events()[0]), started)
    hosts.cut_the_wire()
    codes = ended(started, logs)
    assert 0 not in codes
    (kind, sentence) = last_words(cut_off)[-1]
    assert kind == "failed" and "process 2 of 2" in sentence, sentence
    assert all(hosts.pids(host) == [] for host in (0, 1)), "nothing is left behind"
    assert not (cut_off.path / "lora.safetensors").exists()

    hosts.mend_the_wire()
    started = [hosts.start(host, lines[host], logs[host]) for host in (0, 1)]
    assert ended(started, logs) == [0, 0], "".join(path.read_text()[-4000:] for path in logs)
    starts = [event["start_step"] for event in cut_off.events()[0] if event["kind"] == "started"]
    assert starts[0] == 0 and starts[1] >= 10
    end = "000060/weights.safetensors"
    assert (cut_off.state / end).read_bytes() == (left_alone.state / end).read_bytes()
