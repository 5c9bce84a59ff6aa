"""The command of a run: what every launcher is told, and that the line a person pastes means the same."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.runs import gpus
from sd_scripts.runs.command import OWN_LAUNCHER, cpu_threads, launch_command, launch_environment, processes_here, shown
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.command_line import parse_cli
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build
from sd_scripts.schema.runs import RunOptions

VALUES = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_name": "my cat's lora"}
LAUNCHERS = ("accelerate", "torchrun", "filestore")
PROBE = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
# One write: the processes share a terminal.
names += ["ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"]
os.write(1, (json.dumps({**{name: os.environ.get(name) for name in names}, "argv": sys.argv[1:]}) + "\\n").encode())
"""


def options(**values: object) -> RunOptions:
    return build(SdxlNetwork, {**VALUES, **values})


def after(command: list[str], name: str) -> str:
    """The word after a flag of the launcher; its last occurrence before the script's own."""
    return command[command.index(name) + 1]


@pytest.fixture
def configured_home(tmp_path: Path) -> Path:
    """A user's folder in which accelerate finds a configuration that differs in everything."""
    home = tmp_path / "home"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 3\nnum_machines: 2\n"
        "machine_rank: 1\ngpu_ids: '5'\nmain_process_ip: 10.1.2.3\nmain_process_port: 1234\nuse_cpu: false\ndebug: true\n"
        "dynamo_config: {dynamo_backend: INDUCTOR}\nfsdp_config: {fsdp_version: 2}\n"
    )
    return home


