"""The editor of sample prompts: rows and text say the same, nothing is lost either way, and the trainer reads what the rows show."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from sd_scripts.schema.prompts import Defaults, read_prompts
from sd_scripts.schema.samples import UNetSampleOptions
from tests.ui.conftest import in_module

pytestmark = pytest.mark.browser
PIECES = (
    *"abé星\t #\\\"'-",
    "--",
    " --",
    " --w 512",
    " --h 768",
    " --d 7",
    " --n blurry, low",
    " --ss euler_a",
    " --cn a b.png",
    " --g 3.5",
    " --",
    " ---w",
    "# note",
    "\n",
    "\n\n",
    "\r\n",
    "\u2028",
    "\x85",
    "\x0b",
    "\ufeff",
    "\xa0",
    "  ",
)


def text_of(page: Page) -> str:
    return str(in_module(page, "train/settings.js", "it.values().values.sample_prompts"))


def specs(text: str) -> list[Any]:
    return read_prompts(Defaults(UNetSampleOptions(sample_prompts=text), (64, 64), 8, 42))


def test_any_text_passes_through_the_rows_without_losing_a_character_and_they_read_it_as_the_trainer_does(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    seed = random.getrandbits(32)
    draw = random.Random(seed)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(0, 30))) for _ in range(3000)]
    again = in_module(page, "train/prompt_lines.js", "given.map(text => it.serialise(it.parse(text)))", texts)
    assert again == texts, f"seed {seed}"

    flags = (" --w 512", " --h 768", " --d 7", " --n blurry,  low ", " --ss euler_a", " --s 9", " --l 4.5")
    lines = []
    for _ in range(400):
        blank = draw.choice(("", " ", "\t", "\xa0", "\u3000"))
        lines.append(draw.choice(("a cat", "x--y", "ein\tStern", "(a:1.2) #b")) + "".join(draw.sample(flags, draw.randint(0, 5))) + blank)
        lines.append(draw.choice(("", "# a note --w 3", "   ", "  #")))
    text = draw.choice(("\n", "\r\n", "\x0b", "\u2028")).join(lines)
    rows = in_module(page, "train/prompt_lines.js", "it.parse(given).filter(line => line.flags)", text)
    read = specs(text)
    assert len(rows) == len(read) == 400
    for row, spec in zip(rows, read):
        said = {flag["name"]: flag["value"] for flag in row["flags"]}
        assert row["prompt"] == spec.prompt, f"seed {seed}"
        assert (said.get("n", ""), said.get("w", "64"), said.get("s", "28")) == (spec.negative_prompt, str(spec.width), str(spec.steps))


def test_what_is_typed_or_pasted_into_rows_is_what_is_rendered(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.locator("#kl-prompt-0").fill("a teal star")
    page.locator("#kl-prompt-0").press("Enter")
    expect(page.locator("#kl-prompt-1")).to_be_focused()
    page.keyboard.type("a red square")
    page.locator(".kl-prompt-more summary").nth(1).press("Enter")
    for flag, text in (("n", "blurry"), ("w", "512"), ("h", "768"), ("d", "7"), ("s", "9"), ("l", "4.5")):
        page.locator(f"#kl-prompt-1-{flag}").fill(text)
    page.locator("#kl-prompt-1-ss").select_option("euler_a")
    assert page.locator("#kl-prompt-0-d").count() == 0, "what is closed is not drawn"
    first, second = specs(text_of(page))
    assert (first.prompt, first.seed, second.seed) == ("a teal star", 42, 7)
    assert (second.negative_prompt, second.width, second.height, second.steps) == ("blurry", 512, 768, 9)
    assert (second.cfg_scale, second.sampler) == (4.5, "euler_a")
    page.locator("#kl-prompt-1-w").fill("")
    assert "--w" not in text_of(page)
    page.get_by_role("button", name="Remove prompt 1").click()
    assert [spec.prompt for spec in specs(text_of(page))] == ["a red square"]
    page.get_by_role("button", name="Remove prompt 1").click()

    # Pasted lines become rows, and their flags fields.
    page.evaluate("text => navigator.clipboard.writeText(text)", "a cat --w 512\na dog --d 3\n")
    page.locator("#kl-prompt-0").focus()
    page.keyboard.press("Control+v")
    expect(page.locator("#kl-prompt-1")).to_have_value("a dog")
    assert text_of(page) == "a cat --w 512\na dog --d 3\n"


def test_comments_and_flags_of_others_stay_through_editing(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.get_by_role("button", name="As text").click()
    page.locator("#kl-sample_prompts").fill("# mine\n  a cat   --cn x y.png --w 64 --zz\n\nanother --d 5\n")
    page.get_by_role("button", name="As text").click()
    expect(page.locator(".kl-comment")).to_have_text("# mine")
    page.locator(".kl-prompt-more summary").first.click()
    expect(page.locator("#kl-prompt-0-further")).to_have_value("--cn x y.png --zz")
    page.locator("#kl-prompt-0-h").fill("96")
    assert text_of(page) == "# mine\na cat --cn x y.png --w 64 --zz --h 96\n\nanother --d 5\n"
    page.locator("#kl-prompt-0-further").fill("--cn z.png")
    assert text_of(page) == "# mine\na cat --w 64 --h 96 --cn z.png\n\nanother --d 5\n"
    page.reload()
    page.wait_for_selector("#kl-prompt-1")
    expect(page.locator("#kl-prompt-1")).to_have_value("another")


def test_each_family_has_the_fields_that_mean_something_to_it_and_the_path_of_a_file_stays_a_path(
    studio: Any, visit: Callable[..., Any]
) -> None:
    page = visit(studio.url).page
    page.locator("#kl-prompt-0").fill("prompts.txt")
    page.locator("#kl-prompt-0").press("Tab")
    expect(page.get_by_text("This is the path of a file; its prompts are used.")).to_be_visible()
    expect(page.locator("#kl-sample_prompts")).to_have_value("prompts.txt")
    page.locator("#kl-sample_prompts").fill("a cat")
    page.get_by_role("button", name="As text").click()
    page.get_by_role("button", name="As text").click()
    expect(page.locator("#kl-prompt-0")).to_have_value("a cat")

    page.locator(".kl-prompt-more summary").click()
    expect(page.locator("#kl-prompt-0-ss")).to_be_visible()
    expect(page.locator("#kl-prompt-0-g")).to_have_count(0)
    page.locator("#kl-prompt-0").fill("a cat")
    page.locator("#kl-family-flux").check()
    page.locator(".kl-prompt-more summary").click()
    expect(page.locator("#kl-prompt-0-ss")).to_be_visible()
    expect(page.locator("#kl-prompt-0-g")).to_have_attribute("placeholder", "3.5")
    expect(page.locator("#kl-prompt-0-d")).to_have_attribute("placeholder", "42")
    page.locator("#kl-prompt-0-g").fill("2")
    assert text_of(page) == "a cat --g 2"
