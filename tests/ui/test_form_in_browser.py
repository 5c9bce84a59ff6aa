"""The form in a real browser: what a person types, pastes, loads and searches is what the run gets."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from sd_scripts.families import RUNS
from sd_scripts.schema import command_line, flat, toml_files
from tests.ui.conftest import in_module

pytestmark = pytest.mark.browser
RUN = RUNS["sdxl", "network"]


def fill_required(page: Page) -> None:
    page.locator("#kl-pretrained_model_name_or_path").fill("toy")
    page.locator("#kl-train_data_dir").fill("toy:star")


def printed(page: Page) -> dict[str, Any]:
    """Presses Print command; the flat values of the TOML that the page shows then."""
    page.evaluate("document.querySelector('.kl-output').hidden = true")
    page.locator("#kl-print").click()
    page.wait_for_selector(".kl-output:not([hidden])")
    return toml_files.parse_toml(page.locator(".kl-output pre").nth(1).inner_text(), "page")


def as_text(page: Page) -> Locator:
    """The sample prompts as one text."""
    page.get_by_role("button", name="As text").click()
    return page.locator("#kl-sample_prompts")


def open_group(page: Page, title: str) -> None:
    page.locator(f".kl-section summary:has-text('{title}')").click()


def paste(page: Page, control: Locator, text: str) -> None:
    control.focus()
    control.press("Control+a")
    page.evaluate("text => navigator.clipboard.writeText(text)", text)
    page.keyboard.press("Control+v")


def test_the_built_in_model_goes_along_where_there_is_one(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    base = page.locator("#kl-pretrained_model_name_or_path")
    base.fill("toy")
    for family, told in (("flux", "toy"), ("flux2_dev", ""), ("sdxl", "toy")):
        page.locator(f"#kl-family-{family}").check()
        expect(page.locator(f"#kl-family-{family}")).to_be_checked()
        expect(base).to_have_value(told)


def test_what_is_typed_and_what_is_pasted_reaches_the_toml_without_leaving_the_field(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    for name, text in (("pretrained_model_name_or_path", "toy"), ("train_data_dir", "toy:star"), ("learning_rate", "3e-5")):
        control = page.locator(f"#kl-{name}")
        control.press("Control+a")
        control.press_sequentially(text)
    values = printed(page)
    assert (values["pretrained_model_name_or_path"], values["train_data_dir"], values["learning_rate"]) == ("toy", "toy:star", 3e-5)

    for name in ("pretrained_model_name_or_path", "train_data_dir"):
        page.locator(f"#kl-{name}").fill("")
    as_text(page)
    for name, text in (
        ("pretrained_model_name_or_path", "toy"),
        ("train_data_dir", "toy:star"),
        ("network_dim", "48"),
        ("sample_prompts", "a teal star --d 1\na red star --d 2"),
    ):
        paste(page, page.locator(f"#kl-{name}"), text)
    values = printed(page)
    assert (values["pretrained_model_name_or_path"], values["network_dim"]) == ("toy", 48)
    assert values["sample_prompts"] == "a teal star --d 1\na red star --d 2"


def test_every_kind_of_control_reaches_the_toml_and_the_printed_command_gives_exactly_the_options_of_the_page(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    fill_required(page)
    page.get_by_role("button", name="Open all").click()
    page.locator("#kl-flip_aug").check()
    page.locator("#kl-cache_latents_to_disk").uncheck()
    page.locator("#kl-max_token_length").select_option("225")
    page.locator("#kl-resolution").fill("832x1216")
    page.locator("#kl-additional_resolutions").fill("512, 768")
    page.locator("#kl-optimizer_args").fill("weight_decay=0.01\nbetas=(0.9, 0.99)")
    page.locator("#kl-target_modules").fill("attn2\\.to_k\n[a-z]+\\.to_q")
    page.locator("#kl-seed").fill("9223372036854775807")
    page.locator("#kl-max_grad_norm").fill("0")
    page.locator("#kl-caption_separator").fill("; ")
    values = printed(page)
    assert values["flip_aug"] is True and values["cache_latents_to_disk"] is False
    assert values["max_token_length"] == 225
    assert values["resolution"] == [832, 1216] and values["additional_resolutions"] == [512, 768]
    assert values["optimizer_args"] == ["weight_decay=0.01", "betas=(0.9, 0.99)"]
    assert values["target_modules"] == ["attn2\\.to_k", "[a-z]+\\.to_q"]
    assert values["seed"] == 9223372036854775807
    assert values["max_grad_norm"] == 0.0, "a zero is a value, not an empty field"
    assert values["caption_separator"] == "; "

    page.locator("#kl-output_name").fill("it's a name")
    printed(page)
    command = shlex.split(page.locator(".kl-output pre").first.inner_text())
    script = next(index for index, word in enumerate(command) if word.endswith(".py"))
    options = command_line.parse_cli(RUN, command[script + 1 :]).options
    shown = flat.build(RUN, toml_files.parse_toml(page.locator(".kl-output pre").nth(1).inner_text(), "page"))
    assert options == shown
    assert flat.flatten(options)["output_name"] == "it's a name"
    assert flat.flatten(options)["output_dir"] == str(studio.output_dir), "the default output folder is the studio's"
    page.get_by_label("PowerShell").check()
    powershell = page.locator(".kl-output pre").first.inner_text()
    assert powershell.startswith("& ") and powershell.endswith(".toml'"), "the file's name has a space, so it stands in quotes"


def test_errors_stand_at_their_fields_and_in_one_list_that_leads_there_and_a_typed_script_is_shown_as_text_and_never_run(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    page.locator("#kl-network_dim").fill("0")
    page.locator("#kl-learning_rate").fill("fast")
    open_group(page, "Saving")
    page.locator("#kl-save_last_n_states").fill("0")
    open_group(page, "Saving")
    page.locator("#kl-print").click()
    box = page.locator(".kl-problems")
    expect(box).to_be_visible()
    expect(box).to_be_focused()
    for lower, upper in ((".kl-problems", ".kl-side > div:has(+ #kl-answers)"), (".kl-pick", ".kl-row:has(+ .kl-pick)")):
        above, below = (page.locator(css).evaluate("one => one.getBoundingClientRect().toJSON()") for css in (upper, lower))
        assert below["top"] - above["bottom"] >= 8, f"{lower} sticks to what stands above it"
    expect(page.locator("#kl-train_data_dir")).not_to_have_attribute("placeholder", re.compile("none"))
    for name in ("pretrained_model_name_or_path", "network_dim", "learning_rate"):
        control = page.locator(f"#kl-{name}")
        expect(control).to_have_attribute("aria-invalid", "true")
        assert f"kl-{name}-error" in (control.get_attribute("aria-describedby") or "")
        expect(page.locator(f"#kl-{name}-error")).to_be_visible()
    expect(page.locator("#kl-network_dim-error")).to_contain_text("1 to 4096")
    expect(page.locator("#kl-learning_rate-error")).to_contain_text("fast")
    page.get_by_role("button", name="learning_rate").click()
    expect(page.locator("#kl-learning_rate")).to_be_focused()
    link = page.locator(".kl-problems").get_by_role("button", name="save_last_n_states")
    link.click()
    expect(page.locator("#kl-save_last_n_states")).to_be_focused()
    fill_required(page)
    page.locator("#kl-network_dim").fill("8")
    page.locator("#kl-learning_rate").fill("1e-4")
    expect(page.locator("#kl-learning_rate")).not_to_have_attribute("aria-invalid", "true")
    page.locator("#kl-save_last_n_states").fill("2")
    printed(page)
    expect(box).to_be_hidden()

    nasty = "<img src=x onerror=document.title='owned'>${document.title='owned'}{{1}}`"
    page.locator("#kl-pretrained_model_name_or_path").fill(nasty)
    page.locator("#kl-network_dim").fill(nasty)
    page.locator("#kl-print").click()
    expect(page.locator("#kl-network_dim-error")).to_contain_text("<img src=x")
    assert page.title() == "kohya_like"


def test_saving_and_loading_a_toml_is_the_identity(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(studio.url).page
    fill_required(page)
    as_text(page).fill('a "quoted" star\nein Stern, зірка, 星 --d 3')
    page.locator("#kl-learning_rate").fill("0.00025")
    page.get_by_role("button", name="Open all").click()
    page.locator("#kl-block_dims").fill("0 4 8")
    page.locator("#kl-shuffle_caption").check()
    with page.expect_download() as begun:
        page.get_by_role("button", name="Save TOML").click()
    saved = tmp_path / "saved.toml"
    begun.value.save_as(saved)
    assert begun.value.suggested_filename == "lora.toml"
    before = tomllib.loads(saved.read_text(encoding="utf-8"))
    for name in ("learning_rate", "block_dims", "train_data_dir", "sample_prompts"):
        page.locator(f"#kl-{name}").fill("7")
    page.locator("#kl-shuffle_caption").uncheck()
    page.locator("#kl-load").set_input_files(saved)
    expect(page.locator("#kl-learning_rate")).to_have_value("0.00025")
    expect(page.locator("#kl-sample_prompts")).to_have_value('a "quoted" star\nein Stern, зірка, 星 --d 3')
    with page.expect_download() as begun:
        page.get_by_role("button", name="Save TOML").click()
    again = tmp_path / "again.toml"
    begun.value.save_as(again)
    assert tomllib.loads(again.read_text(encoding="utf-8")) == before


def test_a_line_that_is_pasted_fills_the_form_and_settings_are_saved_for_other_programs(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    line = "accelerate launch sdxl_train_network.py \\\n --pretrained_model_name_or_path toy --train_data_dir toy:star --learning_rate 3e-5"
    line += " --network_module networks.lora --network_dim 5 --made_up_today 3"
    paste = """text => { const data = new DataTransfer(); data.setData("text/plain", text);
        document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })); }"""
    page.evaluate(paste, "python run.py config/job.yml")
    told = page.get_by_text("starts run.py, whose settings are in config/job.yml; open that file")
    expect(told).to_be_visible()
    expect(told).to_be_in_viewport()
    page.evaluate(paste, line)
    expect(page.locator("#kl-network_dim")).to_have_value("5")
    expect(told).to_have_count(0)
    page.evaluate(paste, "network_module = 'networks.lora'\nnetwork_dim = 7\nmax_train_steps = 90\n")
    expect(page.locator("#kl-network_dim")).to_have_value("7")
    page.evaluate(paste, line)
    expect(page.locator("#kl-network_dim")).to_have_value("5")
    expect(page.locator("[data-verdict=unknown]").first).to_contain_text("unknown 1")
    for program, name, word in (
        ("sd-scripts", "lora.sh", "--network_dim=5"),
        ("ai-toolkit", "lora.yaml", "linear: 5"),
        ("OneTrainer", "lora.json", '"lora_rank": 5'),
    ):
        with page.expect_download() as begun:
            page.get_by_role("button", name=f"Save for {program}").click()
        assert begun.value.suggested_filename == name
        assert word in Path(begun.value.path()).read_text(encoding="utf-8")
        expect(page.locator(".kl-answer")).to_contain_text(f"Saved {name} for {program}")


def test_a_file_with_mistakes_fills_what_it_can_and_names_the_rest_and_what_cannot_be_settings_is_refused(
    studio: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(studio.url).page
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        'pretrained_model_name_or_path = "toy"\ntrain_data_dir = "toy:star"\nnetwork_dimm = 4\nnetwork_dim = -3\nlearning_rate = 0.5\n'
        'script = "sdxl_train_network.py"\n'
    )
    page.locator("#kl-load").set_input_files(wrong)
    expect(page.locator(".kl-problems")).to_contain_text("network_dimm")
    expect(page.locator(".kl-problems")).to_contain_text("Did you mean network_dim?")
    expect(page.locator("#kl-network_dim")).to_have_value("-3")
    expect(page.locator("#kl-network_dim")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#kl-learning_rate")).to_have_value("0.5")

    # One that cannot be settings changes nothing.
    page.locator("#kl-network_dim").fill("21")
    large = tmp_path / "model.toml"
    large.write_bytes(b"#" * (2 << 20))
    page.locator("#kl-load").set_input_files(large)
    expect(page.locator(".kl-problems")).to_contain_text("larger than 1 MiB")
    path = page.get_by_label("Path of a settings or LoRA file on the studio's computer")
    path.fill("/etc/passwd")
    path.press("Enter")
    expect(page.locator(".kl-problems")).to_contain_text("does not end in .toml, .json, .yaml, .yml, .safetensors")
    expect(page.locator("#kl-network_dim")).to_have_value("21")


def test_the_draft_survives_a_reload_and_a_restart_of_the_studio(studios: Callable[..., Any], visit: Callable[..., Any]) -> None:
    studio = studios()
    visited = visit(studio.url, quiet=False)
    page = visited.page
    fill_required(page)
    page.locator("#kl-network_dim").fill("24")
    page.reload()
    expect(page.locator("#kl-network_dim")).to_have_value("24")
    page.locator("#kl-learning_rate").fill("2e-4")
    # A browser that is busy ends a page that is left for another site before it has said all.
    page.wait_for_function("localStorage.getItem('kl.draft').includes('2e-4')")
    # A page that is open loads itself anew when its studio is another one, and a reload at that moment is cut off.
    page.goto("about:blank")
    studio.end()
    studios(output_dir=studio.output_dir, port=studio.port)
    page.goto(studio.url)
    expect(page.locator("#kl-network_dim")).to_have_value("24")
    values = printed(page)
    assert (values["network_dim"], values["learning_rate"], values["train_data_dir"]) == (24, 2e-4, "toy:star")


def test_search_and_only_changed_show_what_matches_and_a_way_leads_past_all_settings(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    search = page.get_by_role("searchbox", name="Search all settings")
    search.fill("dropout")
    expect(page.locator("#kl-network_dropout")).to_be_visible()
    expect(page.locator("#kl-caption_dropout_rate")).to_be_visible()
    expect(page.locator("#kl-learning_rate")).to_be_hidden()
    # A heading with nothing below it is none.
    for title in ("Saving", "Basics"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_hidden()
    search.fill("min snr")
    expect(page.locator("#kl-min_snr_gamma")).to_be_visible()
    expect(page.locator("#kl-network_dropout")).to_be_hidden()
    for text in ("save_last_n_steps", "save last n steps", "keep checkpoints of the last"):
        search.fill(text)
        expect(page.get_by_label("Keep checkpoints of the last N steps", exact=True)).to_be_visible()
        expect(page.locator("#kl-min_snr_gamma")).to_be_hidden()
    search.fill("zzzz")
    expect(page.get_by_text("No setting matches")).to_be_visible()
    search.fill("")
    expect(page.locator("#kl-learning_rate")).to_be_visible()
    expect(page.get_by_role("heading", name="Basics", exact=True)).to_be_visible()
    expect(page.locator(".kl-section[open]")).to_have_count(0)

    # Only what differs, and reset puts it back.
    open_group(page, "Dataset")
    page.locator("#kl-keep_tokens").fill("2")
    page.locator("#kl-network_dim").fill("16.0")
    page.get_by_label("Only changed").check()
    expect(page.locator("#kl-keep_tokens")).to_be_visible()
    expect(page.locator("#kl-network_dim")).to_be_hidden()
    expect(page.locator("#kl-flip_aug")).to_be_hidden()
    page.get_by_label("Only changed").uncheck()
    page.get_by_role("button", name="Reset Keep tokens to 0").click()
    expect(page.locator("#kl-keep_tokens")).to_have_value("0")
    expect(page.locator("[data-name=keep_tokens]")).not_to_have_class("kl-field kl-changed")

    # From the presets to Start it is not far, and what a field wants is said before anything goes wrong.
    page.get_by_label("Preset", exact=True).focus()
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Skip to Start training":
            break
    skip = page.get_by_role("button", name="Skip to Start training")
    expect(skip).to_be_focused()
    assert skip.bounding_box()["height"] > 20 and skip.evaluate("node => getComputedStyle(node).clipPath") == "none"
    page.keyboard.press("Enter")
    expect(page.locator("#kl-start")).to_be_focused()
    expect(page.locator("#kl-train_data_dir-help")).to_contain_text("required, unless dataset_config is given")
    expect(page.locator("#kl-mode-about")).to_contain_text("From nothing is for ")
    rate = page.locator("#kl-learning_rate")
    rate.fill("0,0005")
    rate.blur()
    expect(rate).to_have_value("0.0005")
    rate.fill("1,000")
    fill_required(page)
    page.locator("#kl-print").click()
    expect(page.locator("#kl-learning_rate-error")).to_contain_text("may mean 1000 or 1.000")
    page.get_by_role("tab", name="Help").click()
    empty = (
        "() => [...document.querySelectorAll('h1,h2,h3,h4')].filter((node) => node.checkVisibility() && !node.textContent.trim()).length"
    )
    assert page.evaluate(empty) == 0


LIST_AFTER_CHOICE = """(() => {
  const root = document.createElement("div"), props = { value: { presets: [] } };
  let told;
  it.presets({ root, props, trigger() {}, watch(_, then) { told = then; } });
  for (const chosen of [given, null]) { props.value = { presets: [], chosen }; told(); }
  return root.textContent;
})()"""


def test_the_learning_rate_says_when_others_stand_in_its_place(studio: Any, visit: Callable[..., Any]) -> None:
    """As kohya_ss writes them, whose files give all three."""
    page = visit(studio.url).page
    note = page.locator("[data-name=learning_rate] .kl-note")
    page.locator("#kl-search").fill("rate")
    expect(note).to_be_hidden()
    page.locator("#kl-unet_lr").fill("1e-4")
    expect(note).to_have_text("Has no effect, because these are given: UNet learning rate.")
    page.locator("#kl-search").fill("text")
    page.locator("#kl-train_text_encoder").check()
    page.locator("#kl-search").fill("rate")
    expect(note).to_be_hidden()
    page.locator("#kl-text_encoder_lr").fill("5e-5")
    expect(note).to_have_text("Has no effect, because these are given: UNet learning rate, Text encoder learning rate.")
    page.locator("#kl-unet_lr").fill("")
    expect(note).to_be_hidden()


def test_a_list_of_presets_that_arrives_late_leaves_what_was_chosen_in_the_meantime(studio: Any, visit: Callable[..., Any]) -> None:
    chosen = {"name": "built:x", "title": "X", "about": "For x.", "changes": [], "run": "sdxl/network", "texts": {}, "keeps": []}
    assert "Use this preset" in in_module(visit(studio.url).page, "train/presets.js", LIST_AFTER_CHOICE, chosen)


def test_a_preset_shows_what_it_changes_before_it_does_and_one_of_ones_own_is_kept_and_offered(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    page.locator("#kl-train_data_dir").fill("my/images")
    page.locator("#kl-pretrained_model_name_or_path").fill("base.safetensors")
    page.get_by_label("Preset", exact=True).select_option(label="Style, 24 GB")
    row = page.locator(".kl-preset tr", has_text="Learning rate")
    expect(row).to_contain_text("0.0001")
    expect(row).to_contain_text("5e-05")
    expect(page.locator("#kl-learning_rate")).to_have_value("0.0001")
    page.locator("#kl-train_data_dir").fill("my/later")
    page.get_by_role("button", name="Use this preset").click()
    expect(page.locator("#kl-learning_rate")).to_have_value("5e-05")
    expect(page.locator("#kl-train_data_dir")).to_have_value("my/later")
    assert printed(page)["flip_aug"] is True

    page.locator("#kl-network_dim").fill("77")
    page.get_by_text("Save these settings as a preset").click()
    page.get_by_label("Name of your preset").fill("Seventy/Seven")
    page.get_by_role("button", name="Save my settings").click()
    expect(page.get_by_text("Saved as Seventy/Seven.")).to_be_visible()
    assert [path.name for path in (studio.output_dir / ".presets").rglob("*.toml")] == ["Seventy-Seven.toml"]
    page.locator("#kl-network_dim").fill("78")
    page.reload()
    page.get_by_label("Preset", exact=True).select_option(label="Seventy/Seven")
    expect(page.locator(".kl-preset tr", has_text="Network rank")).to_contain_text("77")
    assert "my/later" not in next((studio.output_dir / ".presets").rglob("*.toml")).read_text(), "a preset is a recipe, not a place"


def test_the_data_set_check_says_what_training_would_see(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "images"
    folder.mkdir()
    for index, size in enumerate(((640, 480), (480, 640), (512, 512))):
        Image.new("RGB", size, (index * 60, 90, 120)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"image {index}")
    (folder / "broken.png").write_bytes(b"this is no image")
    page = visit(studio.url).page
    page.locator("#kl-pretrained_model_name_or_path").fill("toy")
    page.locator("#kl-train_data_dir").fill(str(folder))
    page.locator("#kl-resolution").fill("512")
    page.locator("#kl-check").click()
    report = page.locator(".kl-report")
    expect(report).to_contain_text("3 to train on")
    expect(report).to_contain_text("512 x 512")
    expect(report).to_contain_text("image 0")
    expect(report).to_contain_text("broken.png")
    expect(report).not_to_contain_text("The form has changed since")
    page.locator("#kl-resolution").fill("256")
    expect(report).to_contain_text("The form has changed since; check again.")
    page.locator("#kl-resolution").fill("512")
    expect(report).not_to_contain_text("The form has changed since")
    page.locator("#kl-train_data_dir").fill(str(tmp_path / "nowhere"))
    page.locator("#kl-check").click()
    expect(page.locator("#kl-train_data_dir-error")).to_contain_text("not there")
