"""A family is its folder: where that is deleted, with its scripts, presets and toy base, the program works and knows nothing of it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd_scripts.families import FACTS, NAMES, PREDICTS, RUNS, TOOLS

from .trees import ENVIRONMENT, ROOT, tracked

# The first one has the demo.
EACH = [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])]


def scripts_of(name: str) -> set[str]:
    """The scripts that are for this family alone."""
    made = {run.script for run in RUNS.values()} | {tool.script for tool in TOOLS.values()} | {asked.script for asked in PREDICTS.values()}
    own = {script for script in made if f'"{name}"' in (ROOT / "sd_scripts" / script).read_text(encoding="utf-8")}
    return own | {run.script for run in RUNS.values() if run.family == name}


def left(name: str, folders: tuple[str, ...]) -> Iterator[Path]:
    """The tree's files in these folders without what belongs to the family."""
    scripts = scripts_of(name)
    gone = [
        f"sd_scripts/families/{name}",
        f"sd_scripts/toy/bases/{name}",
        f"sd_scripts/toy/{name}.py",
        *(f"sd_scripts/{one}" for one in scripts),
    ]
    gone += [f"presets/{Path(script).stem}" for script in scripts]
    return (path for path in tracked() if path.parts[0] in folders and not any(path.is_relative_to(one) for one in gone))


def copied(name: str, to: Path, *folders: str) -> Path:
    """A copy of the program without the family."""
    for path in left(name, folders):
        # With what Python has made of it, where that is there: it holds for a file of the same time.
        compiled = Path(importlib.util.cache_from_source(str(path)))
        for one in (path, compiled) if path.suffix == ".py" and (ROOT / compiled).is_file() else (path,):
            (to / one).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / one, to / one)
    return to


def ran(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *program], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", EACH)
def test_without_its_folder_the_program_works_and_knows_nothing_of_a_family(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path, "sd_scripts", "kohya_like", "presets")
    program = [str(ROOT / "tests" / "without_a_family.py"), name, FACTS[name].label, *sorted(scripts_of(name))]
    done = ran(program, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    demo = next(other for other, facts in FACTS.items() if facts.demo is not None and other != name)
    assert done.stdout.splitlines() == [demo]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_without_its_folder_the_other_families_keep_their_contract(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path, "sd_scripts", "kohya_like", "presets", "tests", "pyproject.toml", "docs")
    done = ran(["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/library/families/test_family_contract.py"], folder)
    assert done.returncode == 0, done.stdout[-3000:]
