"""Every preset is a valid set of options, and a dry run of it with somebody's images goes through."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_scripts.families import RUNS
from sd_scripts.library.train.launch import main
from sd_scripts.schema.flat import build, changed, run_of
from sd_scripts.schema.toml_files import read_toml

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "presets").glob("*/*.toml"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three large images with captions, in kohya's layout."""
    folder = tmp_path_factory.mktemp("presets") / "images" / "2_sks thing"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(rng.integers(0, 255, (1100, 900 + 100 * number, 3), dtype=np.uint8)).save(folder / f"{number}.jpg")
        (folder / f"{number}.txt").write_text("sks thing, on a table, from above")
    return folder.parent


@pytest.fixture(scope="module")
def pairs(images: Path) -> Path:
    """The same images as targets, with controls that are the same images mirrored."""
    folder = images.with_name("pairs")
    shutil.copytree(images / "2_sks thing", folder / "target")
    (folder / "control").mkdir()
    for path in (folder / "target").glob("*.jpg"):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "control" / path.name)
    return folder


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all presets find what one of them has drawn or looked at, as runs of one output folder do."""
    return tmp_path_factory.mktemp("caches")


def test_there_is_a_preset_for_every_script() -> None:
    assert {path.parent.name for path in PRESETS} == {run.script.removesuffix(".py") for run in RUNS.values()}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_parses_and_dry_runs(
    preset: Path, images: Path, pairs: Path, caches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = read_toml(preset)
    run = run_of(values)
    assert run.script.removesuffix(".py") == preset.parent.name
    edits = run.family == "qwen_edit" and values.get("model_version") != "image"
    needed = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(pairs if edits else images)}
    options = build(run, needed | values)
    missing = set(values) - set(changed(options)) - {"script", "schema_version"}
    assert not missing, f"a preset is a set of differences, but these are defaults: {missing}"
    own = [f"--{name}={value}" for name, value in needed.items() if name not in values]
    # One process is started here, and a run for two would wait for the other.
    own += ["--no_multi_gpu"] if values.get("num_gpus", 1) > 1 else []
    with pytest.raises(SystemExit) as ended:
        main(
            run.family,
            run.method,
            [f"--config_file={preset}", f"--output_dir={tmp_path / 'out'}", f"--cache_dir={caches}", "--dry_run", *own],
        )
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "Nothing was started" in said.out
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("2*"))
