"""The routes of the Draw panel over real HTTP messages: which runs have one, whose files it draws with, and which images it shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import drawing, processes, tools
from kohya_like.app import make_context
from kohya_like.context import Context
from sd_scripts.families import RUNS, TOOLS
from sd_scripts.runs.events import RunFinished, RunStopped
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from tests.ui.runs_on_disk import STYLES, evaluated, style_run


def made(context: Context, family: str, method: str, name: str) -> RunDirectory:
    needed = {"train_data_dir": "toy:shapes", "output_dir": str(context.output_dir), "output_name": name}
    run = RUNS[family, method]
    base = {} if method == "scratch" else {"pretrained_model_name_or_path": "toy"}
    made = RunDirectory.create(context.output_dir, name, flat.build(run, {**needed, **base}))
    made.log(RunFinished(step=3, text="", advice=""))
    return made


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    context = make_context(tmp_path / "out", (), is_private=False)
    yield context
    for started in context.output_dir.glob(f"{tools.FOLDER}/*/tool.json"):
        processes.end(processes.of_runs().get(json.loads(started.read_text())["run_id"], []))
    context.supervisor.close()


@pytest.fixture
def run(context: Context) -> RunDirectory:
    """A run with three saved models, of which one is a folder, and things that are none."""
    run = made(context, "ddpm", "scratch", "shapes")
    for age, name in enumerate(("shapes.safetensors", "shapes-best.safetensors", "shapes-000020")):
        path = run.path / name
        if path.suffix:
            path.write_bytes(b"no model")
        else:
            path.mkdir()
            (path / "model_index.json").write_text("{}")
        os.utime(path, (1e9 - age, 1e9 - age))
    (run.path / "notes.txt").write_text("none")
    (context.output_dir.parent / "outside.safetensors").write_bytes(b"no")
    os.symlink(context.output_dir.parent / "outside.safetensors", run.path / "link.safetensors")
    return run


@pytest.fixture
def client(context: Context) -> Iterator[TestClient]:
    with TestClient(Starlette(routes=[*drawing.routes(context), *tools.routes(context)])) as client:
        yield client


@pytest.fixture
def styles(context: Context) -> RunDirectory:
    """A run of style transfer with a file that is no model."""
    run = style_run(context.output_dir, "styles")
    run.log(RunStopped(step=30))
    return run


def order(model: str, **texts: str) -> dict[str, dict[str, str]]:
    return {"texts": {"ckpt": model, "prompt": "a red circle", "steps": "2", "n": "1", "device": "cpu", **texts}}


def test_each_family_with_a_tool_of_its_own_has_a_panel_and_no_other(context: Context, client: TestClient) -> None:
    families = {tool.family for tool in TOOLS.values() if tool.family}
    assert "ddpm" in families
    for family, method in RUNS:
        answer = client.get(f"/kl/draw/{made(context, family, method, f'of-{family}-{method}').name}")
        assert (answer.status_code == 200) == (family in families), (family, method)


def test_the_panel_offers_every_option_but_those_that_the_studio_settles_and_the_saved_files_newest_first(
    client: TestClient, run: RunDirectory
) -> None:
    panel = client.get(f"/kl/draw/{run.name}").json()
    settled = {tools.MODEL, tools.IMAGES, tools.REPORT}
    assert {field["name"] for field in panel["fields"]} == flat.fields(TOOLS[panel["name"]]).keys() - settled
    assert panel["models"] == ["shapes.safetensors", "shapes-best.safetensors", "shapes-000020"]
    assert all(tool["name"] != panel["name"] for tool in client.get("/kl/tools").json()["tools"]), "it has its place beside the run"


def test_only_a_saved_file_of_this_run_is_drawn_with_and_what_is_wrong_is_told_with_it(client: TestClient, run: RunDirectory) -> None:
    for model in ("", "link.safetensors", "notes.txt", "../outside.safetensors", str(run.path / "shapes.safetensors")):
        (problem,) = client.post(f"/kl/draw/{run.name}", json=order(model)).json()["problems"]
        assert problem["option"] == "ckpt", model
    found = client.post(f"/kl/draw/{run.name}", json=order("shapes.safetensors", steps="0", cfg="-1", sampler="magic")).json()["problems"]
    assert {problem["option"] for problem in found} == {"steps", "cfg", "sampler"}
    assert not (run.path.parent / tools.FOLDER).exists()
    assert client.post("/kl/draw/nothing", json=order("shapes.safetensors")).status_code == 404
    assert client.post(f"/kl/draw/{run.name}", json=["texts"]).status_code == 400


def test_a_drawing_belongs_to_its_run_and_shows_nothing_but_its_own_images(context: Context, client: TestClient, run: RunDirectory) -> None:
    other = made(context, "ddpm", "scratch", "other")
    elsewhere = str(context.output_dir.parent)
    started = client.post(f"/kl/draw/{run.name}", json=order("shapes-best.safetensors", out=elsewhere, report=elsewhere)).json()["run"]
    argv = json.loads((context.output_dir / tools.FOLDER / started["name"] / "tool.json").read_text())["argv"]
    folder = run.path / tools.DRAWN / started["name"]
    assert f"--ckpt={run.path / 'shapes-best.safetensors'}" in argv and f"--out={folder}" in argv
    assert client.post(f"/kl/tools/run/{started['name']}/cancel").json() == {"state": "cancelled"}
    assert [row["name"] for row in client.get(f"/kl/draw/{run.name}").json()["runs"]] == [started["name"]]
    assert client.get(f"/kl/draw/{other.name}").json()["runs"] == [] and client.get("/kl/tools").json()["runs"] == []
    assert client.get(f"/kl/draw/{other.name}/{started['name']}").status_code == 404

    folder.mkdir(parents=True, exist_ok=True)
    names = ["a.png", "b.png", "gone.png", "grid.png"]
    for name in (names[0], names[1], names[3]):
        Image.new("RGB", (4, 4)).save(folder / name)
    Image.new("RGB", (4, 4)).save(run.path / "secret.png")
    os.symlink(run.path / "secret.png", folder / "link.png")
    report = {
        "outputs": [*(str(folder / name) for name in names[:3]), str(run.path / "secret.png")],
        "grid": str(folder / names[3]),
        "seed": 7,
    }
    # Reports of 0.1 called them pictures.
    for told in (report, {{"outputs": "pictures"}.get(key, key): value for key, value in report.items()}):
        (context.output_dir / tools.FOLDER / started["name"] / "report.json").write_text(json.dumps(told))
        shown = client.get(f"/kl/draw/{run.name}/{started['name']}").json()["images"]
        assert [(item["file"], item["seed"], item["grid"]) for item in shown] == [
            ("a.png", 7, False),
            ("b.png", 8, False),
            ("grid.png", 7, True),
        ]
    address = f"/kl/draw/{run.name}/{started['name']}"
    assert client.get(f"{address}/a.png").content == (folder / "a.png").read_bytes()
    for name in ("link.png", "secret.png", "%2e%2e%2fsecret.png", "gone.png", "config.toml"):
        assert client.get(f"{address}/{name}").status_code == 404, name
    assert "attachment" in client.get(f"{address}/a.png", params={"save": "1"}).headers["content-disposition"]
    (context.output_dir / tools.FOLDER / started["name"] / "report.json").write_text('{"outputs": 3, "grid": [1], "seed": "x"}')
    assert client.get(address).json()["images"] == []


def choices(client: TestClient, run: RunDirectory) -> tuple[list[str], list[str]]:
    """What the panel offers as target style, and as style of the image."""
    fields = {field["name"]: field for field in client.get(f"/kl/draw/{run.name}").json()["fields"]}
    return fields["target"].get("suggestions", []), fields["source"].get("choices", [])


def test_the_styles_to_choose_from_are_those_of_the_run(client: TestClient, styles: RunDirectory) -> None:
    assert choices(client, styles) == (list(STYLES), ["auto", *STYLES, "average"])
    (styles.path / "styles.json").unlink()
    assert choices(client, styles) == ([], [])
    evaluated(styles, 0)
    assert choices(client, styles)[0] == list(STYLES), "a run that went on from a saved model has evaluations"
    for text in ("{", "7", '{"a": 1}'):
        (styles.path / "styles.json").write_text(text)
        assert choices(client, styles)[0] == list(STYLES)
    (styles.path / "styles.json").write_text('["a", 7, "b"]')
    assert choices(client, styles) == (["a", "b"], ["auto", "a", "b", "average"])


def transfer(client: TestClient, run: RunDirectory, image: str) -> dict[str, Any]:
    texts = {"ckpt": "styles.safetensors", "image": image, "target": "line", "device": "cpu"}
    return client.post(f"/kl/draw/{run.name}", json={"texts": texts}).json()


def test_the_image_of_a_transfer_is_kept_beside_its_result_however_it_was_given(
    context: Context, client: TestClient, styles: RunDirectory
) -> None:
    pixels = Image.effect_noise((24, 16), 60).convert("RGB")
    pixels.save(context.output_dir / "mine.png")
    upload, size = context.predictions.take_image((context.output_dir / "mine.png").read_bytes())
    assert size == (24, 16)
    for image in (upload, "mine.png", str(context.output_dir / "mine.png")):
        started = transfer(client, styles, image)["run"]["name"]
        client.post(f"/kl/tools/run/{started}/cancel")
        kept = styles.path / tools.DRAWN / started / tools.SOURCE
        with Image.open(kept) as opened:
            assert opened.tobytes() == pixels.tobytes()
        told = client.get(f"/kl/draw/{styles.name}/{started}").json()
        assert told["source"] == tools.SOURCE and told["texts"]["image"] == image
        assert client.get(f"/kl/draw/{styles.name}/{started}/{tools.SOURCE}").content == kept.read_bytes()
        assert f"--image={kept}" in json.loads((context.output_dir / tools.FOLDER / started / "tool.json").read_text())["argv"]


def test_a_folder_of_images_goes_to_the_tool_as_it_is(context: Context, client: TestClient, styles: RunDirectory) -> None:
    folder = context.output_dir / "images"
    folder.mkdir()
    started = transfer(client, styles, str(folder))["run"]["name"]
    client.post(f"/kl/tools/run/{started}/cancel")
    assert f"--image={folder}" in json.loads((context.output_dir / tools.FOLDER / started / "tool.json").read_text())["argv"]
    assert client.get(f"/kl/draw/{styles.name}/{started}").json()["source"] == ""


@pytest.mark.parametrize("image", ["", "gone.png", "text.png", "../outside.png", "0" * 32 + ".png", "/etc/hostname", "//host/share/a.png"])
def test_an_image_that_is_none_or_not_to_be_used_is_refused_at_its_field(
    context: Context, client: TestClient, styles: RunDirectory, image: str
) -> None:
    (context.output_dir / "text.png").write_text("no image")
    Image.new("RGB", (4, 4)).save(context.output_dir.parent / "outside.png")
    answer = transfer(client, styles, str(context.output_dir / image) if image.startswith("..") else image)
    assert {problem["option"] for problem in answer["problems"]} == {"image"}
    assert not (styles.path / tools.DRAWN).exists() and not (context.output_dir / tools.FOLDER).exists()
