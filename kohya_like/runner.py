"""The direct child of the studio for each run: starts the training, passes signals on, writes exit.json, and ends what was left behind.

Run by path with nothing but the standard library until the end, so that it starts at once and outlives the studio:
`python -P runner.py RUN_FOLDER COMMAND...`. It leads a session of its own; output goes where the studio pointed it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

RUNNER = "KOHYA_LIKE_RUNNER"
"""Environment variable with our pid, for everything that we start."""
GRACE_SECONDS = 60.0
"""A training whose launcher was killed gets this long to save."""


def run(folder: Path, argv: list[str]) -> int:
    """Runs the command to its end and leaves `exit.json` {returncode, run_id}; `launcher.json` {pid, run_id} tells what was started.

    A negative returncode is a signal, 127 a command that cannot be started.
    """
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        early.append(number) if child is None else child.send_signal(number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), forward)
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**os.environ, RUNNER: str(os.getpid())})
    except OSError as err:
        sys.stderr.write(f"The training cannot be started: {argv[0]}: {err.strerror}\n")
        returncode = 127
    else:
        for number in early:
            child.send_signal(number)
        _write(folder / "launcher.json", {"pid": child.pid})
        returncode = child.wait()
    _write(folder / "exit.json", {"returncode": returncode})
    _end_left()
    return returncode


def _write(file: Path, values: dict[str, int]) -> None:
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as stream:
        json.dump({**values, "run_id": _run_id()}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)


def _run_id() -> str:
    return os.environ.get("KOHYA_LIKE_RUN_ID", "")


def _end_left() -> None:
    """A launcher that was killed leaves its ranks behind, and a rank its data workers."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from sd_scripts.runs.process_trees import RUN_ID, end_left

    if _run_id():
        stuck = end_left(RUN_ID, _run_id(), GRACE_SECONDS, without=[os.getpid()])
        if stuck:
            sys.stderr.write("These processes cannot be ended: " + ", ".join(str(process.pid) for process in stuck) + "\n")


if __name__ == "__main__":
    code = run(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
