"""The page in other languages: by the browser's own, by the switch, and as whole as in English."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from kohya_like.catalogues import SOURCES, compiled
from sd_scripts.library.tools import converting, headers, merging, resizing
from sd_scripts.runs.downloads import Ahead
from sd_scripts.schema.tools import ConvertSection, MergeSection, MetadataSection, ResizeSection
from tests.library.tools.test_merging_files import qkv
from tests.ui import full_studio
from tests.ui.conftest import in_module
from tests.ui.on_screen import Eyes

pytestmark = pytest.mark.browser


def test_the_page_speaks_the_browsers_language_and_the_one_that_is_chosen(studio: Any, visit: Callable[..., Any]) -> None:
    visited = visit(studio.url, width=390, height=844)
    page = visited.page
    expect(page.locator("html")).to_have_attribute("lang", "en")
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url) if "/languages/" in request.url else None)
    try:
        page.locator(".kl-language").select_option("de")
        expect(page.locator("html")).to_have_attribute("lang", "de")
        expect(page.get_by_role("tab")).to_have_text(["Training", "Daten", "Läufe", "Tools", "Zeichnen", "Hilfe"])
        expect(page.locator(".overflow-menu > button")).to_have_attribute("aria-label", "Weitere Reiter")
        expect(page.locator("label[for=kl-learning_rate]")).to_have_text("Lernrate")
        # Fractions have the point everywhere, so no language has it between thousands, whatever the browser's own does.
        assert in_module(page, "common/words.js", "[it.grouped(1600), it.grouped(1600.25), it.figure(0.25)]") == [
            "1\u202f600",
            "1\u202f600.25",
            "0.25",
        ]
        page.locator("#kl-learning_rate").fill("fast")
        page.locator("#kl-start").click()
        # Gradio may put a button there after the row of buttons.
        page.evaluate(
            """() => { const there = document.getElementById('kl-print'), late = there.cloneNode();
              late.append('Print command');
              there.after(late); }"""
        )
        expect(page.locator("#kl-print")).to_have_text(["Befehl zeigen"] * 2)
        page.evaluate("document.querySelectorAll('#kl-print')[1].remove()")
        # One sentence of the schema with values in it, and one that the page makes of it.
        expect(page.locator("#kl-learning_rate-error")).to_have_text('"fast" ist nicht eine Zahl (0 bis 100 ist erlaubt)')
        expect(page.locator("#kl-train_data_dir-error")).to_have_text("Dies ist erforderlich.")
        # Names of a help text are names in the list of what is wrong, too, and flags are not broken.
        expect(page.locator(".kl-problems")).to_contain_text("Hub-ID oder toy für")
        assert "`" not in page.locator(".kl-problems").inner_text()
        flags = page.locator("[data-name=sample_prompts] .kl-help .kl-whole")
        assert flags.first.inner_text() == "--w" and flags.evaluate_all("all => all.every(each => each.getClientRects().length === 1)")
        assert visited.axe(contrast=False) == [] and visited.overflow() == [] and Eyes(page).flaws() == []
        # The name of the language is not cut, with what is said of it.
        room = page.locator(".kl-language").evaluate(
            """(node) => { const style = getComputedStyle(node), pen = document.createElement('canvas').getContext('2d');
              pen.font = style.font;
              return node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)
                - pen.measureText(node.selectedOptions[0].text).width; }"""
        )
        assert room >= 0
        # What another tab says of the settings is spoken, too.
        page.locator("#kl-train_data_dir").fill("toy:star")
        page.locator("#kl-pretrained_model_name_or_path").fill("toy")
        page.locator("#kl-train_batch_size").fill("fast")
        page.get_by_role("tab", name="Daten").click()
        expect(page.locator(".kl-data-top .kl-error")).to_contain_text('"fast" ist nicht eine ganze Zahl')
        page.get_by_role("tab", name="Training").click()
        page.locator(".kl-language").select_option("zh")
        expect(page.locator("html")).to_have_attribute("lang", "zh-Hans")
        expect(page.locator("label[for=kl-learning_rate]")).to_have_text("学习率")
        # What was typed is still there, an address of a tab has no language, and only what is spoken was fetched.
        expect(page.locator("#kl-learning_rate")).to_have_value("fast")
        page.goto(f"{studio.url}#help")
        expect(page.locator(".kl-guide h2").first).to_have_text("从图片文件夹到 LoRA 或模型")
        assert [url.rsplit("/", 1)[1] for url in fetched][:2] == ["de.json", "zh.json"] and "ru.json" not in str(fetched)
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


def test_the_reports_of_tools_on_files_are_told_in_the_readers_language(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for number, path in enumerate(files):
        qkv(path, 4, number, 4.0)
    models, to = tuple(map(str, files)), str(tmp_path / "new.safetensors")
    reports = [
        merging.merge(MergeSection(models=models, save_to=to)),
        merging.merge(MergeSection(models=models, new_rank=2, save_to=to)),
        resizing.resize(ResizeSection(model=models[0], new_rank=2, save_to=to)),
        converting.convert(ConvertSection(model=models[0], save_model_as="diffusers", save_to=to)),
        headers.edit(MetadataSection(model=models[0], set_keys=("modelspec.title=x",))),
    ]
    lines = [line for report in reports for line in report.lines]
    lines += Ahead("a/b", "0", "", True, 3, 10**9, 0, 10**10, tmp_path, ()).lines()
    lines += Ahead("a/b", "0", "mit", False, 3, 10**9, 10**6, 10**10, tmp_path, ()).lines()
    # Rows of tables and of texts begin with a space, and a name of keys is a name.
    told = [line for line in lines if not line.startswith(" ") and line not in ("modelspec:", "kohya_like:")]
    page = visit(studio.url).page
    try:
        page.locator(".kl-language").select_option("de")
        expect(page.locator("html")).to_have_attribute("lang", "de")
        german = in_module(page, "common/language.js", "given.map(it.translated)", told)
        assert [line for line, own in zip(told, german, strict=True) if own == line] == []
        assert not [own for own in german if re.search(r"\b(of it|none is named|layers|for)\b", own)]
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


UPRIGHT = """() => {
  const found = [];
  for (const node of document.querySelectorAll("button, summary, label, th, dt, .kl-unit, .kr-badge, .kr-figure")) {
    if (!node.checkVisibility({visibilityProperty: true}) || !/^[\\u4e00-\\u9fff]{2,5}$/.test(node.textContent.trim())) continue;
    const words = document.createRange();
    words.selectNodeContents(document.createTreeWalker(node, NodeFilter.SHOW_TEXT, text => text.data.trim() ? 1 : 2).nextNode());
    const lines = new Set([...words.getClientRects()].filter(box => box.width).map(box => Math.round(box.top)));
    if (lines.size > 1) found.push(node.textContent);
  }
  return found; }"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 720)])
