"""The one command that trains a run: what Start runs, what Print shows, what a terminal takes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from sd_scripts.schema.distributed import DistributedOptions
from sd_scripts.schema.runs import RunOptions

from . import gpus

SCRIPTS = Path(__file__).resolve().parent.parent
"""Folder of the scripts that a launcher starts."""
OWN_LAUNCHER = SCRIPTS / "train_multi_gpu.py"
NEUTRAL = SCRIPTS / "runs" / "accelerate.json"
"""Read by accelerate instead of a file in the user's home, which would change what the command means."""


def launch_command(options: RunOptions, run_dir: Path | None = None, config: Path | None = None) -> list[str]:
    """The argument list that trains these options on this machine; launch_environment belongs to it.

    config is the TOML file to read, run_dir/config.toml when only run_dir is given. Precision is the script's business
    (mixed_precision in the file).
    """
    if config is None and run_dir is not None:
        config = run_dir / "config.toml"
    script = [str(SCRIPTS / options.script)]
    script += ["--config_file", str(config)] if config is not None else []
    script += ["--run_dir", str(run_dir)] if run_dir is not None else []
    distributed = options.distributed
    if distributed.launcher == "filestore":
        own = [sys.executable, str(OWN_LAUNCHER), "--num_processes", str(processes_here(distributed))]
        return [*own, *_restarts(distributed), *script]
    launch = _torchrun(distributed) if distributed.launcher == "torchrun" else _accelerate(distributed)
    if distributed.max_restarts:
        # Restarts of torchrun itself meet dead peers again; from outside everything begins afresh.
        return [sys.executable, str(OWN_LAUNCHER), "--command", *_restarts(distributed), *launch, *script]
    return [*launch, *script]


def launch_environment(options: RunOptions) -> dict[str, str]:
    """Environment variables that belong to launch_command; empty for one process on a GPU that nobody chose."""
    distributed = options.distributed
    values: dict[str, str] = {}
    if distributed.gpu_ids:
        values |= visible_gpus(distributed.gpu_ids)
    if processes_here(distributed) > 1:
        values["OMP_NUM_THREADS"] = cpu_threads(processes_here(distributed))
    if os.name == "nt" and distributed.multi_gpu and distributed.launcher != "filestore":
        # torch for Windows is built without libuv, which its TCP store takes by default.
        values["USE_LIBUV"] = "0"
    return values


def visible_gpus(names: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Environment that shows CUDA these GPUs only, numbered as the driver and nvidia-smi number them."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(names)}


def processes_here(distributed: DistributedOptions) -> int:
    """Processes on this machine: num_gpus, or one for each of gpu_ids, or one for each GPU that is there.

    One without multi_gpu, and on a machine without an NVIDIA GPU unless num_gpus says more.
    """
    if not distributed.multi_gpu:
        return 1
    return distributed.num_gpus or len(distributed.gpu_ids) or len(gpus.visible()) or 1


def _accelerate(distributed: DistributedOptions) -> list[str]:
    """accelerate launch with each of its settings given, since it warns about every one that is left out."""
    here = processes_here(distributed)
    everywhere = here * distributed.num_machines
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(NEUTRAL)]
    command += ["--multi_gpu"] if everywhere > 1 else []
    command += ["--num_processes", str(everywhere), "--num_machines", str(distributed.num_machines)]
    if everywhere > 1:
        command += ["--machine_rank", str(distributed.machine_rank), "--rdzv_backend", "static", "--same_network"]
        command += ["--main_process_ip", distributed.main_process_ip or "127.0.0.1"]
        command += ["--main_process_port", str(distributed.main_process_port)]
        command += ["--gpu_ids", ",".join(distributed.gpu_ids) or "all"]
    return [*command, "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", cpu_threads(here)]


def _torchrun(distributed: DistributedOptions) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes_here(distributed))]
    if distributed.num_machines == 1 and distributed.main_process_port == 0:
        return [*command, "--standalone"]
    command += ["--nnodes", str(distributed.num_machines), "--node_rank", str(distributed.machine_rank)]
    address = distributed.main_process_ip or "127.0.0.1"
    return [*command, "--master_addr", address, "--master_port", str(distributed.main_process_port)]


def _restarts(distributed: DistributedOptions) -> list[str]:
    # Whatever the first start began from, the next ones go on from what it saved.
    return ["--max_restarts", str(distributed.max_restarts), "--restart_with=--resume auto"] if distributed.max_restarts else []


def cpu_threads(processes: int = 1) -> str:
    """Threads of a training process on the CPU: OMP_NUM_THREADS where the person has set it.

    Else one process gets one core less than there are, and several share all evenly. Threads that share their work evenly wait for the
    slowest: when all cores are taken, any other program (a browser that watches the run) makes a step up to 100 times slower, and so do
    processes that each take all cores.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return asked
    cores = os.cpu_count() or 1
    return str(max(1, cores - 1 if processes == 1 else cores // processes))


def shown(command: list[str], shell: str = "sh", environment: Mapping[str, str] | None = None) -> str:
    """The command as one line to paste, its environment in front: shell is `sh` (Linux, macOS) or `powershell` (Windows)."""
    values = environment or {}
    if shell == "sh":
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in values.items()), shlex.join(command)])
    settings = "".join(f"$env:{name}={_quoted(value)}; " for name, value in values.items())
    return settings + "& " + " ".join(_powershell(argument) for argument in command)


def _powershell(argument: str) -> str:
    """A PowerShell word: in single quotes nothing is special but the quote itself, which is doubled."""
    safe = argument and all(letter.isalnum() or letter in "-_./\\:=+" for letter in argument) and not argument.startswith("@")
    return argument if safe else _quoted(argument)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
