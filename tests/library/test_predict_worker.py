"""The worker's protocol on a tiny model: events in order, the queue, cancelling, comparing, freeing; in one process and through pipes."""

from __future__ import annotations

import base64
import io
import json
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.render.predicting.in_process import InProcess
from sd_scripts.library.render.predicting.orders import order_of
from sd_scripts.library.render.predicting.serve import Worker
from sd_scripts.library.render.predicting.work import Workbench, failed
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import free_path
from tests.library.networks.adapters_in_small import shaken

Event = Mapping[str, Any]
LAST = {"done", "failed", "cancelled"}
PATIENCE_SECONDS = 120.0
QWEN = QwenEdit()
READ = partial(flat.build, QwenImagePredict)
DRAW = np.random.default_rng(random.getrandbits(64))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    QWEN.save(QWEN.tiny(), folder, "diffusers", None, {})
    return folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, parts = tmp_path_factory.mktemp("lora") / "painted.safetensors", QWEN.tiny()
    network = attach(parts, QwenImageNetworkOptions(network_dim=4, lora_targets="attention"), QWEN.adapter_targets(parts, False), 0)
    export(shaken(network), parts, path, save_model_as="kohya", precision="float")
    return str(path)


@pytest.fixture
def request_of(base: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    control = tmp_path / "before.png"
    Image.fromarray(DRAW.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(control)

    def made(id: str = "a", **changes: Any) -> dict[str, Any]:
        return {
            "op": "predict",
            "id": id,
            "prompt": "make the circle red",
            "images": [str(control)],
            "steps": 3,
            "seed": 5,
            "pretrained_model_name_or_path": str(base),
            "out": str(tmp_path / "out"),
            **changes,
        }

    return made


def done_with(bench: Workbench, given: Mapping[str, Any], cancelled: Callable[[], bool] = lambda: False) -> list[Event]:
    events: list[Event] = []
    bench.carry_out(order_of(READ, given, {}), events.append, cancelled)
    return events


def kinds(events: list[Event]) -> list[str]:
    return [event["event"] for event in events]


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_a_request_is_told_from_loading_to_done_and_the_next_one_loads_nothing(request_of: Callable[..., dict[str, Any]]) -> None:
    bench = Workbench()
    events = done_with(bench, request_of(num_images=2))
    assert kinds(events) == ["loading", "loaded", "started", *["step"] * 3, "image", *["step"] * 3, "image", "done"]
    assert all(event["id"] == "a" for event in events)
    assert events[1]["model_version"] == "edit-2509" and events[1]["controls"] == [1, 3] and events[1]["precision"] == "float32"
    assert events[2] | {"seconds": 0} == {
        "event": "started", "id": "a", "size": [64, 64], "seeds": [5, 6], "steps": 3, "images": 2, "variants": ["base"], "seconds": 0,
    }  # fmt: skip
    done = events[-1]
    assert done["seeds"] == [5, 6] and done["grid"] is None and [Path(file).is_file() for file in done["files"]] == [True, True]
    assert [event["done"] for event in events if event["event"] == "step"] == [0, 0, 0, 1, 1, 1]
    again = done_with(bench, request_of("b", num_images=2, true_cfg_scale=1.0))
    assert kinds(again)[0] == "started" and not set(again[-1]["files"]) & set(done["files"])
    assert not (pixels(again[-1]["files"][0]) == pixels(done["files"][0])).all()


@pytest.fixture(scope="module")
def bench() -> Workbench:
    """One that has the model already, except for the first who asks it."""
    return Workbench()


def test_a_step_carries_a_thumbnail_as_often_as_asked(request_of: Callable[..., dict[str, Any]], bench: Workbench) -> None:
    shown = [event["preview"] for event in done_with(bench, request_of(steps=4, preview_every=3)) if event["event"] == "step"]
    assert [preview is not None for preview in shown] == [False, False, True, True]
    kind, _, data = shown[-1].partition(",")
    assert kind == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 64)
    assert {event["preview"] for event in done_with(bench, request_of(preview_every=0)) if event["event"] == "step"} == {None}


def test_a_file_tells_what_made_it_and_never_where_things_are(
    request_of: Callable[..., dict[str, Any]], lora: str, tmp_path: Path, bench: Workbench
) -> None:
    (file,) = done_with(bench, request_of(lora=[lora], lora_weight=[0.5], negative_prompt="dull"))[-1]["files"]
    with Image.open(file) as image:
        text: dict[str, Any] = dict(image.text)
    made = json.loads(text["request"])
    assert (made["prompt"], made["negative_prompt"], made["steps"], made["seed"], made["cfg_scale"]) == (
        "make the circle red", "dull", 3, 5, 4.0,
    )  # fmt: skip
    assert made["controls"] == ["before.png"] and made["source"] == "tiny"
    (adapter,) = made["adapters"]
    assert adapter["name"] == "painted.safetensors" and adapter["weight"] == 0.5 and len(adapter["sha256"]) == 64
    assert f"painted: {adapter['sha256'][:10]}" in text["parameters"]
    assert str(tmp_path) not in json.dumps(text)


def test_images_of_the_same_second_get_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"somebody's")
    found = [free_path(tmp_path, "x") for _ in range(3)]
    assert [path.name for path in found] == ["x-2.png", "x-3.png", "x-4.png"]
    assert (tmp_path / "x.png").read_bytes() == b"somebody's"


