"""What "Browse" lists of the studio's computer: only what the page may use, sorted, and models where programs keep them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kohya_like import browsing
from sd_scripts.schema.errors import OptionError
from tests.ui.test_guard import ask, token_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that may be used, beside one that may not."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.safetensors").write_bytes(b"x")
    root = tmp_path / "root"
    for folder in ("image 10", "image 2", "Äpfel", ".hidden", "real"):
        (root / folder).mkdir(parents=True)
    for file in ("b.safetensors", "A.safetensors", "notes.txt", "x.ckpt", "data.toml", "cat.JPG", ".secret.safetensors"):
        (root / file).write_bytes(b"x")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "out.safetensors").symlink_to(tmp_path / "secret" / "key.safetensors")
    (root / "in").symlink_to(root / "real")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe.safetensors")
    return root


def test_a_folder_is_listed_sorted_without_what_is_hidden_or_leads_out(root: Path) -> None:
    listed = browsing.listing(root, "file", "vae", (root,))
    assert listed["folders"] == ["image 2", "image 10", "in", "real", "Äpfel"]
    assert listed["files"] == ["A.safetensors", "b.safetensors"]
    assert (listed["path"], listed["above"], listed["images"], listed["cut"]) == (str(root), "", 1, False)
    assert browsing.listing(root / "real", "folder", "train_data_dir", (root,))["above"] == str(root)
    assert browsing.listing(root, "folder", "train_data_dir", (root,))["files"] == []
    assert browsing.listing(root / "data.toml", "file", "dataset_config", (root,))["files"] == ["data.toml"], "a file stands for its folder"


@pytest.mark.parametrize("given", ["/", "/etc", "..", "../secret", "out", "//server/share", "~", "real/../../secret"])
def test_places_that_the_page_may_not_use_are_refused_in_a_sentence(root: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(OptionError, match=r"outside the folders|network paths"):
        browsing.listing(Path(given), "file", "vae", (root,))
    with pytest.raises(OptionError, match="not there"):
        browsing.listing(root / "nothing", "file", "vae", (root,))


def test_ten_thousand_entries_are_listed_and_that_there_are_more_is_said(tmp_path: Path) -> None:
    for number in range(10_001):
        (tmp_path / f"{number}.safetensors").touch()
    listed = browsing.listing(tmp_path, "file", "vae", (tmp_path,))
    assert len(listed["files"]) == 10_000 and listed["cut"]


def test_models_are_found_where_other_programs_and_the_hub_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    comfy = tmp_path / "home" / "ComfyUI" / "models"
    for name in ("checkpoints/xl", "vae/deep/vae", "a/b/c/d/no"):
        path = comfy / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    (comfy / "checkpoints" / "old.ckpt").write_bytes(b"x")
    snapshot = tmp_path / "hub" / "models--ada--cat-xl" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--ada--empty" / "snapshots" / "0").mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    found = {model["label"]: model["value"] for model in browsing.models((tmp_path,))}
    assert found == {
        "xl.safetensors": str(comfy / "checkpoints" / "xl.safetensors"),
        "vae.safetensors": str(comfy / "vae" / "deep" / "vae.safetensors"),
        "ada/cat-xl": "ada/cat-xl",
    }
    assert browsing.models((tmp_path / "hub" / "other",)) == [], "nothing outside of what the page may use"
    labels = {place["label"]: place["path"] for place in browsing.places(tmp_path / "output", (tmp_path,))}
    assert labels["ComfyUI/models"] == str(comfy) and labels["Hub cache"] == str(tmp_path / "hub") and "Data sets" not in labels
    assert {place["path"] for place in browsing.places(tmp_path, (tmp_path / "hub",))} == {str(tmp_path / "hub")}


def test_the_page_begins_where_the_field_leads_or_else_at_the_runs(studio: Any) -> None:
    def look(**order: object) -> dict[str, Any]:
        status, _, answer = ask(studio, "/kl/browse", "POST", json.dumps(order).encode(), X_KL_Token=token_of(studio))
        assert status == 200
        return dict(json.loads(answer))

    begun = look(path="ada/cat-xl", kind="file", option="pretrained_model_name_or_path", begins=True)
    assert begun["path"] == str(studio.output_dir) and begun["places"] and begun["takesFolder"] is True
    assert look(path=str(studio.output_dir.parent), kind="folder", option="reg_data_dir")["folders"] == ["output"]
    assert "not there" in look(path=str(studio.output_dir / "nothing"), kind="folder", option="reg_data_dir")["problem"]
    assert look(kind="file", option="in_json", path=str(studio.output_dir))["takesFolder"] is False
