"""Models fetched from a hub on this machine by huggingface_hub's own client: what is said before, and what becomes of gates and faults."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.runs import downloads
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.schema.errors import OptionError
from tests.forked import forked_script
from tests.model_hub import COMMIT, TOKEN, ModelHub, serving

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def model(size: int = 300_000) -> dict[str, bytes]:
    """The files of a model; random weights, so that nothing is there by chance."""
    rng = random.Random(random.getrandbits(64))
    return {
        "model_index.json": b"{}",
        "unet/config.json": b'{"a": 1}',
        WEIGHTS: rng.randbytes(size),
        "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
        "whole.safetensors": b"all in one",
        "README.md": b"read me",
    }


def fetch(hub: ModelHub, folder: Path, *more: str, **variables: str) -> tuple[int, str, dict[str, Any]]:
    """Runs the script: its exit code, what it said, its report."""
    console, report = folder / "console.txt", folder / "report.json"
    report.unlink(missing_ok=True)
    line = ["--hub_id", "someone/model", "--report", str(report), *more]
    process = forked_script(SCRIPTS / "networks" / "fetch_model.py", line, console, {**hub.variables(folder / "cache"), **variables})
    process.join(300)
    said = console.read_text()
    return process.exitcode or 0, said, json.loads(report.read_text()) if report.is_file() else {}


def kept(folder: Path) -> dict[str, bytes]:
    root = folder / "cache" / "models--someone--model" / "snapshots" / COMMIT
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_a_fetch_brings_is_said_before_and_then_it_comes_byte_for_byte(tmp_path: Path) -> None:
    files = model()
    wanted = {name: files[name] for name in ("model_index.json", "unet/config.json", WEIGHTS)}
    with serving(files, licence="cc-by-nc-4.0") as hub:
        code, said, report = fetch(hub, tmp_path, "--look_only")
        assert code == 0 and hub.sent == {} and report["licence"] == "cc-by-nc-4.0" and report["gated"] is False
        assert report["files"] == 3 and report["bytes"] == report["missing"] == sum(map(len, wanted.values())) and report["free"] > 0
        assert "someone/model: 3 files, 300.0 kB" in said and "licence: cc-by-nc-4.0" in said and "free on the disk" in said
        code, said, report = fetch(hub, tmp_path)
        assert code == 0 and kept(tmp_path) == wanted and Path(report["folder"]).is_dir()
        assert said.index("licence: cc-by-nc-4.0") < said.index("looking for"), "what comes is said before it comes"
        asked = dict(hub.sent)
        code, said, report = fetch(hub, tmp_path)
        assert code == 0 and report["missing"] == 0 and "all of it is in the cache" in said and hub.sent == asked


def test_a_gated_model_says_so_and_its_token_is_written_nowhere(tmp_path: Path) -> None:
    with serving(model()) as hub:
        hub.is_gated = True
        code, said, _ = fetch(hub, tmp_path)
        assert code == 2 and "is gated" in said and "HF_TOKEN" in said
        code, said, _ = fetch(hub, tmp_path, HF_TOKEN="hf_" + "n" * 34)
        assert code == 2 and "is gated" in said and "with the account of your token" in said
        code, said, report = fetch(hub, tmp_path, HF_TOKEN=TOKEN)
        assert code == 0 and "terms to accept" in said and report["gated"] is True and f"Bearer {TOKEN}" in hub.tokens
    written = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []


@pytest.mark.long
def test_a_name_that_the_hub_does_not_have_and_one_that_is_none_are_sentences(tmp_path: Path) -> None:
    with serving(model()) as hub:
        code, said, _ = fetch(hub, tmp_path, "--hub_id", "someone/other")
        assert code == 2 and "the hub has no model of that name that you may read" in said
        code, said, _ = fetch(hub, tmp_path, HF_HUB_OFFLINE="1")
        assert code == 2 and "HF_HUB_OFFLINE is set" in said
    code, said, _ = fetch(hub, tmp_path)
    assert (code == 2 and "the hub cannot be reached" in said) or "could not be" in said or "stopped" in said
    assert "Traceback" not in said


def test_a_fetch_that_broke_off_goes_on_where_it_was(tmp_path: Path) -> None:
    files = model(downloads.LARGE_BYTES + random.Random(random.getrandbits(64)).randrange(1, 1 << 20))
    piece = downloads.LARGE_BYTES // 2 + 5
    with serving(files) as hub:
        # It sends a half and then says nothing at all, and when it is asked again, it breaks off.
        hub.breaks_after, hub.num_stalls = piece, 1
        code, said, _ = fetch(hub, tmp_path)
        assert code == 2 and "What has come is kept" in said and "Traceback" not in said and kept(tmp_path).get(WEIGHTS) is None
        hub.breaks_after = None
        hub.ranges.clear()
        hub.sent.clear()
        code, said, _ = fetch(hub, tmp_path)
        assert code == 0 and kept(tmp_path)[WEIGHTS] == files[WEIGHTS]
        (asked,) = hub.ranges
        assert int(asked.rpartition(":")[2]) >= piece - (1 << 20) and hub.sent[WEIGHTS] <= len(files[WEIGHTS]) - piece + (1 << 20)


@pytest.mark.long
def test_a_file_that_came_damaged_is_told_and_fetched_anew(tmp_path: Path) -> None:
    files = model(downloads.LARGE_BYTES + 7)
    with serving(files) as hub:
        hub.damages = True
        code, said, _ = fetch(hub, tmp_path)
        assert code == 2 and "came damaged" in said and WEIGHTS not in kept(tmp_path)
        hub.damages = False
        assert fetch(hub, tmp_path)[0] == 0 and kept(tmp_path)[WEIGHTS] == files[WEIGHTS]


@pytest.mark.long
def test_a_hub_that_says_nothing_ends_with_a_sentence(tmp_path: Path) -> None:
    with serving(model()) as hub:
        hub.breaks_after, hub.num_stalls = 1000, 99
        code, said, _ = fetch(hub, tmp_path)
    assert code == 2 and "the hub sent nothing for 1 seconds, or broke off" in said and "Traceback" not in said


def test_a_disk_without_room_is_said_before_anything_comes(tmp_path: Path) -> None:
    ahead = downloads.Ahead("someone/model", COMMIT, "mit", False, 3, 10**12, 10**12, 10**9, tmp_path)
    with pytest.raises(OptionError, match=r"needs 1000.00 GB more in .*, and 1.00 GB are free there"):
        downloads.fetched("hub_id", "someone/model", ["*"], ahead=ahead)
