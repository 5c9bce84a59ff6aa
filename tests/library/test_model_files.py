"""The files of a model belong to a run: any bit of any of them."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import sd_scripts.toy
from sd_scripts.families import RUNS
from sd_scripts.library.train.model_files import NOTES, model_files
from sd_scripts.schema import flat
from sd_scripts.toy.sharing import INDEX, files_of

TOY = Path(sd_scripts.toy.__file__).parent / "bases" / "sdxl"


def flip(file: Path, place: int, bit: int) -> None:
    """Changes one bit, and sets the time of change back as a careful program does."""
    before = file.stat()
    with file.open("rb+") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_every_bit_of_every_file_counts_and_what_stayed_is_not_read_again(tmp_path: Path) -> None:
    base, vae = tmp_path / "base", tmp_path / "own.safetensors"
    shutil.copytree(TOY, base)
    (base / "config.json").write_text("{}")  # Of the whole, as some models have it; not of a network alone.
    (base / "vae" / INDEX).unlink()
    shutil.copy(*files_of(TOY / "vae"), base / "vae")
    shutil.copy(*files_of(TOY / "vae"), vae)
    shutil.copy(vae, base / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    options = flat.build(RUNS["sdxl", "network"], {"pretrained_model_name_or_path": str(base), "vae": str(vae), "train_data_dir": "x"})
    read: list[int] = []

    def look() -> dict[str, str]:
        read.clear()
        return model_files(options, tmp_path / "cache", lambda what, done, total: read.append(done))

    time.sleep(0.05)  # The hash of a file that was written just now is not kept.
    first = look()
    where = "pretrained_model_name_or_path: "
    networks = ("unet", "vae", "text_encoder", "text_encoder_2")
    files = [file for name in networks for file in (base / name).iterdir() if "fp16" not in file.name]
    named = {f"{where}{file.relative_to(base).as_posix()}" for file in files} | {"vae: own.safetensors"}
    assert named < set(first) and not any("fp16" in name for name in first) and read, "that of another precision is not read by this run"
    assert look() == first and not read
    missed = []
    for name in named:
        file = vae if name.startswith("vae") else base / name.removeprefix(where)
        size = file.stat().st_size
        for place, bit in ((0, 0), (size // 2, 3), (size - 1, 7)):
            flip(file, place, bit)
            if {other for other, told in look().items() if told != first[other]} != {name}:
                missed.append((name, place, bit))
            flip(file, place, bit)
    assert missed == [] and look() == first
    (tmp_path / "cache" / NOTES).write_bytes(b"\xff{")
    assert look() == first and read, "damaged notes are made again"
    assert json.loads((tmp_path / "cache" / NOTES).read_text())


def test_a_model_of_style_transfer_brings_its_vae_and_none_is_looked_for(tmp_path: Path) -> None:
    saved = tmp_path / "styles.safetensors"
    shutil.copy(*files_of(TOY / "vae"), saved)
    options = flat.build(RUNS["lgt", "scratch"], {"pretrained_model_name_or_path": str(saved), "train_data_dir": "x"})
    assert options.model.vae not in ("", "toy"), "the default names a VAE that is not here"
    assert [*model_files(options, tmp_path / "cache", lambda *_: None)] == ["pretrained_model_name_or_path: styles.safetensors"]