def test_no_short_chinese_word_stands_upright(width: int, height: int, studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url, width=width, height=height).page
    try:
        page.locator(".kl-language").select_option("zh")
        expect(page.locator("html")).to_have_attribute("lang", "zh-Hans")
        page.evaluate("document.querySelectorAll('.kl-main details').forEach(each => (each.open = true))")
        expect(page.locator("[data-name=dynamo_backend], [data-name=compile]").first).to_be_visible()
        assert page.evaluate(UPRIGHT) == []
        for name in ("工具", "生成", "任务", "帮助"):
            page.get_by_role("tab", name=name).click()
            assert page.evaluate(UPRIGHT) == [], name
        # On a telephone all tabs are in sight, and none is smaller than it must be.
        assert page.locator("[role=tab]").first.evaluate("tab => parseFloat(getComputedStyle(tab).fontSize)") >= 14
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


IN_PIECES = """table => [...table.querySelectorAll("th[scope=row]")].flatMap(row => {
  const text = document.createTreeWalker(row, NodeFilter.SHOW_TEXT).nextNode(), range = document.createRange();
  return [...text.data.matchAll(/[\\p{L}\\d]+/gu)].filter(word => {
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1;
  }).map(word => word[0]); })"""


def test_a_telephone_shows_the_words_of_a_presets_settings_whole(studio: Any, visit: Callable[..., Any]) -> None:
    visited = visit(studio.url, width=390, height=844)
    page = visited.page
    try:
        page.locator(".kl-language").select_option("de")
        expect(page.locator("html")).to_have_attribute("lang", "de")
        for preset in ("character-24gb", "style-24gb", "toy-star", "low-vram-8gb"):
            page.locator("#kl-preset").select_option(f"built:{preset}")
            table = page.locator(".kl-preset table")
            expect(table.locator("th[scope=row]").nth(2)).to_be_visible()
            assert table.evaluate(IN_PIECES) == [] and visited.overflow() == []
            assert table.evaluate("table => table.parentElement.scrollWidth <= table.parentElement.clientWidth"), preset
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


