"""Long runs of the tests, a folder at a time; what has passed on the tree as it is now is not run again."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from tests.trees import ENVIRONMENT, ROOT, Results, tracked

TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""How pytest uses the processors: a file's tests stay together, because they share fixtures; long files first, see conftest.py."""
BUSY_TIMES = 10
BESIDE_ONE_ANOTHER = 3
"""Folders that are tested at once in a busy run, each by one process: beside each of them two others compute, one a core on a small
machine."""
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


def _say(text: str) -> None:
    """Prints lines whole: print() writes the end of the last one apart, and what another thread says could come before it."""
    print(f"{text}\n", end="", flush=True)


def tested(files: Sequence[str], marks: str, several: bool) -> dict[str, Any]:
    """Runs these files; what they say goes to the console, at their end where several run at once."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", *(() if several else TWO_AT_ONCE), "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    said = ""
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if not several:
                print(line, end="", flush=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    # 5: no test was left, such as in a folder whose tests all take minutes.
    passed = process.returncode in (0, 5)
    if several:
        _say(said.splitlines()[-1] if passed else said)
    return {"passed": passed, "failed": failed, "seconds": round(time.monotonic() - begun)}


def run(kind: str, wanted: Sequence[str], times: int, marks: str, at_once: int) -> int:
    """Runs each folder as often as it has not passed yet, so many at once; the exit code says whether all have."""
    results = Results(kind, tracked())
    all_of_them = [
        (f"{folder} {number}" if times > 1 else folder, files)
        for number in range(1, times + 1)
        # The longest are the last by their names: begun last, they would be alone in the end.
        for folder, files in (folders(wanted).items() if at_once == 1 else reversed(folders(wanted).items()))
    ]
    known = results.rows()
    left = deque((name, files) for name, files in all_of_them if not known.get(name, {"passed": False})["passed"])
    ended = Barrier(at_once)

    def work() -> None:
        try:
            while True:
                try:
                    name, files = left.popleft()
                except IndexError:
                    break
                _say(f"== {name}")
                results.add({"name": name, **tested(files, marks, at_once > 1)})
            # So that those that still run have as much beside them as before.
            with subprocess.Popen([sys.executable, "-c", _OTHER]) as other:
                try:
                    ended.wait()
                finally:
                    other.kill()
        except BaseException:
            left.clear()
            ended.abort()
            raise

    with ThreadPoolExecutor(at_once) as pool:
        works = [pool.submit(work) for _ in range(at_once)]
        try:
            for each in works:
                each.result()
        finally:
            left.clear()
    rows = results.rows()
    passed, seconds = sum(row["passed"] for row in rows.values()), sum(row["seconds"] for row in rows.values())
    print(f"\n{passed} of {len(rows)} passed, {seconds} s; {results.file.relative_to(ROOT)}")
    broken = [line for name, _ in all_of_them if not rows[name]["passed"] for line in (name, *rows[name]["failed"])]
    print("\n".join(broken))
    return 1 if broken else 0


def everything(wanted: Sequence[str]) -> int:
    """Every test of these folders, or of all, once."""
    return run("all", wanted, 1, "", 1)


def busy(wanted: Sequence[str]) -> int:
    """The tests that always run, BUSY_TIMES each folder, on a machine that does other things too."""
    return run("busy", wanted, BUSY_TIMES, "not long", BESIDE_ONE_ANOTHER)
