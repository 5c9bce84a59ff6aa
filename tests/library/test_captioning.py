"""Captions by a model: transformers' classes with small random weights, a tagger in ONNX, a server on this machine, the toy reader."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sd_scripts.dataset.caption_files import HISTORY, Book, read
from sd_scripts.library.captioning import captioner, endpoint, tagger, vision_models
from sd_scripts.library.captioning.toy_reader import ToyReader
from sd_scripts.library.tools import captioning, run
from sd_scripts.schema.captioning import KEY_VARIABLE, CaptionImages, CaptionSection
from sd_scripts.schema.command_line import parse_tool
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build
from sd_scripts.toy import worlds
from tests import small_captioners
from tests.caption_server import Server, answer


def noise(seed: int, width: int = 48, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def options_for(folder: Path | str = ".", model: Path | str = "toy", **values: Any) -> CaptionSection:
    return CaptionSection(image_dir=str(folder), caption_model=str(model), **values)


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    """Images of the toy worlds; the first has a caption already."""
    folder = tmp_path / "toys"
    (folder / "deep").mkdir(parents=True)
    for number, scene in enumerate(worlds.scenes()[::23]):
        worlds.draw(scene, 64, 64, worlds.rng_for(5, number)).save(folder / ("deep" if number % 2 else "") / f"{number}.png")
    (folder / "0.txt").write_text("there before")
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.txt"))}


def greedy(model: Any, given: dict[str, Any], count: int) -> torch.Tensor:
    """The likeliest tokens one after another, from whole forward passes: generate() without generate()."""
    if model.config.is_encoder_decoder:
        made = torch.full((1, 1), model.config.text_config.decoder_start_token_id)
    else:
        made = given["input_ids"]
    begun = made.shape[1]
    for _ in range(count):
        if model.config.is_encoder_decoder:
            said = model(**given, decoder_input_ids=made).logits
        else:
            more = made.shape[1] - begun
            longer = {"input_ids": made, "attention_mask": torch.ones_like(made)}
            if "mm_token_type_ids" in given:
                longer["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, more))
            said = model(**{**given, **longer}, use_cache=False).logits
        best = said[:, -1].argmax(-1, keepdim=True)
        made = torch.cat([made, best], 1)
        if best.item() == 2:
            break
    return made[0, begun:]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("blip2", "qwen25") else ()) for name in small_captioners.BUILDERS]
)
def test_what_a_model_says_comes_from_its_weights_its_image_and_its_instruction(name: str, tmp_path: Path) -> None:
    folder = small_captioners.build(name, tmp_path / name, seed=3)
    length = 8
    asked = {} if name == "florence" else {"instruction": "the color of the star"}
    looking = vision_models.VisionModel(folder, options_for(model=folder, max_new_tokens=length, **asked))
    seen = [Image.new("RGB", (40, 48), "white"), noise(0), Image.new("RGB", (48, 40), "black")]
    said = looking.captions(seen)
    assert all(said) and len(set(said)) > 1
    assert said == [looking.captions([image])[0] for image in seen], "alone as in company"
    model, processor = looking._model, looking._processor
    for image, words in zip(seen, said, strict=True):
        given = dict(processor(images=[image], text=[looking._prompt], return_tensors="pt"))
        with torch.inference_mode():
            made = greedy(model, given, length)
        assert processor.tokenizer.decode(made, skip_special_tokens=True).strip() == words
    # Other weights say something else, another question too.
    other = small_captioners.build(name, tmp_path / "other", seed=4)
    assert vision_models.VisionModel(other, options_for(model=other, max_new_tokens=length, **asked)).captions(seen) != said
    if name.startswith("qwen"):
        assert "<|image_pad|>" in looking._prompt and "the color of the star" in looking._prompt


def test_a_model_is_refused_with_a_sentence_before_it_answers_from_random_weights(tmp_path: Path) -> None:
    folder = small_captioners.build("blip2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("qformer.layernorm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(OptionError, match=r"does not have 1 of the weights .* qformer\.layernorm\.weight"):
        vision_models.VisionModel(folder, options_for(model=folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(OptionError, match="cannot be loaded"):
        vision_models.VisionModel(folder, options_for(model=folder))
    # Code that a model brings along is not run, and there is no second way.
    (folder / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}))
    (folder / "theirs.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(OptionError, match=r"config\.json"):
        vision_models.VisionModel(folder, options_for(model=folder))
    with pytest.raises(OptionError, match="no folder"):
        captioner.folder_of("caption_model", str(tmp_path / "nowhere"))


def test_a_tagger_writes_the_tags_that_are_likely_enough(tmp_path: Path) -> None:
    tags = [("rating", "9"), ("long_hair", "0"), ("^_^", "0"), ("rare", "0"), ("some_one", "4"), ("unwanted_tag", "0")]
    rng = np.random.default_rng(1)
    weights = (rng.normal(size=(3, len(tags))) / 60).astype(np.float32)
    folder = small_captioners.tagger(tmp_path / "tagger", weights, tags)
    found = tagger.Tagger(
        folder, options_for(model=folder, general_threshold=0.2, character_threshold=0.2, undesired_tags=("unwanted tag",))
    )
    image = Image.new("RGB", (64, 32), (200, 90, 30))
    # A second way to the same: half of the square is white, channels are BGR.
    mean = (np.array([30.0, 90.0, 200.0]) + 255.0) / 2
    chances = 1 / (1 + np.exp(-mean @ weights))
    wanted = [(place, chances[place], name.replace("_", " ") if len(name) > 3 else name, kind) for place, (name, kind) in enumerate(tags)]
    chosen = [each for each in wanted if each[3] in "04" and each[1] >= 0.2 and each[2] != "unwanted tag"]
    expected = [name for _, _, name, kind in sorted(chosen, key=lambda each: (each[3] != "4", -each[1]))]
    assert found.captions([image]) == [", ".join(expected)] and expected
    (folder / tagger.TAGS).write_text("tag_id,name,category,count\n0,one,0,1\n")
    with pytest.raises(OptionError, match="tells 6 tags"):
        tagger.Tagger(folder, options_for(model=folder)).captions([image])


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*answers: tuple[int, Any]) -> Server:
        servers.append(Server(answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_an_endpoint_gets_the_image_and_the_question_and_nothing_else(serve: Any) -> None:
    server = serve((200, answer("a star")), (200, answer([{"type": "text", "text": "in"}, {"type": "text", "text": "pieces"}])))
    asked = options_for(model="theirs", endpoint=server.url + "/", instruction="What is it?", max_new_tokens=33)
    assert endpoint.Endpoint(asked, "secret-key").captions([noise(1), noise(2)]) == ["a star", "in pieces"]
    headers, body = server.heard[0]
    assert headers["path"] == "/v1/chat/completions" and headers["authorization"] == "Bearer secret-key"
    assert body.keys() == {"model", "messages", "max_tokens"} and (body["model"], body["max_tokens"]) == ("theirs", 33)
    (message,) = body["messages"]
    text, image = message["content"]
    assert text == {"type": "text", "text": "What is it?"}
    sent = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
    with Image.open(io.BytesIO(sent)) as opened:
        assert opened.size == (48, 40) and not opened.getexif() and "exif" not in opened.info
        # Colours of noise are blurred by JPEG, its mean is not.
        assert np.abs(np.asarray(opened, float).mean((0, 1)) - np.asarray(noise(1), float).mean((0, 1))).max() < 3
    endpoint.Endpoint(options_for(model="theirs", endpoint=server.url), "").captions([noise(1)])
    assert "authorization" not in server.heard[-1][0]


def test_a_busy_endpoint_is_asked_again_and_one_that_refuses_is_not(serve: Any) -> None:
    server = serve((429, "slow down"), (503, ""), (200, answer("a star")))
    asked = options_for(model="theirs", endpoint=server.url)
    assert endpoint.Endpoint(asked, "", pauses=(0.0, 0.0)).captions([noise(1)]) == ["a star"] and len(server.heard) == 3
    for code, said, sentence in (
        (401, "no", KEY_VARIABLE),
        (302, "", "another address"),
        (400, "no such model, secret-key", "400: no such model, \\(the key\\)"),
        (200, "<html>", "no JSON"),
        (200, {"else": 1}, "chat completions"),
        (500, "", "after 1 further"),
    ):
        server = serve((code, said))
        refusing = endpoint.Endpoint(options_for(model="theirs", endpoint=server.url), "secret-key", pauses=(0.0,))
        with pytest.raises(OptionError, match=sentence) as err:
            refusing.captions([noise(1)])
        assert len(server.heard) == (2 if code == 500 else 1) and "secret-key" not in str(err.value)


def test_the_toy_reader_says_exactly_what_was_drawn() -> None:
    scenes = worlds.scenes((*worlds.SHAPES,))[::17]
    drawn = [worlds.draw(scene, 64, 64, worlds.rng_for(9, number)) for number, scene in enumerate(scenes)]
    assert ToyReader().captions(drawn) == [f"a {scene.color} {scene.shape} at the {scene.place}" for scene in scenes]
    assert ToyReader().captions([Image.new("RGB", (64, 64), "white")]) == [""]


def test_captions_are_written_only_where_they_are_missing_and_can_be_taken_back(toys: Path) -> None:
    (toys / "2.txt").write_text("  \n")
    before = texts(toys)
    report = captioning.caption(options_for(toys, trigger_word="zwx", replace_words=("circle=round ball", "a red=a crimson")))
    after = texts(toys)
    assert after["0"] == "there before" and report.values["written"] == len(after) - 1 and report.values["kept"] == 1
    scenes = worlds.scenes()[::23]
    for number, scene in enumerate(scenes[1:], 1):
        said = f"a {scene.color} {scene.shape} at the {scene.place}".replace("circle", "round ball").replace("a red", "a crimson")
        assert after[str(number)] == f"zwx, {said}"
    everything = captioning.caption(options_for(toys, overwrite=True))
    assert everything.values["written"] == len(scenes) and texts(toys)["0"].startswith("a ")
    book = Book(toys)
    assert book.undo()[0] == "captions by the exact reader of the toy worlds" and texts(toys) == after
    book.undo()
    assert {name: text.strip() for name, text in texts(toys).items()} == {name: text.strip() for name, text in before.items()}


def test_a_work_that_was_stopped_goes_on_where_it_was(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ToyReader.captions
    seen: list[int] = []

    def stopped_after_three(self: ToyReader, images: Sequence[Image.Image]) -> list[str]:
        seen.append(len(images))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return said(self, images)

    monkeypatch.setattr(ToyReader, "captions", stopped_after_three)
    asked = options_for(toys, overwrite=True, history_order="mine")
    with pytest.raises(KeyboardInterrupt):
        captioning.caption(asked)
    assert len((toys / HISTORY).read_text().splitlines()) == 3
    report = captioning.caption(asked)
    assert report.values["done_before"] == 3 and len(seen) == 1 + len(texts(toys)), "no image was looked at twice"
    everything = set(toys.rglob("*.txt"))
    assert Book(toys).undo()[1].keys() == everything
    assert texts(toys) == {"0": "there before"}
    # After Undo it begins anew.
    assert captioning.caption(asked).values["done_before"] == 0


def test_who_writes_meanwhile_keeps_their_words_and_what_cannot_be_read_is_named(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (toys / "4.png").write_bytes(b"no image")
    Image.new("RGB", (64, 64), "white").save(toys / "blank.png")
    said = ToyReader.captions

    def meanwhile(self: ToyReader, images: Sequence[Image.Image]) -> list[str]:
        (toys / "2.txt").write_text("somebody else's")
        return said(self, images)

    monkeypatch.setattr(ToyReader, "captions", meanwhile)
    report = captioning.caption(options_for(toys, caption_batch_size=20))
    assert report.values["others"] == ["2.txt"] and read(toys / "2.txt").text == "somebody else's"
    assert report.values["silent"] == ["blank.png"] and report.values["unreadable"][0].startswith("4.png ")
    assert "somebody else wrote meanwhile" in report.text


@pytest.mark.parametrize(
    ("words", "trigger", "replace", "wanted"),
    [
        ("A man walks.\n\nA  manor.", "zwx", ("a man=zwx man",), "zwx man walks. A manor."),
        ("a cat", "zwx", (), "zwx, a cat"),
        ("zwxy here", "zwx", (), "zwx, zwxy here"),
        ("a cat, zwx", "zwx", (), "a cat, zwx"),
        (" \n ", "zwx", (), ""),
        (r"a path", "", (r"path=C:\1\g<0>",), r"a C:\1\g<0>"),
        ("the image shows a cat", "", ("the image shows=",), "a cat"),
    ],
)
def test_trigger_words_and_replacements(words: str, trigger: str, replace: tuple[str, ...], wanted: str) -> None:
    assert captioning.finished(words, options_for(trigger_word=trigger, replace_words=replace)) == wanted


def test_a_list_names_images_and_their_caption_files(toys: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    rows = [{"file_name": "deep/1.png", "caption_file": "deep/1.caption"}, {"file_name": "2.png"}]
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert captioning.caption(options_for(toys, image_list=str(listed))).values["written"] == 2
    assert (toys / "deep/1.caption").is_file() and not (toys / "deep/1.txt").exists() and (toys / "2.txt").is_file()
    for line in ('{"file_name": "../a.png"}', "[]", "no", '{"file_name": "a.png", "caption_file": "/etc/a"}'):
        listed.write_text(line)
        with pytest.raises(OptionError, match="image_list"):
            captioning.caption(options_for(toys, image_list=str(listed)))


@pytest.mark.parametrize(
    "values",
    [
        {"endpoint": "ftp://a/v1"}, {"endpoint": "http://me:word@a/v1"}, {"endpoint": "http://a/v1?key=1"}, {"endpoint": "http://a:x/v1"},
        {"replace_words": ["a man"]}, {"caption_extension": "../x"}, {"general_threshold": 2},
    ],
)  # fmt: skip
def test_wrong_options_are_sentences(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        build(CaptionImages, {"image_dir": ".", "caption_model": "toy", **values})


def test_the_script_writes_captions_and_its_key_stays_out_of_what_it_says(
    toys: Path, serve: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: Any, tmp_path: Path
) -> None:
    caplog.set_level("INFO", logger="sd_scripts")
    server = serve((200, answer("a star")))
    monkeypatch.setenv(KEY_VARIABLE, "secret-key")
    line = ["--image_dir", str(toys), "--caption_model", "theirs", "--endpoint", server.url, "--report", str(tmp_path / "r.json")]
    assert run.start(parse_tool(CaptionImages, line)) == 0
    out, err = capfd.readouterr()
    count = len(texts(toys))
    assert server.heard[0][0]["authorization"] == "Bearer secret-key" and f"captions written: {count - 1}, of {count} images" in out
    assert f"what leaves this machine: {count - 1} images" in caplog.text and server.url in caplog.text
    kept = "".join(path.read_text() for path in [tmp_path / "r.json", *toys.rglob("*.txt"), toys / HISTORY])
    assert "secret-key" not in out + err + caplog.text + kept
