"""Long runs of the tests, a folder at a time; what has passed on the tree as it is now is not run again."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.trees import ENVIRONMENT, ROOT, Results, tracked

TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""How pytest uses the processors: a file's tests stay together, because they share fixtures; long files first, see conftest.py."""
BUSY_TIMES = 10
NUM_OTHERS = 2
"""Other processes that compute in a busy run: one a core on a small machine."""
_OTHER = "while True: sum(range(100_000))"


def folders(wanted: Sequence[str] = ()) -> dict[str, list[str]]:
    """Tests by their folder, its sub-folders apart."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        found.setdefault(file.parent.relative_to(ROOT).as_posix(), []).append(file.relative_to(ROOT).as_posix())
    unknown = [name for name in wanted if name.rstrip("/") not in found]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: no folders with tests; there are {', '.join(found)}")
    return {name: files for name, files in found.items() if not wanted or name in {each.rstrip("/") for each in wanted}}


@contextmanager
def busy_machine() -> Iterator[None]:
    """Other processes compute while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", _OTHER]) for _ in range(NUM_OTHERS)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tested(files: Sequence[str], marks: str) -> dict[str, Any]:
    """Runs these files; what they say goes to the console."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", *TWO_AT_ONCE, "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    said = ""
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said += line
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    # 5: no test was left, such as in a folder whose tests all take minutes.
    return {"passed": process.returncode in (0, 5), "failed": failed, "seconds": round(time.monotonic() - begun)}


def run(kind: str, wanted: Sequence[str], times: int, marks: str) -> int:
    """Runs each folder as often as it has not passed yet; the exit code says whether all have."""
    results = Results(kind, tracked())
    broken = []
    for number in range(1, times + 1):
        for folder, files in folders(wanted).items():
            name = f"{folder} {number}" if times > 1 else folder
            row = results.rows().get(name)
            if row is None or not row["passed"]:
                print(f"\n== {name}", flush=True)
                row = {"name": name, **tested(files, marks)}
                results.add(row)
            if not row["passed"]:
                broken += [name, *row["failed"]]
    rows = results.rows().values()
    passed, seconds = sum(row["passed"] for row in rows), sum(row["seconds"] for row in rows)
    print(f"\n{passed} of {len(rows)} passed, {seconds} s; {results.file.relative_to(ROOT)}")
    print("\n".join(broken))
    return 1 if broken else 0


def everything(wanted: Sequence[str]) -> int:
    """Every test of these folders, or of all, once."""
    return run("all", wanted, 1, "")


def busy(wanted: Sequence[str]) -> int:
    """The tests that always run, BUSY_TIMES each folder, on a machine that does other things too."""
    with busy_machine():
        return run("busy", wanted, BUSY_TIMES, "not long")
