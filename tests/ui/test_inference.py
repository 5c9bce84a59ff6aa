"""The Generate tab without a browser: a worker that comes, goes and dies, the queue, what is kept on disk, and what a page may ask for."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import predict_routes, predictions
from kohya_like.context import Context
from kohya_like.inference import WorkerBackend
from kohya_like.predict_routes import LoraFile, Menu
from kohya_like.predictions import PredictionOrder, PredictionQueue
from kohya_like.supervisor import JobSupervisor
from sd_scripts.families import RUNS
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.runs.events import RunFinished
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.full_disk import no_larger_than
from tests.ui.standin_runs import until

STANDIN = Path(__file__).with_name("standin_worker.py")
ADA, BEN = "a" * 32, "b" * 32


def image(size: tuple[int, int] = (64, 48), kind: str = "PNG", **more: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (size[1], size[0], 3), np.uint8)).save(stream, format=kind, **more)
    return stream.getvalue()


@pytest.fixture
def backend() -> Iterator[WorkerBackend]:
    backend = WorkerBackend([sys.executable, str(STANDIN)])
    yield backend
    backend.close()
    assert backend.pid is None


@pytest.fixture
def queue(backend: WorkerBackend, tmp_path: Path) -> Iterator[PredictionQueue]:
    queue = PredictionQueue(backend, tmp_path)
    yield queue
    queue.close()


def order(prompt: str, **more: Any) -> PredictionOrder:
    return PredictionOrder({"prompt": prompt, "steps": 3, **more}, (), {"texts": {"prompt": prompt}})


def ended(queue: PredictionQueue, *ordered: predictions.Prediction) -> None:
    until(lambda: all(each.state in predictions.ENDED for each in ordered), seconds=60)


# The worker


def test_a_request_gets_its_events_and_a_second_one_the_same_worker(backend: WorkerBackend, tmp_path: Path) -> None:
    first = list(backend.submit({"id": "1", "prompt": "chatter", "steps": 2, "out": str(tmp_path)}))
    kinds = [event["event"] for event in first]
    assert kinds == ["starting", "ready", "loading", "loaded", "started", "step", "step", "image", "done"]
    pid = backend.pid
    again = list(backend.submit({"id": "2", "prompt": "", "steps": 1, "out": str(tmp_path)}))
    assert (again[0]["event"], backend.pid) == ("loading", pid)


def test_a_worker_that_is_killed_says_so_with_its_last_lines_and_the_next_request_starts_another(
    backend: WorkerBackend, tmp_path: Path
) -> None:
    *_, last = backend.submit({"id": "1", "prompt": "die", "out": str(tmp_path)})
    assert last["event"] == "failed" and "signal 9" in last["text"] and last["lines"] == ["last words of the worker"]
    assert not backend.holds_memory()
    *_, last = backend.submit({"id": "2", "prompt": "", "steps": 1, "out": str(tmp_path)})
    assert last["event"] == "done"


def test_a_worker_that_was_killed_between_two_requests_is_replaced(backend: WorkerBackend, tmp_path: Path) -> None:
    list(backend.submit({"id": "1", "prompt": "", "steps": 1, "out": str(tmp_path)}))
    pid = backend.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: backend.pid is None)
    *_, last = backend.submit({"id": "2", "prompt": "", "steps": 1, "out": str(tmp_path)})
    assert last["event"] == "done" and backend.pid != pid


def test_freeing_leaves_no_process_and_no_zombie(backend: WorkerBackend, tmp_path: Path) -> None:
    list(backend.submit({"id": "1", "prompt": "", "steps": 1, "out": str(tmp_path)}))
    pid = backend.pid
    backend.free()
    assert pid is not None and not psutil.pid_exists(pid) and not backend.holds_memory()


def test_a_program_that_cannot_be_started_is_a_sentence(tmp_path: Path) -> None:
    backend = WorkerBackend([str(tmp_path / "nothing")])
    *_, last = backend.submit({"id": "1"})
    assert last["event"] == "failed" and "could not be started" in last["text"]


def test_a_script_that_ends_at_once_says_why() -> None:
    backend = WorkerBackend([sys.executable, "-c", "import sys; sys.stderr.write('no torch here'); sys.exit(3)"])
    *_, last = backend.submit({"id": "1"})
    assert last["event"] == "failed"
    assert "code 3" in last["text"] or "could not be started" in last["text"], "it may end before the request is written"


# The queue


def test_orders_wait_in_line_and_the_page_hears_their_numbers(queue: PredictionQueue) -> None:
    first = queue.submit(order("slow", steps=50), ADA)
    until(lambda: first.state == "running")
    second, third = queue.submit(order("b"), BEN), queue.submit(order("c"), BEN)
    assert [queue.ahead(each) for each in (first, second, third)] == [0, 1, 2]
    assert queue.of_session(BEN) == [second.ident, third.ident] and queue.busy == 3
    queue.cancel(second)
    assert second.state == "cancelled" and queue.ahead(third) == 1
    with pytest.raises(OptionError, match="cancel them first"):
        queue.free()
    queue.cancel(first)
    ended(queue, first, third)
    assert (first.state, third.state) == ("cancelled", "done")
    queue.free()
    assert not queue.backend.holds_memory()


def test_an_order_that_is_cancelled_before_the_worker_is_up_ends(queue: PredictionQueue) -> None:
    hanging = queue.submit(order("hang"), ADA)
    until(lambda: hanging.state == "running")
    queue.cancel(hanging)
    ended(queue, hanging)
    assert hanging.state == "cancelled" and not list(queue.results.iterdir())


def test_too_many_orders_of_one_page_are_refused(queue: PredictionQueue) -> None:
    ordered = [queue.submit(order("hang"), ADA)]
    until(lambda: ordered[0].state == "running")
    ordered += [queue.submit(order("x"), ADA) for _ in range(predictions.MAX_WAITING_OF_SESSION)]
    with pytest.raises(OptionError, match="waiting"):
        queue.submit(order("x"), ADA)
    assert queue.submit(order("x"), BEN).state == "queued"
    for each in reversed(ordered):
        queue.cancel(each)
    ended(queue, *ordered)


def test_a_failure_carries_its_problems_and_leaves_nothing_on_disk(queue: PredictionQueue) -> None:
    failed, died = queue.submit(order("fail"), ADA), queue.submit(order("die"), ADA)
    good = queue.submit(order("good"), ADA)
    ended(queue, failed, died, good)
    assert failed.problems == [{"option": "steps", "message": "steps: 0 is too few"}]
    assert "signal 9" in died.text and died.advice and died.lines == ("last words of the worker",)
    assert good.state == "done" and [path.name for path in queue.results.iterdir()] == [good.folder]


def test_a_full_disk_is_a_sentence_before_and_after_the_images_are_made(queue: PredictionQueue) -> None:
    name, _size = queue.take_image(image())
    path = queue.image(name, ADA)
    # The worker is there already, and its own disk is not full.
    ended(queue, good := queue.submit(order("good"), ADA))
    for room, controls in ((path.stat().st_size - 1, (path,)), (50, ())):
        with no_larger_than(room):
            ended(queue, full := queue.submit(PredictionOrder({"prompt": "p", "steps": 1}, controls, {"texts": {}}), ADA))
            with pytest.raises(OptionError, match=r"the disk of .* is full; free some space there"):
                queue.take_image(image(size=(80, 80)))
        assert full.state == "failed" and "is full; free some space there" in full.text and "Error" not in full.text
    assert [folder.name for folder in queue.results.iterdir()] == [good.folder]


# What is kept


def test_results_are_found_again_by_their_session_only_and_by_a_later_studio(
    queue: PredictionQueue, backend: WorkerBackend, tmp_path: Path
) -> None:
    name, size = queue.take_image(image())
    path = queue.image(name, ADA)
    variants = [{"label": "base"}, {"label": "mine", "lora": ["x"], "lora_weight": [1.0]}]
    made = queue.submit(PredictionOrder({"prompt": "p", "steps": 1, "variants": variants}, (path,), {"texts": {"prompt": "p"}}), ADA)
    ended(queue, made)
    (entry,) = PredictionQueue(backend, tmp_path).history(ADA)
    assert size == (64, 48) and entry["controls"] == ["control-0.png"] and "session" not in entry
    assert [(each["label"], each["seed"]) for each in entry["results"]] == [("base", 7), ("mine", 7)]
    assert queue.history(BEN) == []
    result = queue.image(f"{entry['folder']}/1.png", ADA)
    with Image.open(result) as opened:
        assert opened.info["prompt"] == "p"
    for name in (f"{entry['folder']}/1.png", f"{entry['folder']}/settings.json"):
        with pytest.raises(KeyError):
            queue.image(name, BEN)
    for bad in ("settings.json", "../x.png", "..", "", "9.png", "/etc/passwd", "x" * 40):
        with pytest.raises(KeyError):
            queue.image(f"{entry['folder']}/{bad}", ADA)
        with pytest.raises(KeyError):
            queue.image(bad, ADA)


def test_an_upload_is_kept_upright_as_plain_rgb_without_what_the_camera_wrote(queue: PredictionQueue) -> None:
    exif = Image.Exif()
    exif[274], exif[271] = 6, "Camera"
    name, size = queue.take_image(image((64, 48), "JPEG", exif=exif))
    with Image.open(queue.image(name, ADA)) as kept:
        assert (kept.size, size, kept.mode, kept.format, dict(kept.getexif())) == ((48, 64), (48, 64), "RGB", "PNG", {})
    assert queue.take_image(image((64, 48), "JPEG", exif=exif))[0] == name, "the same file is kept once"


@pytest.mark.parametrize(
    "data", [b"", b"no image", b"\x89PNG\r\n\x1a\n broken", image()[:200], b"<svg xmlns='http://www.w3.org/2000/svg'/>"]
)
def test_what_is_no_image_is_refused_and_not_kept(queue: PredictionQueue, data: bytes) -> None:
    with pytest.raises(OptionError, match="images"):
        queue.take_image(data)
    assert list(queue.uploads.iterdir()) == []


def test_old_uploads_go_and_old_results_where_strangers_come(backend: WorkerBackend, tmp_path: Path) -> None:
    queue = PredictionQueue(backend, tmp_path, keep_results_seconds=60)
    name, _ = queue.take_image(image())
    made = queue.submit(order("x"), ADA)
    ended(queue, made)
    queue.sweep()
    assert len(queue.history(ADA)) == 1 and queue.image(name, ADA).is_file()
    for path in (queue.uploads / name, queue.results / made.folder):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    queue.sweep()
    assert queue.history(ADA) == [] and list(queue.uploads.iterdir()) == []
    queue.close()


# What a page may ask for


@pytest.fixture
def menu(tmp_path: Path) -> Menu:
    (tmp_path / "mine.safetensors").write_bytes(b"x")
    offered = [LoraFile("shown", tmp_path / "mine.safetensors", "run", "mine")]
    return Menu(loras=lambda: offered, roots=(tmp_path,))


def test_the_page_becomes_a_request_with_the_changed_options_only(menu: Menu, queue: PredictionQueue, tmp_path: Path) -> None:
    name, _ = queue.take_image(image())
    texts = {
        "prompt": "make it red",
        "steps": "12",
        "true_cfg_scale": "1",
        "seed": "",
        "size": "64, 96",
        "offload": True,
        "precision": "auto",
    }
    asked = {"texts": texts, "images": [name], "loras": [{"name": "shown", "weight": "0,5"}, {"name": "", "weight": "1"}]}
    made = predict_routes.order_of(menu, queue, asked, ADA)
    assert made.request == {
        "prompt": "make it red", "steps": 12, "true_cfg_scale": 1.0, "size": (64, 96), "offload": True,
        "pretrained_model_name_or_path": "toy", "lora": (str(tmp_path / "mine.safetensors"),), "lora_weight": (0.5,),
    }  # fmt: skip
    assert made.controls == (queue.uploads / name,) and made.settings["images"] == [name]


def test_a_comparison_has_variants_instead_of_files(menu: Menu, queue: PredictionQueue) -> None:
    rows = [{"name": "shown", "weight": 1}]
    asked = {"texts": {"prompt": "x"}, "loras": rows, "variants": [{"label": "base", "loras": []}, {"label": "mine", "loras": rows}]}
    request = predict_routes.order_of(menu, queue, asked, ADA).request
    assert "lora" not in request and [variant["label"] for variant in request["variants"]] == ["base", "mine"]
    assert "lora" not in request["variants"][0] and request["variants"][1]["lora_weight"] == [1.0]


def test_every_problem_is_told_at_once_and_at_its_field(menu: Menu, queue: PredictionQueue) -> None:
    texts = {
        "prompt": "",
        "steps": "0",
        "seed": "-1",
        "vae": "/etc/passwd",
        "vae_device": "gpu",
        "pretrained_model_name_or_path": "../../x.safetensors",
    }
    asked = {"texts": texts, "images": ["f" * 32 + ".png"], "loras": [{"name": "/etc/shadow", "weight": "much"}]}
    with pytest.raises(OptionError) as caught:
        predict_routes.order_of(menu, queue, asked, ADA)
    wrong = {problem.option for problem in caught.value.problems}
    assert wrong >= {"steps", "seed", "vae", "vae_device", "pretrained_model_name_or_path", "images", "lora"}
    with pytest.raises(OptionError) as caught:
        predict_routes.order_of(menu, queue, {"texts": {"prompt": " ", "steps": "0"}}, ADA)
    assert {problem.option for problem in caught.value.problems} == {"steps", "prompt"}


def test_a_page_without_paths_takes_only_what_it_offers(queue: PredictionQueue, tmp_path: Path) -> None:
    offered = [LoraFile("shown", tmp_path / "mine.safetensors", "run", "mine")]
    menu = Menu(
        lambda: offered, None, {"pretrained_model_name_or_path": "toy"}, frozenset({"prompt", "steps", "size"}), {"steps": 50, "size": 512}
    )
    texts = {"prompt": "x", "steps": "5", "pretrained_model_name_or_path": "/etc", "text_encoder": "/etc", "out": "/etc"}
    request = predict_routes.order_of(menu, queue, {"texts": texts, "loras": [{"name": "shown"}]}, ADA).request
    assert request == {
        "prompt": "x",
        "steps": 5,
        "pretrained_model_name_or_path": "toy",
        "lora": (str(offered[0].path),),
        "lora_weight": (1.0,),
    }
    for bad in ({"loras": [{"name": str(offered[0].path)}]}, {"texts": texts | {"steps": "51"}}, {"texts": texts | {"size": "1024"}}):
        with pytest.raises(OptionError):
            predict_routes.order_of(menu, queue, {"texts": texts, **bad}, ADA)


def test_every_option_of_prediction_is_on_the_page_once(menu: Menu) -> None:
    spec = predict_routes.specification(menu)
    drawn = [field["name"] for field in (*spec["first"], *spec["model"], *(field for group in spec["rest"] for field in group["fields"]))]
    shown = [name for name, field in flat.fields(QwenImagePredict).items() if not field.show.cli_only and name not in predict_routes.UNSEEN]
    assert sorted(drawn) == sorted(shown) and len(set(drawn)) == len(drawn)
    assert len(spec["first"]) + len(spec["model"]) <= 10


# What the studio draws with


@pytest.fixture
def studio_menu(tmp_path: Path) -> Iterator[Menu]:
    """A studio over two runs, of two families, and one that has saved nothing."""
    for family, name, more in (
        ("sdxl", "first", {"sample_prompts": "a red star --d 5\na cat", "sample_steps": 9, "max_token_length": 150}),
        ("flux", "second", {}),
        ("sdxl", "empty", {}),
    ):
        given = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": str(tmp_path), "output_name": name}
        run = RunDirectory.create(tmp_path, name, flat.build(RUNS[family, "network"], {**given, **more}))
        run.log(RunFinished(step=1, text="", advice=""))
        if name != "empty":
            (run.path / f"{name}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    run.samples.mkdir()
    context = Context(JobSupervisor(tmp_path), "token", tmp_path, (tmp_path,), PredictionQueue(WorkerBackend(), tmp_path))
    yield predict_routes.studio_menu(context)
    context.supervisor.close()


def test_runs_that_saved_something_are_offered_newest_first_and_the_newest_is_chosen(studio_menu: Menu) -> None:
    assert studio_menu.saved is not None
    assert [(item.label, item.family) for item in studio_menu.saved()] == [("second", "flux"), ("first", "sdxl")]
    spec = predict_routes.specification(studio_menu)
    assert spec["choice"]["family"] == "flux" and "images" not in spec["help"] and not spec["choice"]["edits"]
    names = [field["name"] for field in spec["first"]]
    assert {"guidance", "sampler", "scheduler"} <= set(names)


def test_base_settings_files_and_words_of_a_run_are_filled_in(studio_menu: Menu) -> None:
    first = studio_menu.saved()[1]  # type: ignore[misc]
    choice = studio_menu.chosen(first.name, "sdxl")
    spec = predict_routes.specification(studio_menu, choice)
    defaults = {field["name"]: field["default"] for field in (*spec["first"], *spec["model"])}
    assert (defaults["steps"], defaults["pretrained_model_name_or_path"]) == ("9", "toy")
    assert spec["choice"]["words"] == "a red star" and spec["choice"]["loras"] == [first.name]


def test_an_order_carries_what_the_run_was_and_the_strengths_of_the_page(studio_menu: Menu, queue: PredictionQueue) -> None:
    first = studio_menu.saved()[1]  # type: ignore[misc]
    texts = {"draw_with": first.name, "family": "sdxl", "prompt": "a dog", "steps": "3", "seed": ""}
    asked = {"texts": texts, "loras": [{"name": first.name, "weight": "0.5"}]}
    made = predict_routes.order_of(studio_menu, queue, asked, ADA)
    wanted = {"prompt": "a dog", "steps": 3, "lora": (first.name,), "lora_weight": (0.5,), "family": "sdxl", "max_token_length": 150}
    assert wanted.items() <= made.request.items() and "draw_with" not in made.request and "prompt_list" not in made.request
    assert made.settings["texts"]["draw_with"] == first.name
    for wrong, said in (
        ({"size": "100,64"}, "size: 100x64 is off the model's grid"),
        ({"prompt": "", "prompt_list": "a cat --w 100\na dog"}, r"prompt_list: line 1: width \(--w\) 100 is not a multiple of 8"),
        ({"prompt": "", "prompt_list": "/etc/prompts.txt"}, "prompt_list: /etc/prompts.txt is outside the folders"),
    ):
        with pytest.raises(OptionError, match=said):
            predict_routes.order_of(studio_menu, queue, {"texts": texts | wrong, "loras": []}, ADA)
    # Without a prompt it is asked for those of its previews.
    empty = predict_routes.order_of(studio_menu, queue, {"texts": {**texts, "prompt": ""}, "loras": []}, ADA)
    assert empty.request["prompt_list"].startswith("a red star --d 5") and "lora" not in empty.request


def test_an_order_with_nothing_to_draw_with_or_outside_of_the_folders_is_a_sentence(studio_menu: Menu, queue: PredictionQueue) -> None:
    for texts, option in (({"draw_with": "/etc/passwd"}, "draw_with"), ({"draw_with": "toy", "family": "lgt"}, "draw_with")):
        with pytest.raises(OptionError) as caught:
            predict_routes.order_of(studio_menu, queue, {"texts": {"prompt": "x", **texts}}, ADA)
        assert option in {problem.option for problem in caught.value.problems}


# The routes


@pytest.fixture
def client(menu: Menu, queue: PredictionQueue) -> Iterator[TestClient]:
    with TestClient(Starlette(routes=predict_routes.routes(menu, queue))) as client:
        yield client


def test_an_image_goes_up_is_edited_and_comes_back_to_its_session_only(client: TestClient) -> None:
    sent = client.post("/kl/predict/upload", content=image()).json()["image"]
    assert (sent["width"], sent["height"]) == (64, 48)
    thumb = client.get("/kl/predict/image", params={"name": sent["name"], "size": "thumb"})
    assert thumb.headers["content-type"] == "image/webp"
    asked = {"texts": {"prompt": "red", "steps": "2"}, "images": [sent["name"]]}
    job = client.post(f"/kl/predict/start?session={ADA}", json=asked).json()["job"]
    assert client.get(f"/kl/predict/job/{job}?session={BEN}").status_code == 404
    until(lambda: client.get(f"/kl/predict/job/{job}?session={ADA}").json()["state"] == "done")
    now = client.get(f"/kl/predict/job/{job}?session={ADA}").json()
    assert now["preview"].startswith("data:image/") and now["step"] == 2 and now["seeds"] == [7]
    assert client.get(f"/kl/predict/job/{job}?session={ADA}&previews={now['previews']}").json()["preview"] == ""
    (entry,) = client.get(f"/kl/predict/now?session={ADA}").json()["history"]
    name = f"{entry['folder']}/{entry['results'][0]['file']}"
    kept = client.get("/kl/predict/image", params={"name": name, "session": ADA, "size": "file"})
    assert "attachment" in kept.headers["content-disposition"] and b"prompt" in kept.content
    assert client.get("/kl/predict/image", params={"name": name, "session": BEN}).status_code == 404
    assert client.post("/kl/predict/free").json() == {"holdsMemory": False}


def test_nonsense_is_answered_without_a_traceback(client: TestClient) -> None:
    assert client.post(f"/kl/predict/start?session={ADA}", content=b"{").status_code == 400
    assert client.post("/kl/predict/start?session=../..", json={}).status_code == 400
    odd: list[Any] = [
        {},
        {"texts": [], "images": 5, "loras": "x", "variants": {"a": 1}},
        {"texts": {"prompt": 7, "steps": None}, "loras": [None, 3]},
    ]
    for asked in odd:
        assert client.post(f"/kl/predict/start?session={ADA}", json=asked).json()["problems"]
    assert "problems" in client.post("/kl/predict/upload", content=b"x").json()
    assert client.get(f"/kl/predict/job/none?session={ADA}").status_code == 404
    assert client.get("/kl/predict/image", params={"name": "../../etc/passwd"}).status_code == 404


def test_an_upload_above_the_limit_is_not_read_to_its_end(client: TestClient) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1
            yield bytes(1 << 20)

    answer = client.post("/kl/predict/upload", content=endless()).json()
    assert "larger than 50 MiB" in answer["problems"][0]["message"]
