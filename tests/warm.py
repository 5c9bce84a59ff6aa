"""A `python` for what a studio starts: scripts that load torch run in a process forked from one that has it already.

The file `warm_python` writes stands in the place of Python in a command line. It hands arguments, environment, folder, inputs and outputs
to a server, which forks; it takes signals on and ends as the script ends, and a script whose file is killed is killed, too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import huggingface_hub.constants

from tests.trees import ROOT

PROGRAM = f"""#!{sys.executable} -SE
import json, os, signal, socket, sys
words = sys.argv[1:]
if not (words[0].startswith({str(ROOT / "sd_scripts") + os.sep!r}) or words[:2] == ["-m", "accelerate.commands.launch"]):
    os.execv(sys.executable, [sys.executable, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({{address!r}})
socket.send_fds(server, [b"-"], [0, 1, 2])
order = dict(words=words, python=os.path.abspath(__file__), folder=os.getcwd(), environment=dict(os.environ))
server.sendall(json.dumps(order).encode() + b"\\n")
nothing = os.open(os.devnull, os.O_RDWR)
for number in (0, 1):
    os.dup2(nothing, number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _frame: server.sendall(bytes([number])))
code = int(server.makefile().readline() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def program(folder: Path) -> tuple[Path, str]:
    """Writes the file that stands in Python's place; gives it, and the address where the server is to listen."""
    # An address of a socket may have 107 characters.
    file, address = folder / "python", str(folder / "s")
    file.write_text(PROGRAM.format(address=address), encoding="utf-8")
    file.chmod(0o755)
    return file, address


def serve(address: str) -> None:
    """Forks a process for each order, and one that watches over it; ends when it is told to."""

    def collect(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue

    signal.signal(signal.SIGCHLD, collect)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(16)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                os._exit(watch(connection))
            connection.close()


def watch(connection: socket.socket) -> int:
    """Starts what is ordered, hands signals on, and tells how it ended."""
    _, handles, _, _ = socket.recv_fds(connection, 1, 3)
    stream = connection.makefile("rb", buffering=0)
    order = json.loads(stream.readline())
    pid = os.fork()
    if pid == 0:
        os._exit(run(order, handles))
    for handle in handles:
        os.close(handle)
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        if ready:
            # Nothing more comes from one that was killed.
            number = connection.recv(1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number[0] if number else signal.SIGKILL)
            if not number:
                break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    return 0


def run(order: dict[str, Any], handles: list[int]) -> int:
    """What `python words` does, in this process; its exit code."""
    os.setsid()
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, encoding="utf-8", closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    importlib.reload(huggingface_hub.constants)
    sys.executable = order["python"]
    words = order["words"]
    code: object = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return int(code or 0)  # type: ignore[call-overload, no-any-return]
