"""The direct child of the studio for each run: starts the training, passes signals on, writes exit.json when it ends.

Run by path with nothing but the standard library, so that it starts at once and outlives the studio:
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


def run(folder: Path, argv: list[str]) -> int:
    """Runs the command to its end and leaves `exit.json` {returncode, run_id}.

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
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as err:
        sys.stderr.write(f"The training cannot be started: {argv[0]}: {err.strerror}\n")
        returncode = 127
    else:
        for number in early:
            child.send_signal(number)
        returncode = child.wait()
    aside = folder / f".exit.json.{os.getpid()}"
    with aside.open("w", encoding="utf-8") as file:
        json.dump({"returncode": returncode, "run_id": os.environ.get("KOHYA_LIKE_RUN_ID", "")}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / "exit.json")
    return returncode


if __name__ == "__main__":
    code = run(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
