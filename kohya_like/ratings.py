"""What models that somebody names say of drawn images: how well they show their prompts, and how like training images they and their
faces are.

A tool's process looks at the images; what it said is kept beside the grids, by all that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sd_scripts.runs.command import SCRIPTS, cpu_threads
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.model import only_on_hub
from sd_scripts.schema.outside import json_of, object_in
from sd_scripts.schema.rating import RateImages

from . import console, files, processes
from .measures import Rating, Say

FOLDER = ".ratings"
MODELS = "models.json"
FACES = ("face_model", "face_likeness_model")
NAMES = ("clip_model", "image_model", *FACES)
MOST_TRAINING_IMAGES = 200
"""Training images that drawn ones are compared with, spread over all: their mean is told, which does not become another with more."""


@dataclass(frozen=True)
class Told:
    """What the models say of each image by its path."""

    images: Mapping[str, Rating] = field(default_factory=dict)
    faceless_trained: int = 0
    """Training images in which no face was found, of those that were looked at."""
    trained: int = 0


@dataclass(frozen=True)
class Ratings:
    """The models that a studio rates images by, and what they have said."""

    folder: Path
    roots: tuple[Path, ...] | None
    """Folders that typed paths may lie in."""

    def models(self) -> dict[str, str]:
        """The models by option; empty texts where none was named."""
        told = object_in(self.folder / MODELS)
        return {name: str(told.get(name) or "") for name in NAMES}

    def choose(self, given: Mapping[str, object]) -> None:
        """Keeps which models rate from now on. Raises OptionError with each folder that is not there or not allowed."""
        chosen = {name: str(given.get(name) or "").strip() for name in NAMES}
        problems: list[Problem] = []
        for name, text in chosen.items():
            if not text or only_on_hub(text):
                continue
            try:
                path = files.confine(text, self.roots or ())
            except OptionError as err:
                problems += [Problem(name, f"{name}: {one.message}") for one in err.problems]
                continue
            is_network = name == FACES[1] and ((path.suffix.lower() == ".onnx" and path.is_file()) or any(path.glob("*.onnx")))
            if not (path / "config.json").is_file() and not is_network:
                problems.append(Problem(name, f"{name}: {text} has no config.json; give the folder of a transformers model, or a hub id"))
        if bool(chosen[FACES[0]]) != bool(chosen[FACES[1]]):
            problems.append(Problem(FACES[0], "faces need two models: one finds them, the other compares them; name both, or neither"))
        refuse(problems)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / MODELS, json.dumps(chosen, ensure_ascii=False))

    def of(self, drawn: Sequence[tuple[Path, str]], trained: Sequence[Path], say: Say) -> Told:
        """What the models say of images with their prompts. Nothing where no model was named. Raises OptionError."""
        models = self.models()
        if not trained:
            models |= dict.fromkeys(NAMES[1:], "")
        if not any(models.values()) or not drawn:
            return Told()
        every = max(1, -(-len(trained) // MOST_TRAINING_IMAGES))
        chosen = list(trained)[::every] if any(models[name] for name in NAMES[1:]) else []
        asked = [models, [[str(path), prompt] for path, prompt in drawn], [[str(path), _modified(path)] for path in chosen]]
        kept = self.folder / f"{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]}.json"
        if not kept.is_file():
            say("The models look at the images")
            self._rate(models, drawn, chosen, kept)
        try:
            told = json_of(kept.read_bytes())
            faceless = set(told.get("faceless", ()))
            images = {
                row["file_name"]: Rating(row["prompt"], row["likeness"], row["face"], row["file_name"] not in faceless)
                for row in told["images"]
            }
            return Told(images, len(told.get("faceless_trained", ())), len(chosen))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            kept.unlink(missing_ok=True)
            raise OptionError("what the models said is damaged; ask them again") from err

    def _rate(self, models: Mapping[str, str], drawn: Sequence[tuple[Path, str]], trained: Sequence[Path], kept: Path) -> None:
        """Has the tool look, and keeps its report. Raises OptionError with what it says."""
        with tempfile.TemporaryDirectory(prefix="kl-rating-") as name:
            here = Path(name)
            _write(here / "images.jsonl", [{"file_name": str(path), "prompt": prompt} for path, prompt in drawn])
            _write(here / "trained.jsonl", [{"file_name": str(path)} for path in trained])
            wanted = {key: value for key, value in models.items() if value}
            wanted |= {"image_list": str(here / "images.jsonl"), "device": "cpu", "report": str(here / "report.json")}
            if trained:
                wanted["train_list"] = str(here / "trained.jsonl")
            command = [sys.executable, str(SCRIPTS / RateImages.script), *(f"--{key}={value}" for key, value in wanted.items())]
            environment = {**os.environ, **processes.ENVIRONMENT, "OMP_NUM_THREADS": cpu_threads()}
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False)
            if done.returncode != 0:
                last = console.last_line(done.stderr)
                raise OptionError(console.told(done.stderr) or f"the models could not look at the images ({done.returncode}): {last}")
            write_atomically(kept, (here / "report.json").read_bytes())


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