def test_comparing_gives_all_variants_from_the_same_seeds_and_one_image_of_all(
    request_of: Callable[..., dict[str, Any]], lora: str, bench: Workbench
) -> None:
    variants = [{}, {"lora": [lora]}, {"lora": [lora], "lora_weight": [0.5], "label": "half"}]
    events = done_with(bench, request_of(variants=variants, num_images=2))
    done = events[-1]
    assert [one["label"] for one in done["variants"]] == ["base", "painted", "half"]
    assert [len(one["files"]) for one in done["variants"]] == [2, 2, 2] and len(set(done["files"])) == 6
    first = [pixels(one["files"][0]) for one in done["variants"]]
    assert (first[0] != first[1]).any() and (first[1] != first[2]).any()
    (alone,) = done_with(bench, request_of("b", lora=[lora], lora_weight=[0.5]))[-1]["files"]
    assert (pixels(alone) == first[2]).all()
    table = pixels(done["grid"])
    assert table.shape[1] == 3 * 64 + 2 * 8 and (table[-64:, :64] == pixels(done["variants"][0]["files"][1])).all()
    assert next(event["images"] for event in events if event["event"] == "step") == 6


def test_cancelling_ends_between_steps_and_keeps_what_was_finished(request_of: Callable[..., dict[str, Any]], bench: Workbench) -> None:
    events: list[Event] = []
    order = order_of(READ, request_of(num_images=2, steps=5), {})
    bench.carry_out(order, events.append, lambda: sum(event["event"] == "step" for event in events) >= 7)
    assert kinds(events).count("step") == 7 and events[-1]["event"] == "cancelled"
    assert len(events[-1]["files"]) == 1 and Path(events[-1]["files"][0]).is_file()
    assert kinds(done_with(bench, request_of("b")))[-1] == "done"


def test_what_is_wrong_is_told_before_the_model_is_loaded(request_of: Callable[..., dict[str, Any]]) -> None:
    (event,) = done_with(Workbench(), request_of(images=["/nowhere.png"], lora=["/nowhere.safetensors"], size=[100, 64]))
    assert event["event"] == "failed" and {problem["option"] for problem in event["problems"]} == {"images", "lora", "size"}


