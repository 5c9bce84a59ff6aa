"""Puts known faults into copies of the program, one at a time, and says which of them the tests notice.

    --mutants            each fault that has no result for the tree as it is now; a second call goes on
    --mutants run NAME   those whose name or area begins so
    --mutants list       all faults, with the tests that are meant to notice them
    --mutants draw       writes faults/drawn.toml anew, as chance and SEED have it

A fault is noticed when the tests that faults/tests.toml gives to its file fail; one whose tests are none counts as not noticed. Results
are kept in .results/, see trees.py.
"""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.trees import ENVIRONMENT, ROOT, Results, tracked

FAULTS = ROOT / "tests" / "faults"
SEED = 20261123
DRAWN_OF_AREA = 5
AREAS = {
    "schema": ("sd_scripts/schema",),
    "data": ("sd_scripts/dataset", "sd_scripts/library/data"),
    "objectives": ("sd_scripts/library/objectives", "sd_scripts/library/core/diffusion.py", "sd_scripts/runs/schedules.py"),
    "families": ("sd_scripts/families",),
    "files": ("sd_scripts/library/adapters", "sd_scripts/library/tools", "sd_scripts/library/loading"),
    "resume": (
        *(f"sd_scripts/library/train/{name}.py" for name in ("checkpoint", "epochs", "nonfinite", "learner", "trainer")),
        *(f"sd_scripts/runs/{name}.py" for name in ("resume", "states", "stopping")),
    ),
    "page": (
        *(f"kohya_like/{name}" for name in ("form.py", "monitor.py", "live.py", "guard.py", "supervisor.py", "presets.py", "importers")),
        "sd_scripts/programs",
        "sd_scripts/schema/sheet.py",
    ),
}
"""Where chance looks for lines, by area."""
JOBS = 2
LIMIT_SECONDS = 3600.0
"""A fault that hangs the tests is noticed by pytest's own limit; this one only ends what that does not reach."""


