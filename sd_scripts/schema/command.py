"""The one command that trains a run: what Start runs, what Print shows, what a terminal takes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from .runs import RunOptions

SCRIPTS = Path(__file__).resolve().parent.parent
"""Folder of the scripts that accelerate launches."""


def launch_command(options: RunOptions, run_dir: Path | None = None, config: Path | None = None) -> list[str]:
    """The argument list of `accelerate launch` for these options.

    config is the TOML file to read, run_dir/config.toml when only run_dir is given. accelerate gets each of its own settings
    explicitly, since it warns about every one that is left out; precision is the script's business (mixed_precision in the file).
    """
    if config is None and run_dir is not None:
        config = run_dir / "config.toml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", cpu_threads(), str(SCRIPTS / options.script)]
    if config is not None:
        command += ["--config_file", str(config)]
    if run_dir is not None:
        command += ["--run_dir", str(run_dir)]
    return command


def cpu_threads() -> str:
    """Threads of a training process on the CPU: OMP_NUM_THREADS where the person has set it, else one core less than there are.

    Threads that share their work evenly wait for the slowest: when all cores are taken, any other program (a browser that watches the
    run) makes a step up to 100 times slower.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return asked if asked.isdigit() and int(asked) > 0 else str(max(1, (os.cpu_count() or 1) - 1))


def shown(command: list[str], shell: str = "sh") -> str:
    """The command as one line to paste: shell is `sh` (Linux, macOS) or `powershell` (Windows)."""
    if shell == "sh":
        return shlex.join(command)
    if shell == "powershell":
        return "& " + " ".join(_powershell(argument) for argument in command)
    return subprocess.list2cmdline(command)


def _powershell(argument: str) -> str:
    """A PowerShell word: in single quotes nothing is special but the quote itself, which is doubled."""
    safe = argument and all(letter.isalnum() or letter in "-_./\\:=+" for letter in argument) and not argument.startswith("@")
    return argument if safe else "'" + argument.replace("'", "''") + "'"
