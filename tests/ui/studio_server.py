"""A process with the studio's libraries in it that forks a studio for each order: starting gui.py anew imports them for three seconds.

It reads an order a line, as JSON: arguments, folder, log, environment, the Python of its scripts. It answers each with the studio's
process id.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import warnings
from typing import Any

import pynvml

import gui
from kohya_like import startup


def collect(*_: object) -> None:
    """Takes the ends of studios, so that none stays a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def run(order: dict[str, Any]) -> int:
    """What `python gui.py` does, in a process that was forked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handle = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (handle, 1), (handle, 2)):
        os.dup2(source, target)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if given := order["environment"].get("PYTHONPATH"):
        sys.path[:0] = given.split(os.pathsep)
        # A stand-in for the driver may lie there.
        importlib.reload(pynvml)
    sys.executable = order["python"]
    warnings.simplefilter("error", ResourceWarning)
    return gui.main(order["arguments"])


def main() -> int:
    startup.prepare()
    import kohya_like.app  # noqa: F401
    from kohya_like import page

    # What is the same for each studio.
    page.head()
    for name in page.modules():
        page._packed(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, collect)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return run(json.loads(line))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