@dataclass(frozen=True)
class Fault:
    """One change of one file: `old`, which stands there once, becomes `new`."""

    name: str
    area: str
    file: str
    old: str
    new: str
    also: tuple[str, str] | None = None
    """A second change that the first needs, such as an import."""

    def applied(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError when the program has changed so that it cannot be put in."""
        for old, new in ((self.old, self.new), *([self.also] if self.also else [])):
            if text.count(old) != 1:
                raise ValueError(f"{self.file}: {old!r} stands there {text.count(old)} times; bring the fault {self.name!r} up to date")
            text = text.replace(old, new)
        return text


def faults() -> list[Fault]:
    """All faults, those chosen by hand first."""
    found = []
    for name in ("by_hand.toml", "drawn.toml"):
        for row in tomllib.loads((FAULTS / name).read_text(encoding="utf-8")).get("fault", []):
            also = row.pop("also", None)
            found.append(Fault(**row, also=tuple(also) if also else None))
    return found


def tests_for(file: str) -> list[str]:
    """The tests that are meant to notice a fault in this file; the longest beginning that fits decides."""
    table: dict[str, list[str]] = tomllib.loads((FAULTS / "tests.toml").read_text(encoding="utf-8"))["tests"]
    fitting = [beginning for beginning in table if file == beginning or file.startswith(f"{beginning}/")]
    return table[max(fitting, key=len)] if fitting else []


# Trying them.


def copied(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)


def tried(fault: Fault, folder: Path) -> dict[str, Any]:
    """Puts a fault into a copy of the tree, runs the tests that are meant to notice it, and takes it out again."""
    tests, begun = tests_for(fault.file), time.monotonic()
    result: dict[str, Any] = {"name": fault.name, "area": fault.area, "file": fault.file, "noticed": False, "by": "", "seconds": 0.0}
    if not tests:
        return result | {"by": "no tests are given for this file"}
    file = folder / fault.file
    kept = file.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "--timeout", "600", *tests]
    try:
        file.write_text(fault.applied(kept), encoding="utf-8")
        ended = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    finally:
        file.write_text(kept, encoding="utf-8")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    # 1: tests failed; 2: they could not be collected. 5, none were there, and 0 notice nothing. 4 is a wrong command, or a conftest
    # that could not be imported, as when no default of the options is valid any more.
    broken = re.match(r"ImportError while loading conftest '\S+?/(tests/\S+)'", ended.stderr)
    failed += broken.groups() if broken else ()
    noticed = ended.returncode in (1, 2) or bool(broken)
    if ended.returncode not in (0, 1, 2, 5) and not broken:
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return result | {"noticed": noticed, "by": failed[0] if failed else "", "seconds": round(time.monotonic() - begun, 1)}


def run(beginning: str = "") -> int:
    """Tries what has no result yet; the exit code says whether all were noticed."""
    wanted = [fault for fault in faults() if fault.name.startswith(beginning) or fault.area.startswith(beginning)]
    files = tracked()
    for fault in wanted:
        fault.applied((ROOT / fault.file).read_text(encoding="utf-8"))
    results = Results("faults", files)
    left = [fault for fault in wanted if fault.name not in results.rows()]
    print(f"{len(wanted)} faults, {len(wanted) - len(left)} with a result already, in {results.file.relative_to(ROOT)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as base, ThreadPoolExecutor(JOBS) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(JOBS, len(left))):
            copied(files, Path(base) / str(number))
            folders.put(Path(base) / str(number))

        def one(fault: Fault) -> dict[str, Any]:
            folder = folders.get()
            try:
                return tried(fault, folder)
            finally:
                folders.put(folder)

        for row in pool.map(one, left):
            results.add(row)
            print(
                f"{'noticed' if row['noticed'] else 'MISSED '} {row['seconds']:6.0f} s  {row['area']:10} {row['name']}  {row['by']}",
                flush=True,
            )
    found = results.rows()
    missed = [fault.name for fault in wanted if not found[fault.name]["noticed"]]
    print(f"{len(wanted) - len(missed)} faults noticed, {len(missed)} missed" + "".join(f"\n  {name}" for name in missed))
    return 1 if missed else 0


def listed() -> int:
    for fault in faults():
        print(f"{fault.area:10} {fault.name}\n           {fault.file}: {' '.join(tests_for(fault.file)) or 'NO TESTS'}")
    return 0


# Chance.

_SWAPS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is"}
_SWAPS |= {ast.In: "not in", ast.NotIn: "in"}
_SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
_OPERATORS = re.compile(r"(not in|is not|<=|>=|==|!=|<|>|\bin\b|\bis\b|\+|-|\*|/)")


def changes(source: str) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, end, text): ways to change a source by one comparison, constant, sign or deleted line. Places are of characters."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)  # type: ignore[attr-defined]
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    docs = {id(node.value) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPS:
            yield from _between(source, place(node.left, end=True), place(node.comparators[0]), _SWAPS[type(node.ops[0])], "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS and not isinstance(node.left, ast.Constant):
            yield from _between(source, place(node.left, end=True), place(node.right), _SIGNS[type(node.op)], "sign")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and id(node) not in docs:
            yield "constant", place(node), place(node, end=True), repr(node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield "constant", place(node), place(node, end=True), repr(not node.value)
        elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and not isinstance(node.value, ast.Constant) and node.col_offset >= 4:
            yield "line", place(node), place(node, end=True), "pass"


def _between(source: str, start: int, end: int, new: str, kind: str) -> Iterator[tuple[str, int, int, str]]:
    """The change of the one operator that stands between two operands."""
    found = list(_OPERATORS.finditer(source, start, end))
    if len(found) == 1:
        yield kind, found[0].start(), found[0].end(), new


def drawn() -> list[Fault]:
    """DRAWN_OF_AREA faults of each area: a file by its length, a kind of change, then a place."""
    rng = random.Random(SEED)
    made: list[Fault] = []
    for area, places in AREAS.items():
        files = sorted({file for place in places for file in ((ROOT / place).rglob("*.py") if (ROOT / place).is_dir() else [ROOT / place])})
        sources = {file: file.read_text(encoding="utf-8") for file in files}
        of_area: list[Fault] = []
        while len(of_area) < DRAWN_OF_AREA:
            file = rng.choices(files, [len(sources[each]) for each in files])[0]
            by_kind: dict[str, list[tuple[int, int, str]]] = {}
            for kind, start, end, new in changes(sources[file]):
                by_kind.setdefault(kind, []).append((start, end, new))
            if not by_kind:
                continue
            kind = rng.choice(sorted(by_kind))
            fault = _fault(sources[file], area, file.relative_to(ROOT).as_posix(), kind, *rng.choice(by_kind[kind]))
            if fault is not None and all(fault.name != other.name for other in of_area):
                of_area.append(fault)
        made += of_area
    return made


def _fault(source: str, area: str, file: str, kind: str, start: int, end: int, new: str) -> Fault | None:
    """The change written with as many lines around it as make it stand there once; None where the text does not compile."""
    changed = source[:start] + new + source[end:]
    try:
        compile(changed, file, "exec")
    except SyntaxError:
        return None
    lines = source.splitlines(keepends=True)
    first, last = source.count("\n", 0, start), source.count("\n", 0, end)
    while source.count("".join(lines[first : last + 1])) > 1:
        first -= 1
    before, after = sum(map(len, lines[:first])), sum(map(len, lines[: last + 1]))
    name = f"{kind} in line {source.count(chr(10), 0, start) + 1} of {file}: {' '.join(source[start:end].split())[:60]} -> {new}"
    return Fault(name, area, file, source[before:after], source[before:start] + new + source[end:after])


def write_drawn() -> int:
    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    rows = [f"# Written by `python -m tests.mutants draw` with seed {SEED}: lines and changes that chance chose.\n"]
    for fault in drawn():
        rows += [f"\n[[fault]]\n{key} = {quoted(getattr(fault, key))}" for key in ("name",)]
        rows += [f"\n{key} = {quoted(getattr(fault, key))}" for key in ("area", "file", "old", "new")] + ["\n"]
    (FAULTS / "drawn.toml").write_text("".join(rows), encoding="utf-8")
    return 0


def main(words: Sequence[str]) -> int:
    what, *rest = words or ["run"]
    return {"run": run, "list": listed, "draw": write_drawn}[what](*rest)