def test_a_report_of_images_is_all_in_one_language(studio: Any, visit: Callable[..., Any], tmp_path: Path) -> None:
    for number in range(9):
        Image.new("RGB", (64, 64), (20 * number, 90, 90)).save(tmp_path / f"{number}.png")
    (tmp_path / "8.txt").write_text("ein Bild")
    (tmp_path / "9 neu.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(900))
    page = visit(studio.url).page
    try:
        page.locator(".kl-language").select_option("de")
        expect(page.locator("html")).to_have_attribute("lang", "de")
        for name, text in (("pretrained_model_name_or_path", "toy"), ("train_data_dir", str(tmp_path)), ("resolution", "64")):
            page.locator(f"#kl-{name}").fill(text)
        page.locator("#kl-search").fill("min_bucket_reso")
        page.locator("#kl-min_bucket_reso").fill("32")
        page.locator("#kl-check").click()
        report = page.locator(".kl-report")
        expect(report).to_contain_text("9 neu.heic")
        expect(report).to_contain_text("(ein leerer Text)")
        said = report.inner_text().replace("pip install", "").replace(str(tmp_path), "")
        assert not re.search(r"\b(of|and|is|or|more|empty|files?|cannot|installed)\b", said), said
        page.get_by_role("tab", name="Daten").click()
        findings = page.locator("#kl-data .kl-plain")
        expect(findings).to_contain_text("9 neu.heic")
        said = findings.inner_text().replace("pip install", "").replace(str(tmp_path), "")
        assert not re.search(r"\b(of|and|is|or|more|empty|files?|cannot|installed)\b", said), said
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


STAYED = """texts => {
  const found = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim(), place = walk.currentNode.parentElement;
    if (texts[text] && texts[text] !== text && place.checkVisibility() && !place.closest("script, style, code, option")) found.add(text);
  }
  return [...found]; }"""


def test_what_has_a_translation_stays_english_in_no_tab(studios: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    full_studio.fill(output, "a" * 32)
    refused = full_studio.verified(output, tmp_path / "gone.safetensors", "20260102-120000-abcd-verify_lora", returncode=2)
    (refused / "report.json").unlink()
    why = "face_model: there is no folder /gone; give one with config.json, or a hub id (owner/name)"
    (refused / "console.log").write_text(f"verify_lora.py: one problem, nothing was started:\n  - {why}\n")
    (tmp_path / "mine").mkdir()
    for side in (16, 64):
        Image.new("RGB", (side, side), "teal").save(tmp_path / "mine" / f"{side}.png")
    page = visit(studios(output_dir=output).url).page
    catalogue = json.loads(compiled(SOURCES / "de.po"))
    texts = {english: german for part in ("page", "said") for english, german in catalogue[part].items() if isinstance(german, str)}
    stayed: dict[str, list[str]] = {}

    def look(where: str) -> None:
        # A German word, too; a value as a file has it.
        stayed[where] = [text for text in page.evaluate(STAYED, texts) if text not in ("Training", "none")]

    try:
        page.locator(".kl-language").select_option("de")
        expect(page.locator("html")).to_have_attribute("lang", "de")
        page.locator("#kl-preset").select_option("built:character-24gb")
        expect(page.locator(".kl-preset td").first).to_be_visible()
        look("a preset")
        page.get_by_role("tab", name="Läufe").click()
        for name in ("whole", "no-memory", "styles", "resumable"):
            page.locator("#kl-runs .kr-row", has_text=name).click()
            expect(page.locator("#kl-runs .kr-title")).to_have_text(name)
            look(name)
            if name == "whole":
                expect(page.locator("#kl-runs .kr-legend").first).to_contain_text("roh")
        page.get_by_role("button", name="Läufe vergleichen").click()
        for name in ("whole", "shapes"):
            page.locator(".kr-row", has_text=name).locator("input").check()
        expect(page.locator(".kr-compare th[scope=row]").nth(4)).to_be_visible()
        look("runs compared")
        for tab in ("Tools", "Zeichnen", "Hilfe"):
            page.get_by_role("tab", name=tab).click()
            page.wait_for_timeout(500)
            look(tab)
        page.get_by_role("tab", name="Tools").click()
        page.locator("#kl-tools li", has_text="fehlgeschlagen").get_by_role("button").click()
        expect(page.locator("#kl-tools p", has_text="/gone")).to_have_text(
            "face_model: Den Ordner /gone gibt es nicht; gib einen mit config.json oder eine Hub-ID (owner/name) an"
        )
        page.get_by_role("tab", name="Training").click()
        for name, text in (("pretrained_model_name_or_path", "toy"), ("train_data_dir", str(tmp_path / "mine"))):
            page.locator(f"#kl-{name}").fill(text)
        page.get_by_role("tab", name="Daten").click()
        page.locator(".kl-data-cell", has_text="16.png").click()
        expect(page.locator(".kl-data-shown p")).not_to_have_count(0)
        expect(page.locator(".kl-data-cell", has_text="16.png")).to_contain_text("vergrößert")
        look("Daten")
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
    assert {where: texts for where, texts in stayed.items() if texts} == {}


def test_that_a_file_fills_the_form_is_said_in_the_readers_language(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    page.locator(".kl-language").select_option("de")
    expect(page.locator("html")).to_have_attribute("lang", "de")
    own = b'[kohya_like]\nscript = "sdxl_train_network.py"\nschema_version = 2\n'
    for text, said in ((b"network_dim = 8\nnetwork_module = 'networks.lora'\n", "gelesen"), (own, "geladen")):
        page.locator("#kl-load").set_input_files({"name": "mine.toml", "mimeType": "text/plain", "buffer": text})
        expect(page.locator(".kl-answer")).to_have_text(f"Einstellungen {said}: mine.toml")
    page.locator(".kl-language").select_option("en")
    expect(page.locator("html")).to_have_attribute("lang", "en")


def test_long_titles_of_sections_leave_the_counts_beside_them_in_the_page(studio: Any, visit: Callable[..., Any]) -> None:
    page = visit(studio.url).page
    changed = {"seed": "42", "min_snr_gamma": "5", "noise_offset": "0.03", "gradient_accumulation_steps": "2", "max_grad_norm": "0.5"}
    changed |= {"save_state": "true", "resume": "'/gone'", "lowram": "true", "log_with": "'tensorboard'", "ddp_timeout": "3"}
    kohya = "network_module = 'networks.lora'\n" + "".join(f"{name} = {value}\n" for name, value in changed.items())
    try:
        for language in ("de", "ru"):
            page.locator(".kl-language").select_option(language)
            expect(page.locator("html")).to_have_attribute("lang", language)
            page.locator("#kl-load").set_input_files({"name": "mine.toml", "mimeType": "text/plain", "buffer": kohya.encode()})
            expect(page.locator(".kl-import")).to_be_visible()
            assert page.locator(".kl-main .kl-badge:visible").count() > 2
            for width in (360, 390, 760, 820):
                page.set_viewport_size({"width": width, "height": 844})
                assert Eyes(page).flaws() == [], (language, width)
    finally:
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
