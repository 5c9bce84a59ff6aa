"""export-space: a folder that is complete by itself, runs on its own, and answers programs and browsers; wrong arguments are sentences."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gradio_client import Client, handle_file
from PIL import Image
from safetensors.torch import load_file, save_file

from kohya_like import exporting, space
from sd_scripts.families import FACTS, RUNS, family
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.made_here import NETWORK_FAMILIES, lora_of
from tests.ui.conftest import ROOT, START_SECONDS, free_port

HOST = "owner-style.example"


def front_matter(folder: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((folder / "README.md").read_text().split("---\n")[1]))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exporting.main(arguments) == 2
    said = capsys.readouterr().err
    assert "nothing was written" in said and "Traceback" not in said
    return said


def test_wrong_arguments_are_told_together_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = lora_of("qwen_edit", tmp_path / "good.safetensors", "owner/model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    before = sorted(path.name for path in tmp_path.iterdir())
    said = refused(capsys, str(tmp_path / "full"), "--lora", str(tmp_path / "gone.safetensors"), "--base", str(tmp_path))
    assert "not an empty folder" in said and "gone.safetensors cannot be read" in said and "which a Space cannot read" in said
    assert "not a safetensors file" in refused(capsys, str(tmp_path / "new"), "--lora", str(tmp_path / "broken.safetensors"))
    assert "neither a hub id" in refused(capsys, str(tmp_path / "new"), "--lora", str(good), "--base", "a b")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_space_takes_the_loras_of_its_family_that_a_run_has_written_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, str] = {}
    for name in NETWORK_FAMILIES:
        parts = family(name).tiny()
        full = lora_of(name, tmp_path / f"{name}.safetensors", "owner/model", parts, target_modules=["to_q"])
        short = lora_of(name, tmp_path / f"{name}-short.safetensors", "x", parts, target_modules=["to_q"], metadata="minimal")
        for file in (full, short):
            try:
                found[file.stem] = exporting.checked(tmp_path / "new", (file,), None, None).base
            except OptionError as err:
                found[file.stem] = str(err)
    wanted = {stem: f"for {FACTS[stem.removesuffix('-short')].label};" for stem in found}
    wanted |= {"qwen_edit": "owner/model", "qwen_edit-short": "--base is missing"}
    assert {stem: said for stem, said in found.items() if wanted[stem] not in said} == {}
    # Another program's file, without a word about what it is for: its layers say it.
    save_file(load_file(tmp_path / "zimage.safetensors"), tmp_path / "silent.safetensors")
    assert "for Z-Image;" in refused(capsys, str(tmp_path / "new"), "--lora", str(tmp_path / "silent.safetensors"), "--base", "toy")
    damaged = tmp_path / "qwen_edit.safetensors"
    damaged.write_bytes(damaged.read_bytes().replace(b'kohya_like.config":"{', b'kohya_like.config":"['))
    assert "damaged" in refused(capsys, str(tmp_path / "new"), "--lora", str(damaged), "--base", "toy")
    assert not (tmp_path / "new").exists()


def test_the_folder_has_front_matter_pins_and_the_parts_it_needs_and_names_no_place_of_this_computer(tmp_path: Path) -> None:
    lora = lora_of("qwen_edit", tmp_path / "my style.safetensors", "owner/model")
    folder = tmp_path / "space"
    folder.mkdir()
    assert exporting.main([str(folder), "--lora", str(lora), "--title", 'A "title": of mine']) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitattributes", "LICENSE", "README.md", "app.py", "kohya_like", "my style.safetensors", "requirements.txt", "sd_scripts",
    ]  # fmt: skip
    matter = front_matter(folder)
    pinned = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("gradio=="))
    assert (matter["sdk"], f"gradio=={matter['sdk_version']}", matter["app_file"]) == ("gradio", pinned, "app.py")
    assert matter["title"] == 'A "title": of mine' and matter["models"] == ["owner/model"] and "license" in matter
    assert pinned in (folder / "requirements.txt").read_text().splitlines()
    assert "*.safetensors filter=lfs" in (folder / ".gitattributes").read_text()
    app = ast.parse((folder / "app.py").read_text())
    values = {node.targets[0].id: node.value for node in app.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    assert ast.literal_eval(values["BASE"]) == "owner/model" and ast.literal_eval(values["LORAS"]) == ["my style.safetensors"]
    assert (folder / "my style.safetensors").read_bytes() == lora.read_bytes()
    assert list((folder / "sd_scripts" / "toy" / "bases").iterdir()) == [], "built-in models are not part of it"
    for path in folder.rglob("*"):
        assert path.name != "__pycache__" and not path.is_symlink()
        if path.suffix in (".py", ".md", ".txt"):
            assert str(tmp_path) not in path.read_text() and str(ROOT) not in path.read_text()


def test_the_page_of_a_space_listens_as_the_platform_says_and_elsewhere_for_this_computer_only() -> None:
    here = space.server_of({})
    assert here.is_private and not here.embedded and here.port is None
    there = space.server_of({"SPACE_ID": "a/b", "SPACE_HOST": "a-b.example"})
    assert (there.host, there.port, there.embedded, there.allowed_hosts) == ("0.0.0.0", 7860, True, ("a-b.example",))
    assert space.server_of({"GRADIO_SERVER_PORT": "7999"}).port == 7999


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an exported Space on the toy base, running from its own folder with nothing of this checkout on its path."""
    place = tmp_path_factory.mktemp("space")
    model = flat.build(RUNS["qwen_edit", "network"], {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}).model
    parts = family("qwen_edit").load(model, torch.device("cpu"), torch.float32, without=("vae",))
    lora = lora_of("qwen_edit", place / "toy-style.safetensors", parts=parts, network_alpha=16)
    exporting_command = [sys.executable, str(ROOT / "gui.py"), "export-space", str(place / "space"), "--lora", str(lora)]
    ended = subprocess.run(exporting_command, capture_output=True, text=True, cwd=place, timeout=120)
    assert ended.returncode == 0, ended.stderr
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPACE_ID", "GRADIO_SERVER_NAME")}
    platform = {"SPACE_ID": "owner/style", "SPACE_HOST": HOST, "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port)}
    environment = {**kept, **platform, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(place)}
    log = place / "app.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "app.py"], cwd=place / "space", env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}/"
    deadline = time.monotonic() + 2 * START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
    yield url
    process.terminate()
    try:
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
    assert not [path.name for path in place.iterdir() if path.name.startswith("predictions-")], "what visitors made is gone with it"


def test_a_space_believes_its_platform_s_proxy_and_answers_to_no_other_name(exported: str) -> None:
    def config(host: str) -> str:
        said = {"Host": host, "X-Forwarded-Host": host, "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.7"}
        with urllib.request.urlopen(urllib.request.Request(f"{exported}config", headers=said), timeout=30) as answer:
            return str(answer.read().decode())

    assert f"https://{HOST}" in config(HOST)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        config("evil.example")


@pytest.mark.timeout(900)
def test_an_exported_space_predicts_for_a_program_with_and_without_its_lora(exported: str, tmp_path: Path) -> None:
    given = tmp_path / "given.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(given)
    client = Client(exported, verbose=False, download_files=str(tmp_path / "made"), analytics_enabled=False)
    made = {}
    for weight in (0.0, 1.0):
        result, seed = client.predict(handle_file(given), "make the circle red", " ", 3, 1.0, 5, "", weight, api_name="/predict")
        assert seed == 5
        with Image.open(result) as image:
            made[weight] = np.asarray(image.convert("RGB"))
            assert image.size == (64, 64) and any("make the circle red" in str(value) for value in image.info.values())
    assert not np.array_equal(made[0.0], made[1.0])
    with pytest.raises(Exception, match="100"):
        client.predict(handle_file(given), "x", " ", 101, 1.0, 5, "", 1.0, api_name="/predict")
    client.close()


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_the_page_of_an_exported_space_edits_an_image_and_has_no_place_to_type_a_path(exported: str, visit: Callable[..., Any]) -> None:
    visited = visit(exported, width=390, ready="#kl-inf-prompt")
    page = visited.page
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 99, 199)).save(stream, format="PNG")
    page.set_input_files("#kl-inf-file", {"name": "given.png", "mimeType": "image/png", "buffer": stream.getvalue()})
    page.locator(".kl-inf-slot img").wait_for()
    page.locator("#kl-inf-prompt").fill("make the circle red")
    page.locator("#kl-inf-steps").fill("2")
    page.locator("#kl-inf-add-lora").click()
    assert page.get_by_label("LoRA file 1", exact=True).locator("option").all_inner_texts() == ["Choose a file …", "toy-style"]
    page.locator("#kl-inf-go").click()
    page.locator(".kl-inf-thumb").wait_for(timeout=300_000)
    assert page.locator("#kl-inf-pretrained_model_name_or_path").count() == 0 and page.locator("#kl-inf-free").is_hidden()
    assert visited.axe() == []
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{exported}kl/predict")
