"""The walk-through of the README, as a person would do it: real photographs in awkward formats, a few steps on the toy base."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from sd_scripts.dataset.images import decode
from sd_scripts.runs.rundir import RunDirectory
from tests.documents import ROOT, blocks, commands, named, page_text
from tests.forked import said_by_script
from tests.runs.test_uploads import Hub, serving, variables

CAT = (451, 300)
"""Size of the upright photograph."""


def walk_through() -> list[list[str]]:
    """The commands of the section "Real photographs", for this Python and from any folder."""
    (found,) = [commands(block.text) for block in blocks("") if "photographs.py" in block.text and block.page == "README.md"]
    places = {".venv/bin/python": sys.executable, "sd_scripts/sdxl_train_network.py": str(ROOT / "sd_scripts" / "sdxl_train_network.py")}
    return [[places.get(word, word) for word in command] for command in found]


def forked(command: list[str], folder: Path) -> str:
    """What a command that trains prints in a folder when its script is forked from a process with the libraries in it."""
    script = next(number for number, word in enumerate(command) if word.endswith("sdxl_train_network.py"))
    code, said = said_by_script(Path(command[script]), command[script + 1 :], folder)
    assert code == 0, said
    return said


def carry_out(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """What a command prints in a folder; only training is started as a person starts it, with a network of these variables."""
    if command[1].endswith("sdxl_train_network.py"):
        return forked(command, folder)
    environment = {**os.environ, **variables, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def trained(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder after the walk-through, and what each command printed."""
    folder = tmp_path_factory.mktemp("walk-through")
    for name in ("photographs.py", "photographs.toml"):
        (folder / name).write_text(named(name), encoding="utf-8")
    return folder, [carry_out(command, folder, variables(hub)) for command in walk_through()]


def only_run(folder: Path) -> RunDirectory:
    (config,) = (folder / "output").glob("*/config.toml")
    return RunDirectory(config.parent)


def test_the_photographs_come_in_the_formats_the_readme_names(trained):
    folder, _ = trained
    modes = {}
    for path in sorted((folder / "photographs").iterdir()):
        if path.suffix != ".txt":
            with Image.open(path) as image:
                modes[path.name] = (image.format, image.mode)
    assert modes["rocket.jpg"] == ("JPEG", "CMYK") and modes["coffee.webp"][0] == "WEBP" and modes["logo.png"] == ("PNG", "RGBA")
    assert modes["camera.png"] == ("PNG", "L") and modes["coins.png"][1].startswith("I") and len(modes) == 7
    with Image.open(folder / "photographs" / "cat.jpg") as cat:
        assert cat.size == CAT[::-1] and cat.getexif()[274] == 6


def test_a_photograph_lying_on_its_side_is_read_upright(trained):
    from skimage import data

    folder, _ = trained
    upright = decode(folder / "photographs" / "cat.jpg").rgb
    assert upright.shape[:2] == CAT[::-1]
    # JPEG changes single values, not the image; lying or mirrored it would differ by tens.
    assert np.abs(upright.astype(float) - data.chelsea()).mean() < 5


def test_the_dry_run_says_what_the_readme_says_and_leaves_no_run(trained):
    _, (_, said, _) = trained
    shown = [block.text for block in blocks("") if block.text.startswith("images: 7")]
    assert len(shown) == 1 and [line for line in shown[0].splitlines() if line not in said] == []
    assert "Nothing was started" in said


def test_the_run_finishes_with_a_file_previews_and_a_whole_log(trained):
    folder, _ = trained
    run = only_run(folder)
    events, _ = run.events()
    assert events[-1]["kind"] == "finished" and events[-1]["step"] == 6
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert len(losses) == 6 and all(0 < loss < 10 for loss in losses)
    assert sorted(path.name for path in run.samples.iterdir()) == ["photographs-000000-00.png", "photographs-000006-00.png"]
    with safe_open(run.path / "photographs.safetensors", framework="np") as file:
        header, names = file.metadata(), list(file.keys())
    assert any(name.endswith(".lora_up.weight") for name in names)
    buckets = {tuple(row["resolution"]): row["count"] for row in json.loads(header["ss_bucket_info"])["buckets"].values()}
    # Four wide photographs, the cat among them, and three square ones.
    assert buckets == {(64, 48): 4, (64, 64): 3}
    assert str(folder) not in json.dumps(header)


def test_nothing_is_asked_of_a_hub_by_a_fresh_process(hub: Hub, trained: tuple[Path, list[str]]) -> None:
    """Neither by importing the libraries nor by training; the folder is there because it did both."""
    assert only_run(trained[0]).events()[0][-1]["kind"] == "finished" and hub.requests == 0 and not hub.files


def test_the_same_command_says_finished_and_a_longer_one_goes_on(trained):
    folder, _ = trained
    *_, train = walk_through()
    assert "finished already" in forked(train, folder)
    forked([*train, "--max_train_steps", "12"], folder)
    starts = [event for event in only_run(folder).events()[0] if event["kind"] == "started"]
    assert [event["start_step"] for event in starts] == [0, 6]


def test_the_readme_promises_what_is_tested_here():
    assert "--max_train_steps 12" in page_text(ROOT / "README.md")
