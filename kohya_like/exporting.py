"""`gui.py export-space`: a folder with everything that a Space needs, ready to be run here or uploaded. Sends nothing anywhere."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from sd_scripts.families import FACTS
from sd_scripts.runs import told
from sd_scripts.runs.safetensors_header import MAX_HEADER_BYTES, SafetensorsHeader, needed_bytes, read_header
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import TEMPORARY_MARK

from .files import safe_name
from .importers import lora_file
from .inference import offered

ROOT = Path(__file__).resolve().parent.parent
ASSETS = Path(__file__).resolve().parent / "assets"
PACKAGES = ("kohya_like", "sd_scripts")
TOY = "toy"
_TOY_BASES = ("sd_scripts", "toy", "bases")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in ("safetensors", "png", "jpg", "webp"))


@dataclass(frozen=True)
class Space:
    """What is exported."""

    title: str
    base: str
    loras: tuple[Path, ...]


def parser() -> argparse.ArgumentParser:
    """The command line of export-space."""
    parse = argparse.ArgumentParser(prog="gui.py export-space", description=__doc__, allow_abbrev=False)
    parse.add_argument("folder", type=Path, metavar="DIR", help="folder to write; it must not exist yet, or be empty")
    parse.add_argument("--lora", type=Path, action="append", required=True, metavar="FILE",
                       help="LoRA file of a model that draws on request; may be given several times")  # fmt: skip
    parse.add_argument("--base", metavar="ID", help="hub id of the base model, or toy (default: what the LoRA was trained on)")
    parse.add_argument("--title", help="title of the page (default: the name of the LoRA file)")
    return parse


def main(argv: Sequence[str]) -> int:
    """Writes the folder; 2 for wrong arguments, 1 when it cannot be written."""
    arguments = parser().parse_args(argv)
    try:
        space = checked(arguments.folder, tuple(arguments.lora), arguments.base, arguments.title)
    except OptionError as err:
        sys.stderr.write("gui.py export-space: nothing was written:\n" + "".join(f"  - {problem.message}\n" for problem in err.problems))
        return 2
    try:
        write(space, arguments.folder.expanduser().resolve())
    except OSError as err:
        sys.stderr.write(f"gui.py export-space: the folder cannot be written: {err}\n")
        return 1
    sys.stdout.write(
        f"The Space is in {arguments.folder}\nTry it here: cd {arguments.folder} && {sys.executable} app.py\n"
        "Before you publish it, fill in the field license in its README.md.\n"
    )
    return 0


def checked(folder: Path, loras: tuple[Path, ...], base: str | None, title: str | None) -> Space:
    """What the arguments ask for. Raises OptionError with every problem."""
    problems = []
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problems.append(f"{folder} is there and not an empty folder; give another name, or remove it first")
    bases: list[str] = []
    for path in loras:
        try:
            bases.append(_base_of(path))
        except OptionError as err:
            problems.append(str(err))
    if len({path.name for path in loras}) < len(loras):
        problems.append("two LoRA files have the same name; rename one of them")
    if base is None:
        base = next(filter(None, bases), "")
        if not base and len(bases) == len(loras):
            problems.append(
                "--base is missing, and the LoRA does not say what it was trained on: give the hub id of its base model, or toy"
            )
    elif Path(base).exists() and base != TOY:
        problems.append(f"--base: {base} is a folder or file of this computer, which a Space cannot read; give a hub id, or toy")
    elif base != TOY and not _HUB_ID.fullmatch(base):
        problems.append(f"--base: {base!r} is neither a hub id (owner/name) nor toy")
    if problems:
        raise OptionError([Problem("", problem) for problem in problems])
    return Space(title or safe_name(loras[0].stem), base, loras)


def _header(path: Path) -> SafetensorsHeader:
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            needed = needed_bytes(start)
            return read_header(path.name, start + stream.read(min(max(0, needed - 8), MAX_HEADER_BYTES)))
    except OSError as err:
        raise OptionError(f"--lora: {path} cannot be read: {err.strerror}") from err


def _base_of(path: Path) -> str:
    """The base model that a LoRA says it was trained on, if that is a hub id or toy. Raises OptionError for one of another family."""
    header = _header(path)
    family = told.told_family(path.name, header)
    wanted = offered().family
    if family not in (None, wanted):
        raise OptionError(f"{path.name} was trained for {FACTS[family].label}; a Space is for {FACTS[wanted].label}")
    return lora_file.told_base(path.name, header)


def write(space: Space, folder: Path) -> None:
    """Writes everything aside and puts it in its place when it is complete. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}{TEMPORARY_MARK}", dir=folder.parent))
    try:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, aside / package, ignore=_unneeded(space.base))
        shutil.copyfile(ROOT / "LICENSE", aside / "LICENSE")
        for path in space.loras:
            shutil.copyfile(path, aside / path.name)
        names = [path.name for path in space.loras]
        (aside / "app.py").write_text(
            _filled("space_app.txt", title=json.dumps(space.title), base=json.dumps(space.base), loras=json.dumps(names)), encoding="utf-8"
        )
        (aside / "README.md").write_text(_readme(space, names), encoding="utf-8")
        (aside / "requirements.txt").write_text(requirements(), encoding="utf-8")
        (aside / ".gitattributes").write_text(_ATTRIBUTES, encoding="utf-8")
        aside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _unneeded(base: str) -> Callable[[str, list[str]], set[str]]:
    """What is left out of the copied packages: what Python makes, and built-in models that are not the base."""
    bases = ROOT.joinpath(*_TOY_BASES)

    def left_out(folder: str, names: list[str]) -> set[str]:
        found = {name for name in names if name == "__pycache__" or name.startswith(".") or name.endswith((".pyc", ".pyi"))}
        if Path(folder) == bases:
            # What built-in models share lies beside them.
            found |= {name for name in names if base != TOY or name not in (offered().family, "common")}
        return found

    return left_out


def _filled(template: str, **values: str) -> str:
    return Template((ASSETS / template).read_text(encoding="utf-8")).substitute(values)


def _readme(space: Space, names: list[str]) -> str:
    models = f"  - {space.base}" if space.base != TOY else "  []"
    base = space.base if space.base != TOY else "the built-in toy model"
    return _filled(
        "space_readme.txt",
        title=json.dumps(space.title, ensure_ascii=False),
        name=space.title,
        gradio=_pin("gradio"),
        models=models,
        base=base,
        files=", ".join(names),
    )


def requirements() -> str:
    """Our own pins, without what is said about setup.sh."""
    return "\n".join(_requirement_lines()) + "\n"


def _requirement_lines() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _pin(package: str) -> str:
    """The exact version of a package in our requirements."""
    return next(line.partition("==")[2] for line in _requirement_lines() if line.startswith(f"{package}=="))
