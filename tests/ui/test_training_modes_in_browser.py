"""Model families and training modes in a real browser: what is kept, what is shown, and that every kind of run is saved without loss."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kohya_like import form
from sd_scripts.families import RUNS
from sd_scripts.schema import flat, toml_files
from tests.ui.conftest import in_module

pytestmark = pytest.mark.browser
CLASS_IMAGES = ("instance_prompt", "class_prompt", "num_class_images", "reg_data_dir", "prior_loss_weight")
KEYS = {form.run_key(run): run for run in RUNS.values()}


def choose(page: Page, family: str = "", mode: str = "") -> None:
    if family:
        page.locator(f"#kl-family-{family}").check()
    if mode:
        page.locator(f"#kl-mode-{mode}").check()


def value(page: Page, name: str) -> Any:
    """What the form holds of an option, drawn or not."""
    return in_module(page, "train/settings.js", "it.values().values[given]", name)


def saved(page: Page, path: Path) -> dict[str, Any]:
    """The flat values of the file that Save TOML gives."""
    with page.expect_download() as begun:
        page.get_by_role("button", name="Save TOML").click()
    begun.value.save_as(path)
    return toml_files.parse_toml(path.read_text(encoding="utf-8"), path.name)


def test_typed_values_go_along_and_untouched_ones_take_the_other_kinds_default(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.locator("#kl-train_data_dir").fill("my/images")
    page.locator("#kl-max_train_steps").fill("77")
    page.locator("#kl-network_dim").fill("64")
    choose(page, family="sd")
    assert (value(page, "train_data_dir"), value(page, "max_train_steps"), value(page, "network_dim")) == ("my/images", "77", "64")
    assert value(page, "resolution") == "512"
    choose(page, mode="finetune")
    assert value(page, "learning_rate") == "1e-05" and value(page, "train_data_dir") == "my/images"
    page.locator("#kl-learning_rate").fill("3e-6")
    page.get_by_role("button", name="Reset Max train steps").click()
    choose(page, family="flux", mode="lora")
    assert (value(page, "learning_rate"), value(page, "max_train_steps"), value(page, "resolution")) == ("0.0001", "1600", "1024")
    choose(page, family="sdxl")
    assert value(page, "network_dim") == "64", "what only adapters have waited there"
    expect(page.locator("#kl-learning_rate")).to_have_value("0.0001")
    choose(page, mode="dreambooth")
    assert value(page, "learning_rate") == "3e-6", "a rate for a whole model is none for an adapter, and waits"
    choose(page, mode="lora")
    page.reload()
    expect(page.locator("#kl-network_dim")).to_have_value("64")


def test_each_family_remembers_its_base_model_and_what_others_have_not_and_none_takes_that_of_another(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    base = page.locator("#kl-pretrained_model_name_or_path")
    base.fill("sdxl.safetensors")
    choose(page, family="flux")
    expect(base).to_have_value("")
    base.fill("flux1-dev.safetensors")
    choose(page, family="sdxl")
    expect(base).to_have_value("sdxl.safetensors")
    choose(page, family="flux")
    expect(base).to_have_value("flux1-dev.safetensors")
    base.fill("toy")
    choose(page, family="zimage")
    expect(base).to_have_value("toy")
    choose(page, family="flux")
    base.fill("flux1-dev.safetensors")
    choose(page, family="sdxl", mode="dreambooth")
    expect(base).to_have_value("sdxl.safetensors")
    choose(page, mode="lora")

    # What other kinds have not stays where it was chosen.
    choose(page, family="flux")
    page.get_by_role("button", name="Open all").click()
    page.locator("#kl-timestep_sampling").select_option("flux_shift")
    page.locator("#kl-ae").fill("ae.safetensors")
    choose(page, family="sdxl")
    assert value(page, "timestep_sampling") == "uniform" and value(page, "ae") is None
    expect(page.locator("#kl-ae")).to_have_count(0)
    choose(page, family="flux")
    assert (value(page, "timestep_sampling"), value(page, "ae")) == ("flux_shift", "ae.safetensors")


def test_dreambooth_and_fine_tuning_show_their_own_options_and_never_hide_one_that_is_set(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    choose(page, mode="dreambooth")
    for name in CLASS_IMAGES:
        expect(page.locator(f"#kl-{name}")).to_be_visible()
    expect(page.locator("#kl-in_json")).to_have_count(0)
    page.locator("#kl-class_prompt").fill("a photo of a dog")
    choose(page, mode="finetune")
    page.locator("summary", has_text="Dataset").click()
    expect(page.locator("#kl-in_json")).to_be_visible()
    expect(page.locator("#kl-instance_prompt")).to_have_count(0)
    expect(page.locator("[data-name=class_prompt] .kl-guest")).to_have_text(re.compile("DreamBooth"))
    page.get_by_role("searchbox", name="Search all settings").fill("prior loss")
    expect(page.get_by_text("prior_loss_weight belongs to DreamBooth")).to_be_visible()


def test_a_problem_of_an_option_that_is_left_out_brings_it_onto_the_page(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    choose(page, mode="dreambooth")
    page.locator("#kl-pretrained_model_name_or_path").fill("toy")
    page.locator("#kl-train_data_dir").fill("toy:subject")
    page.locator("#kl-num_class_images").fill("12")
    choose(page, mode="finetune")
    page.locator("#kl-print").click()
    page.locator(".kl-problems").get_by_role("button", name="class_prompt").click()
    assert page.evaluate("document.activeElement.id") in ("kl-num_class_images", "kl-class_prompt")


@pytest.mark.parametrize("every", [pytest.param(4, id="each fourth"), pytest.param(1, id="all", marks=pytest.mark.long)])
def test_every_kind_of_run_goes_through_a_file_and_the_page_unchanged(
    every: int, studio: Any, visit: Callable[..., Any], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Each fourth of those with a base, and all without one; files of all kinds are read and written by the tests of schema, too."""
    page = visit(studio.url).page
    wanted = {}
    # First the kinds without a base model, since a typed one would go along.
    scratch = {key: run for key, run in KEYS.items() if "scratch" in key}
    chosen = scratch | dict([each for each in KEYS.items() if each[0] not in scratch][::every])
    for key, run in chosen.items():
        with subtests.test(f"{key}, typed"):
            family, method = key.split("/")
            choose(page, family=family, mode={"network": "lora", "full": "finetune", "scratch": "scratch"}[method])
            base = {} if method == "scratch" else {"pretrained_model_name_or_path": "toy"}
            for name, text in {**base, "train_data_dir": "toy:teal"}.items():
                page.locator(f"#kl-{name}").fill(text)
            first = saved(page, tmp_path / "first.toml")
            wanted[key] = flat.build(run, {**base, "train_data_dir": "toy:teal", "output_dir": str(studio.output_dir)})
            assert (first["script"], flat.flatten(flat.build(run, first))) == (run.script, flat.flatten(wanted[key]))

    settings = {
        "learning_rate": 0.00123,
        "sample_prompts": "a star --d 1\n# a note\na square --s 4",
        "train_batch_size": 3,
        "seed": 2**63 - 1,
        "text_encoder_batch_size": 4,
    }
    for key, run in chosen.items():
        with subtests.test(f"{key}, opened"):
            family = key.split("/")[0]
            own = {name: value for name, value in settings.items() if name in flat.fields(run)}
            changed = flat.build(run, {**flat.flatten(wanted[key]), **own, "output_name": f"it's {key}".replace("/", " ")})
            given = tmp_path / "given.toml"
            given.write_text(toml_files.to_toml(changed), encoding="utf-8")
            # The other family holds none of these values, so that what is seen afterwards comes from the file.
            choose(page, family="flux" if family != "flux" else "sd", mode="lora")
            page.locator("#kl-learning_rate").fill("0.5")
            page.locator("#kl-load").set_input_files(given)
            expect(page.locator(f"#kl-family-{family}")).to_be_checked()
            expect(page.locator("#kl-learning_rate")).to_have_value("0.00123")
            saved(page, tmp_path / "again.toml")
            assert tomllib.loads((tmp_path / "again.toml").read_text()) == tomllib.loads(given.read_text())


