"""Four answers become settings: for each model and card a run that can be built, and a sentence with the cure for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from kohya_like import app, form, guide
from kohya_like.context import Context
from sd_scripts.families import FACTS, RUNS
from sd_scripts.schema import flat

FAMILIES = [family for family, method in RUNS if method == "network"]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return app.make_context(tmp_path_factory.mktemp("studio") / "output", [], is_private=True)


def photos(folder: Path, count: int, side: int = 600, caption: str = "a cat", pairs: bool = False) -> Path:
    for place in ("target", "control") if pairs else ("",):
        (folder / place).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", (side, side + 10 * number), (number, 9, 9)).save(folder / place / f"{number}.png")
            if caption and place != "control":
                (folder / place / f"{number}.txt").write_text(f"{caption} {number}")
    return folder


def answer(context: Context, **answers: Any) -> dict[str, Any]:
    return list(guide.settings(context, {"purpose": "style", "model": "toy", "family": "", "card": None} | answers))[-1]


def why(filled: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["option"]: (row["value"], row["why"]) for row in filled["rows"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_gets_a_recipe_that_fits_the_card_and_can_be_built(family: str, context: Context, tmp_path: Path) -> None:
    edits = FACTS[family].edits
    folder = photos(tmp_path / "images", 3, pairs=edits)
    purposes = [name for name in guide.PURPOSES if name != "edit" or edits]
    known = [model for model in guide.models(context) if model.family == family and model.value != "toy"]
    for purpose in purposes:
        bases = {model.value for model in known if model.edits or purpose != "edit"} or {"someone/model"}
        for card in (6, 7.6, 23.6, 80):
            filled = answer(context, purpose=purpose, model=sorted(bases)[0], family=family, card=card, folder=str(folder))
            built = form.options([{"run": filled["run"], "values": filled["texts"]}], context.roots)
            assert (built.family, built.method) == (family, "network")
            recipe, because = why(filled)["Recipe"]
            sizes = [int(word) for word in recipe.replace("(", "").split() if word.isdigit()]
            assert sizes[-1] * 0.93 <= card or "so small a card" in because, (recipe, card)
            assert flat.changed(built)["train_data_dir"] == str(folder)


def test_a_purpose_has_its_own_recipe_where_there_is_one(context: Context, tmp_path: Path) -> None:
    folder = str(photos(tmp_path / "images", 3))
    given = {"model": "someone/model", "family": FAMILIES[0], "card": 24.0, "folder": folder}
    recipes = {purpose: why(answer(context, purpose=purpose, **given))["Recipe"][0].lower() for purpose in ("person", "style")}
    assert "person" in recipes["person"] and "style" in recipes["style"]


def test_how_long_it_trains_follows_from_the_number_of_images(context: Context, tmp_path: Path) -> None:
    given = {"purpose": "person", "model": "someone/model", "family": FAMILIES[0], "card": 24.0}
    steps = []
    for count in (2, 25, 200):
        filled = answer(context, **given, folder=str(photos(tmp_path / str(count), count, side=64)))
        steps.append(int(filled["texts"]["max_train_steps"]))
    recipe = 2000
    assert steps == [recipe // 3, 25 * 100 // 2 // 50 * 50, recipe]


def test_few_images_are_all_trained_on_whatever_the_recipe_holds_out(context: Context, tmp_path: Path) -> None:
    for count, held_out in ((1, 0.0), (9, 0.0), (10, 0.1), (24, 0.1)):
        filled = answer(context, folder=str(photos(tmp_path / str(count), count, side=64)))
        built = form.options([{"run": filled["run"], "values": filled["texts"]}], context.roots)
        assert built.dataset.validation_split == held_out, count
        assert ("all are trained on" in why(filled)["validation_split"][1]) == (held_out == 0), count


def test_images_without_words_get_a_phrase_and_previews_show_what_is_told(context: Context, tmp_path: Path) -> None:
    silent = answer(context, folder=str(photos(tmp_path / "silent", 3, caption="")))
    assert silent["texts"]["instance_prompt"] == "ohwx style" and silent["texts"]["sample_prompts"] == "ohwx style --d 1"
    assert "3 of 3 images have no caption" in why(silent)["instance_prompt"][1]
    told = answer(context, folder=str(photos(tmp_path / "told", 3, caption="a cat -- x")))
    assert told["texts"]["instance_prompt"] == "" and told["texts"]["sample_prompts"] == "a cat - x 0 --d 1\na cat - x 1 --d 2"


def test_an_edit_has_previews_of_its_instructions_and_a_built_in_model_of_each_family_that_edits(context: Context, tmp_path: Path) -> None:
    able = [model for model in guide.models(context) if model.edits and model.value == "toy"]
    assert {model.family for model in able} >= {family for family in FAMILIES if FACTS[family].edits and FACTS[family].demo}
    assert {"kontext", "qwen_edit"} <= {model.family for model in able}
    folder = photos(tmp_path / "pairs", 3, side=100, caption="make it red", pairs=True)
    filled = answer(context, purpose="edit", family="kontext", folder=str(folder))
    assert filled["run"] == "kontext/network" and why(filled)["Recipe"][0].startswith("Toy: teach the small FLUX.1 Kontext")
    assert filled["texts"]["sample_prompts"] == "make it red 0 --d 1\nmake it red 1 --d 2"


def test_what_is_wrong_is_said_with_its_cure(context: Context, tmp_path: Path) -> None:
    folder = photos(tmp_path / "my photos", 6, side=100)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    found = answer(context, folder=str(folder), model="someone/model", family=FAMILIES[0], card=24.0)
    assert found["texts"]["on_bad_image"] == "skip" and "broken.jpg" in why(found)["on_bad_image"][1]
    assert any("fewer than 256 pixels" in note for note in found["notes"])
    for side, is_warned in ((100, False), (300, True)):
        toy = answer(context, folder=str(photos(tmp_path / f"of {side}", 6, side=side)))
        assert any("cannot learn photographs" in note for note in toy["notes"]) == is_warned, side
    (tmp_path / "empty").mkdir()
    lora = tmp_path / "lora.safetensors"
    save_file({"lora_unet_a.lora_down.weight": np.zeros((2, 2), np.float32)}, lora)
    drawing, editing = (next(family for family in FAMILIES if FACTS[family].edits is edits) for edits in (False, True))
    wrong = {
        "Say what the model shall learn.": {"purpose": "nothing"},
        "Choose a model, or give": {"model": " "},
        f"Is {folder} meant?": {"folder": str(tmp_path / "my fotos" / "deep")},
        "is a file; give the folder": {"folder": str(lora)},
        "no images in": {"folder": str(tmp_path / "empty")},
        "is a LoRA file, not a base model": {"model": str(lora)},
        "does not say what kind of model": {"model": "someone/unknown"},
        "needs a GPU": {"model": "someone/model", "family": FAMILIES[0]},
        "choose a model that edits": {"purpose": "edit", "family": drawing},
        "learned from pairs": {"purpose": "edit", "family": editing},
        "Qwen/Qwen-Image draws from words alone": {"purpose": "edit", "model": "Qwen/Qwen-Image", "family": "qwen_edit", "card": 32.0},
    }
    for sentence, answers in wrong.items():
        problems = answer(context, **{"folder": str(folder)} | answers)["problems"]
        assert any(sentence in problem for problem in problems), (sentence, problems)


def test_a_model_of_another_family_is_taken_for_what_it_is(context: Context, tmp_path: Path) -> None:
    family, other = FAMILIES[:2]
    configs = next(Path("sd_scripts/families", family, "configs").rglob("model_index.json"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text(json.dumps({"_class_name": json.loads(configs.read_text())["_class_name"]}))
    filled = answer(context, model=str(model), family=other, card=24.0, folder=str(photos(tmp_path / "images", 5)))
    assert filled["run"].startswith(f"{family}/") and FACTS[other].label in filled["notes"][0]