@pytest.fixture
def probed(tmp_path: Path) -> Callable[..., list[dict[str, object]]]:
    """What processes see that the printed line starts in bash, sorted by rank; a probe stands in the place of the script."""
    probe = tmp_path / "a probe's folder" / "probe.py"
    probe.parent.mkdir()
    probe.write_text(PROBE)

    def run(asked: RunOptions, home: Path = tmp_path) -> list[dict[str, object]]:
        script = next(word for word in launch_command(asked) if word.endswith(asked.script))
        config = tmp_path / "it's a config.toml"
        command = [str(probe) if word == script else word for word in launch_command(asked, config=config)]
        line = shown(command, environment=launch_environment(asked))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "OMP_", "CUDA_"))}
        done = subprocess.run(["bash", "-c", line], env={**kept, "HF_HOME": str(home)}, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert "were not passed" not in done.stderr, "accelerate found a setting that was not given"
        said = [json.loads(text.removeprefix("[rank 1] ")) for text in (done.stdout + done.stderr).splitlines() if '"RANK"' in text]
        assert all(each["argv"] == ["--config_file", str(config)] for each in said)
        return sorted(said, key=lambda each: int(each["RANK"] or 0))

    return run


def test_the_printed_command_is_the_command_for_sh(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a folder's name", "lora", options())
    command = launch_command(options(), run.path)
    assert shlex.split(shown(command)) == command
    echoed = subprocess.run(["sh", "-c", f'printf "%s\\n" {shown(command)}'], capture_output=True, text=True, check=True).stdout
    assert echoed.splitlines() == command
    script = command.index(next(part for part in command if part.endswith("sdxl_train_network.py")))
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert parse_cli(SdxlNetwork, command[script + 1 :]).options == options()


@pytest.mark.parametrize("text", ["plain-1.5", "with space", "it's", 'a$b `c` "d"', "", "@args", "x;y|z", "C:\\a b\\c"])
def test_powershell_words_are_literal(text: str) -> None:
    word = shown(["x", text], "powershell").removeprefix("& x ")
    if word.startswith("'"):
        assert word.endswith("'") and word[1:-1].replace("''", "'") == text and word[1:-1].count("'") % 2 == 0
    else:
        assert word == text and not set(text) & set(" '\"`$;|&(){}<>,#")


def test_the_environment_stands_in_front() -> None:
    values = {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b c"}
    assert shown(["x"], "sh", values) == "CUDA_VISIBLE_DEVICES=0,1 A='b c' x"
    assert shown(["x"], "powershell", values) == "$env:CUDA_VISIBLE_DEVICES='0,1'; $env:A='b c'; & x"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_printed_line_starts_two_processes_whatever_is_configured_at_home(
    launcher: str, configured_home: Path, probed: Callable[..., list[dict[str, object]]]
) -> None:
    asked = options(multi_gpu=True, launcher=launcher, gpu_ids=["1", "0"])
    said = probed(asked, configured_home)
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in said] == [
        ("0", "0", "2", "2"),
        ("1", "1", "2", "2"),
    ]
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    assert {(each["OMP_NUM_THREADS"], each["CUDA_VISIBLE_DEVICES"], each["CUDA_DEVICE_ORDER"]) for each in said} == {
        (threads, "1,0", "PCI_BUS_ID")
    }


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_configuration_in_the_users_home_changes_nothing(several: bool, configured_home: Path, probed: Callable[..., object]) -> None:
    asked = options(multi_gpu=several, num_gpus=2 * several)
    assert probed(asked, configured_home) == probed(asked)


def test_one_process_is_what_it_always_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = launch_command(options())
    assert launch_environment(options()) == {}
    assert "--multi_gpu" not in command and after(command, "--num_processes") == "1" and after(command, "--num_machines") == "1"
    assert after(command, "--num_cpu_threads_per_process") == str(max(1, (os.cpu_count() or 1) - 1))
    chosen = launch_environment(options(gpu_ids=["GPU-1a2b"]))
    assert chosen == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-1a2b"}


def test_accelerate_counts_processes_of_all_machines_and_torchrun_those_of_one() -> None:
    values = {"multi_gpu": True, "num_gpus": 4, "num_machines": 3, "machine_rank": 2, "main_process_ip": "10.0.0.1"}
    command = launch_command(options(**values, main_process_port=29500))
    assert after(command, "--num_processes") == "12" and after(command, "--num_machines") == "3" and after(command, "--machine_rank") == "2"
    assert after(command, "--main_process_ip") == "10.0.0.1" and after(command, "--main_process_port") == "29500"
    command = launch_command(options(**values, main_process_port=29500, launcher="torchrun"))
    assert after(command, "--nproc_per_node") == "4" and after(command, "--nnodes") == "3" and after(command, "--node_rank") == "2"
    assert after(command, "--master_addr") == "10.0.0.1" and after(command, "--master_port") == "29500"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_restarts_are_done_from_outside_and_go_on_from_what_was_saved(launcher: str) -> None:
    values = {"multi_gpu": True, "num_gpus": 2, "launcher": launcher, "resume": "none"}
    once, again = launch_command(options(**values)), launch_command(options(**values, max_restarts=3))
    assert again[1] == str(OWN_LAUNCHER) and after(again, "--max_restarts") == "3" and "--restart_with=--resume auto" in again
    # The launcher itself is told nothing of restarts: its command is the one of a run without.
    told = [word for word in again if word not in (str(OWN_LAUNCHER), "--command", "--max_restarts", "3", "--restart_with=--resume auto")]
    assert told[told.index("-m") :] == once[1:] if launcher != "filestore" else told == [word for word in once if word != str(OWN_LAUNCHER)]
    assert "--max_restarts" not in once


def test_processes_are_as_many_as_asked_or_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    count = lambda **values: processes_here(options(**values).distributed)  # noqa: E731
    assert (count(), count(multi_gpu=True), count(multi_gpu=True, num_gpus=2), count(multi_gpu=True, gpu_ids=["0", "1"])) == (1, 3, 2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (count(multi_gpu=True), count(multi_gpu=True, num_gpus=2)) == (1, 2), "no GPU: one, unless more are asked for"


def test_threads_are_shared_between_processes_unless_the_person_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (cpu_threads(), cpu_threads(4), cpu_threads(48)) == ("23", "6", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert (cpu_threads(), cpu_threads(4)) == ("5", "5")


def test_two_names_of_one_gpu_are_equal() -> None:
    known = ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000"]
    assert gpus.same_names(["1", "gpu-AAAA", "GPU-bbbb2222-0000", "7", "MIG-x"], known) == [known[1], known[0], known[1], "7", "MIG-x"]


def test_numbers_and_uuids_of_gpus_are_not_mixed() -> None:
    with pytest.raises(OptionError, match="mixes numbers with UUIDs"):
        options(multi_gpu=True, gpu_ids=["0", "GPU-1a2b"])