def test_other_options_of_the_model_load_it_again_and_a_wrong_one_keeps_nothing(request_of: Callable[..., dict[str, Any]]) -> None:
    bench = Workbench()
    assert "loaded" in kinds(done_with(bench, request_of(steps=1)))
    (loaded,) = [event for event in done_with(bench, request_of(steps=1, precision="bf16")) if event["event"] == "loaded"]
    assert loaded["precision"] == "bfloat16"
    wrong = done_with(bench, request_of(steps=1, pretrained_model_name_or_path="/nowhere"))
    assert kinds(wrong) == ["loading", "failed"] and "/nowhere" in wrong[-1]["text"] and not bench.holds_memory()
    assert kinds(done_with(bench, request_of(steps=1)))[-1] == "done"


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "no memory left"), (KeyError("weight"), "KeyError: 'weight'")],
)
def test_an_error_of_the_machinery_is_told_too(error: Exception, words: str) -> None:
    event = failed("a", error)
    assert words in event["text"] and event["advice"] and event["problems"] == [] and event["id"] == "a"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": []}, "a list of 1 to 16"),
        ({"variants": [{"lora": ["a"], "lora_weight": [1, 2]}]}, "number 1: lora_weight has 2 numbers"),
        ({"variants": [{"loras": []}]}, "number 1 has loras"),
        ({"variants": [{}], "lora": ["a"]}, "leave lora out"),
        ({"preview_every": -1}, "preview_every: -1"),
        ({"stepz": 1}, "Did you mean steps?"),
        ({"serve": True}, "only be given on the command line"),
        ({"images": ["1", "2", "3", "4"]}, "images"),
        ({"prompt": " "}, "prompt is missing"),
        ({"vae_device": "gpu7"}, "'gpu7' is not a device"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("?", r"\?")):
        order_of(READ, {"id": "a", "prompt": "x", "pretrained_model_name_or_path": "toy", **changes}, {})


def test_a_request_leaves_to_the_worker_what_it_does_not_say() -> None:
    order = order_of(
        READ,
        {"id": "a", "prompt": "x"},
        {"pretrained_model_name_or_path": "toy", "steps": 9, "lora": ["a"], "lora_weight": [0.5]},
    )
    assert order.options.predict.steps == 9 and order.variants[0].lora == ("a",) and order.variants[0].lora_weight == (0.5,)
    compared = order_of(READ, {"id": "a", "prompt": "x", "variants": [{}]}, {"pretrained_model_name_or_path": "toy", "lora": ["a"]})
    assert compared.variants[0].lora == () and compared.options.loading.lora == ()


# The worker through pipes


class Pipes:
    """A worker in threads of this process, reached as the studio reaches its own: through pipes."""

    def __init__(self) -> None:
        self.lines, self.requests = self._pipe()
        events, out = self._pipe()
        self.worker = Worker(READ, out, {})
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.worker.greet()
        self.threads = [
            threading.Thread(target=self.worker.read, args=(self.lines,)),
            threading.Thread(target=self._work, args=(out,)),
            threading.Thread(target=lambda: [self.events.put(json.loads(line)) for line in events] and events.close()),
        ]
        for thread in self.threads:
            thread.start()

    @staticmethod
    def _pipe() -> tuple[IO[str], IO[str]]:
        read, write = os.pipe()
        return os.fdopen(read, encoding="utf-8"), os.fdopen(write, "w", encoding="utf-8")

    def _work(self, out: IO[str]) -> None:
        self.worker.work()
        out.close()

    def send(self, *messages: Mapping[str, Any] | str) -> None:
        for message in messages:
            self.requests.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
        self.requests.flush()

    def until(self, wanted: Callable[[Event], bool]) -> list[Event]:
        """Events up to the first that is wanted."""
        found: list[Event] = []
        while not found or not wanted(found[-1]):
            found.append(self.events.get(timeout=PATIENCE_SECONDS))
        return found

    def close(self) -> None:
        self.requests.close()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        self.lines.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


def ends(id: str) -> Callable[[Event], bool]:
    return lambda event: event.get("id") == id and event["event"] in LAST


def test_waiting_requests_know_their_place_and_leave_when_cancelled(pipes: Pipes, request_of: Callable[..., dict[str, Any]]) -> None:
    pipes.send(request_of("a", steps=300), request_of("b", steps=1), request_of("c", steps=1))
    events = pipes.until(lambda event: event["event"] == "step")
    assert events[0]["event"] == "ready" and events[0]["protocol"] == 1 and "cpu" in events[0]["devices"]
    pipes.send(request_of("c"), {"op": "cancel", "id": "b"}, {"op": "cancel", "id": "nobody"}, {"op": "cancel", "id": "a"})
    events += pipes.until(ends("c"))
    told = [(event["id"], event["ahead"]) for event in events if event["event"] == "queued"]
    assert told[:1] == [("a", 0)] and ("b", 1) in told and ("c", 2) in told and ("c", 1) in told and ("c", 0) not in told[:2]
    assert [(event["id"], event["event"]) for event in events if event["event"] in LAST] == [
        (None, "failed"), ("b", "cancelled"), ("a", "cancelled"), ("c", "done"),
    ]  # fmt: skip


