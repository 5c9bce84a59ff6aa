"""Processes forked from a server that has the libraries in it: starting Python anew, each would import them for seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import huggingface_hub.constants


def forked(target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Starts a process that calls target, a function of a module; does not wait for it."""
    # Threads of a tiny model cost more than they bring, and the server hands its environment down.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def forked_script(
    file: Path, arguments: Sequence[str], console: Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> BaseProcess:
    """Starts a process that runs a file as `python file arguments` does in a folder, what it says going to the file console.

    Does not wait for it.
    """
    return forked(_run_script, str(file), list(arguments), str(console), dict(environment or {}), str(folder or Path.cwd()))


def said_by_script(file: Path, arguments: Sequence[str], folder: Path, patience_seconds: float = 240.0) -> tuple[int | None, str]:
    """Exit code of such a process, and all that it said."""
    with tempfile.TemporaryDirectory() as aside:
        console = Path(aside) / "console.txt"
        process = forked_script(file, arguments, console, folder=folder)
        process.join(patience_seconds)
        return process.exitcode, console.read_text(encoding="utf-8")


def _run_script(file: str, arguments: list[str], console: str, environment: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    handle = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if environment:
        os.environ |= environment
        # It is the one that reads variables while it is imported, and the server has imported it.
        importlib.reload(huggingface_hub.constants)
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")