def test_a_file_with_an_instance_opens_as_dreambooth_and_one_with_metadata_as_fine_tuning(
    studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(studio.url).page
    base = {"pretrained_model_name_or_path": "toy", "train_data_dir": "images"}
    for mode, more in (("dreambooth", {"instance_prompt": "zwx dog"}), ("finetune", {"in_json": "meta.json"})):
        path = tmp_path / f"{mode}.toml"
        path.write_text(toml_files.to_toml(flat.build(RUNS["sdxl", "full"], {**base, **more})))
        page.locator("#kl-load").set_input_files(path)
        expect(page.locator(f"#kl-mode-{mode}")).to_be_checked()


def test_the_rows_of_choices_work_with_the_arrow_keys_and_show_where_the_focus_is(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url, width=390).page
    page.locator("#kl-family-sdxl").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#kl-family-sd")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement.parentElement).outlineStyle") == "solid"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#kl-mode-dreambooth")).to_be_checked()
    assert in_module(page, "train/settings.js", "it.current.run") == "sd/full"
    expect(page.locator("#kl-mode-about")).to_contain_text("one subject")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_family_without_the_chosen_way_brings_its_own_and_knows_control_images(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    choose(page, mode="dreambooth")
    page.locator("#kl-family-qwen_edit").check()
    expect(page.locator("#kl-mode-lora")).to_be_checked()
    expect(page.locator("#kl-mode-dreambooth")).to_be_disabled()
    absent = "From nothing is for Small DDPM, Style transfer. Not for Qwen-Image-Edit: DreamBooth, Fine-tuning."
    expect(page.locator("#kl-mode-about")).to_contain_text(absent)
    assert in_module(page, "train/settings.js", "it.current.run") == "qwen_edit/network"
    page.locator("#kl-prompt-0").fill("make it red --ci a.png --ci b.png")
    page.locator("#kl-prompt-0").press("Enter")
    page.locator(".kl-prompt-more summary").first.click()
    expect(page.get_by_label("Control image", exact=True)).to_have_value("a.png")
    assert "--ci b.png" in page.get_by_label("Further flags, kept as they are").input_value()