def test_lines_that_are_no_requests_are_answered_and_the_worker_lives_on(pipes: Pipes, request_of: Callable[..., dict[str, Any]]) -> None:
    pipes.send("{", "[1]", '{"op": "dance", "id": "d"}', '{"op": "predict", "prompt": "x"}', "", {"op": "predict", "id": "e", "steps": 0})
    pipes.send(request_of("good", steps=1))
    events = pipes.until(ends("good"))
    failed = [(event["id"], event["text"]) for event in events if event["event"] == "failed"]
    assert [id for id, _ in failed] == [None, None, "d", None, "e"]
    assert "not JSON" in failed[0][1] and "'dance'" in failed[2][1] and "id is missing" in failed[3][1] and "steps: 0" in failed[4][1]
    assert events[-1]["event"] == "done"


def test_freeing_waits_for_what_was_asked_before(pipes: Pipes, request_of: Callable[..., dict[str, Any]]) -> None:
    pipes.send(request_of("a", steps=2), {"op": "free", "id": "f"}, request_of("b", steps=1))
    shown = [(event["event"], event.get("id")) for event in pipes.until(ends("b"))]
    assert shown.index(("done", "a")) < shown.index(("freed", "f")) < shown.index(("loading", "b"))


def test_quit_ends_what_runs_and_what_waits(pipes: Pipes, request_of: Callable[..., dict[str, Any]]) -> None:
    pipes.send(request_of("a", steps=300), request_of("b"))
    pipes.until(lambda event: event["event"] == "step")
    pipes.send({"op": "quit"})
    ended = [(event["id"], event["event"]) for event in pipes.until(ends("b")) if event["event"] in LAST]
    assert ended == [("a", "cancelled"), ("b", "cancelled")]


# Without a second process


def test_the_same_events_come_without_a_worker(request_of: Callable[..., dict[str, Any]], base: Path) -> None:
    backend = InProcess(READ, {"pretrained_model_name_or_path": str(base), "steps": 2})
    given = request_of()
    del given["pretrained_model_name_or_path"], given["op"], given["steps"]
    assert not backend.holds_memory()
    assert kinds(list(backend.submit(given))) == ["queued", "loading", "loaded", "started", "step", "step", "image", "done"]
    assert backend.holds_memory()
    (refused,) = backend.submit({"id": "x", "steps": 0, "prompt": "x"})
    assert refused["event"] == "failed" and refused["problems"][0]["option"] == "steps"
    backend.free()
    assert not backend.holds_memory()


def test_cancelling_and_leaving_end_a_request_without_a_worker(request_of: Callable[..., dict[str, Any]]) -> None:
    backend, events = InProcess(READ), []
    for event in backend.submit(request_of(steps=300)):
        events.append(event)
        if event["event"] == "step":
            backend.cancel("a")
    assert events[-1]["event"] == "cancelled"
    running = backend.submit(request_of("b", steps=300))
    assert next(event for event in running if event["event"] == "step")
    running.close()
    assert kinds(list(backend.submit(request_of("c", steps=1))))[-1] == "done"


def test_requests_from_several_threads_wait_for_one_another(request_of: Callable[..., dict[str, Any]]) -> None:
    backend = InProcess(READ)
    found: dict[str, list[Event]] = {}

    def ask(id: str) -> None:
        found[id] = list(backend.submit(request_of(id, steps=2)))

    threads = [threading.Thread(target=ask, args=(id,)) for id in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert {events[-1]["event"] for events in found.values()} == {"done"}
    assert sum("loaded" in kinds(events) for events in found.values()) == 1
