"""The languages of the page: what is translated is complete, says the same, and is what the page fetches."""

from __future__ import annotations

import ast
import io
import json
import re

import pytest
from babel.messages.catalog import Catalog

from kohya_like.catalogues import SOURCES, compiled
from sd_scripts.families import TOOLS
from sd_scripts.library.tools.beside_images import Outcome
from tests import languages
from tests.languages import (
    ENOUGH,
    WEB,
    catalogue,
    is_translated,
    of_licences,
    of_options,
    of_presets,
    of_system,
    page_texts,
    sentences,
    template,
    written,
)

OFFERED = re.findall(r"(\w+): \"", re.search(r"LANGUAGES = \{(.*?)\};", (WEB / "common" / "language.js").read_text(encoding="utf-8"))[1])
every = pytest.mark.parametrize("language", languages.languages())


def keys(catalog) -> set[str]:
    return {message.id if isinstance(message.id, str) else message.id[0] for message in catalog if message.id}


def test_every_language_of_the_switch_has_a_catalogue_and_enough_of_it_is_translated():
    assert OFFERED[0] == "en" and set(OFFERED[1:]) <= set(languages.languages())
    for language in OFFERED[1:]:
        translated = {
            message.id if isinstance(message.id, str) else message.id[0] for message in catalogue(language) if is_translated(message)
        }
        missing = sorted(keys(template()) - translated - {""})
        share = 1 - len(missing) / len(keys(template()))
        assert share >= ENOUGH, f"{language}: {share:.1%} is translated; run python -m tests.languages and translate: {missing}"


@every
def test_what_a_plan_costs_and_a_forecast_notes_is_translated(language):
    folder = languages.ROOT / "sd_scripts" / "library" / "memory" / "forecast"
    trees = [ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))) for name in ("fitting", "drawing_answers")]
    yielded = [node.value.elts[1] for tree in trees for node in tree if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple)]
    costs = {cost.value for cost in yielded if isinstance(cost, ast.Constant)}
    notes = {
        "Drawing needs {1} GiB of host RAM.",
        "The VAE computes on {1}, which is not counted on the card.",
        "This machine has {1} GiB.",
    }
    known = {message.id for message in catalogue(language) if is_translated(message)}
    assert len(costs) > 12 and costs | notes <= known


@every
def test_what_work_on_images_reports_is_translated(language):
    full = Outcome(written=1, same=2, kept=3, done_before=4, nothing=["a.png"], others=["b.png"], bad=["c.png"])
    said = [re.sub(r": .*", ": ", line) for of_masks in (True, False) for line in full.report("", 9, of_masks).lines]
    known = {message.id.partition("{")[0] for message in catalogue(language) if is_translated(message) and isinstance(message.id, str)}
    assert len(said) == 14 and set(said) <= known


@every
def test_presets_licences_and_the_words_of_the_system_are_translated(language):
    assert {*of_presets(), *of_licences(), *of_system()} - {""} <= {message.id for message in catalogue(language) if is_translated(message)}


@every
def test_a_catalogue_has_few_texts_that_nothing_says_any_more(language):
    unused = sorted(keys(catalogue(language)) - keys(template()))
    assert len(unused) <= (1 - ENOUGH) * len(keys(template())), f"run python -m tests.languages, which takes out: {unused}"


@every
def test_a_translation_has_the_places_and_the_names_of_its_text(language):
    for message in catalogue(language):
        if not message.id or not is_translated(message):
            continue
        texts = [message.id] if isinstance(message.id, str) else list(message.id)
        own = [message.string] if isinstance(message.string, str) else list(message.string)
        for parts in (r"\{\d\}", r"`[^`]*`"):
            wanted = sorted(re.findall(parts, texts[-1]))
            assert all(sorted(re.findall(parts, each)) == wanted for each in own), f"{texts[-1]!r} -> {own!r}"


@every
def test_what_the_page_fetches_is_the_catalogue(language):
    wanted = {"page": {}, "said": {}}
    for message in catalogue(language):
        if message.id and is_translated(message):
            key, own = (message.id, message.string) if isinstance(message.id, str) else (message.id[0], list(message.string))
            for place, _line in message.locations or [("schema", None)]:
                wanted["page" if place.endswith(".js") else "said"][key] = own
    assert len(wanted["page"]) > 500 and any(isinstance(own, list) for own in wanted["page"].values())
    assert json.loads(compiled(SOURCES / f"{language}.po")) == wanted


def test_chinese_has_chinese_punctuation():
    """An English comma or colon after a Chinese word, or between two places, and a bracket against one, is the mark of a machine."""
    han, marks = "\u4e00-\u9fff", "，。；：！？、（）"
    half = re.compile(
        rf"[{han}{marks}] ?[,:;?!]|[,:;?!] ?[{han}{marks}]|[}}][,:;?!](?=[{{]|$)|^[,:;](?=[{{])|\w:(?=[{{.])"
        rf"|[{han}] ?\([^)]*\)|\([^)]*\)[{han}]|[\d}}] %|[^ }}\d] …"
    )
    syntax = re.compile(r"`[^`]*`|“[^”{han}]*”|天-时:分:秒|cuda:\{\d\}")
    found = [
        f"{own!r}: {wrong[0]!r}"
        for message in catalogue("zh")
        if message.id and is_translated(message)
        for own in ([message.string] if isinstance(message.string, str) else message.string)
        if re.search(f"[{han}]", own) and (wrong := half.search(syntax.sub("x", own)))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("language", "wrong"), [("de", r"[a-zäöüß,;] (Sie|Ihnen|Ihr(e[mnrs]?)?)\\b"), ("ru", r"[а-яё»}] - [а-яё]{2}|[КМГ]иБ")]
)
def test_a_language_has_one_way_to_speak(language, wrong):
    """German says du, Russian writes its dash; both had the other in what came later."""
    own = [
        each
        for message in catalogue(language)
        if message.id and is_translated(message)
        for each in ([message.string] if isinstance(message.string, str) else message.string)
    ]
    assert [each for each in own if re.search(wrong, each)] == []


BUTTON = re.compile(r"""\bbutton\(t`([^`$]+)`|make\("button"[^\n]*?\btext: t`([^`$]+)`|<button\b[^\n]*?>\$\{t`([^`$]+)`\}</button>""")


def test_a_button_shares_its_word_with_no_option():
    """One text has one translation: "Start" was the noun of an option on a button that starts."""
    names = {*of_options()} - {tool.label for tool in TOOLS.values()}
    of_buttons = {next(filter(None, found)) for path in WEB.rglob("*.js") for found in BUTTON.findall(path.read_text(encoding="utf-8"))}
    assert len(of_buttons) > 40 and of_buttons & names == {"Resume"}, "Resume is translated as what a button does"


def test_a_text_of_several_lines_is_read_with_what_is_quoted_in_it(tmp_path):
    catalog = Catalog(locale="de")
    text = 'a "name",\n\na \\ and a\ttab:\n{1}'
    catalog.add(text, f"ü {text}", [("kohya_like/a.py", 1)])
    catalog.add(("{1} one", "{1} many"), ("eins", ""), [("kohya_like/web/a.js", 1)])
    (tmp_path / "de.po").write_bytes(written(catalog))
    assert json.loads(compiled(tmp_path / "de.po")) == {"page": {}, "said": {text: f"ü {text}"}}


def test_texts_of_modules_are_found_wherever_they_stand():
    code = """
      const a = t`plain`, b = html`<p title=${t`in a tag`}>${x ? html`<b>${t`deep ${n("}`")} in ${`${y}`}`}</b>` : ""}</p>`;
      plural(items.length, "one", "many"); other.t`not this`; t`a \\`name\\` and \\u00a0`;
    """
    found = [text for _line, _name, text, _comments in page_texts(io.BytesIO(code.encode()), None, None, None)]
    assert found == ["plain", "in a tag", "deep {1} in {2}", "a `name` and \u00a0", ("{1} one", "{1} many")]


def test_sentences_of_python_are_found_with_their_places_and_without_what_nobody_sees(tmp_path):
    path = tmp_path / "spoken.py"
    path.write_text(
        '"""Not this one, it is documentation."""\n'
        "def say(name, n):\n"
        '    log.info("nobody sees this text")\n'
        "    return f\"{name} has {n} image{'' if n == 1 else 's'}\", 'A file is missing: {0}'.format(name)\n"
    )
    with path.open("rb") as file:
        found = [text for _line, _name, text, _comments in sentences(file, None, None, None)]
    assert sorted(found) == ["A file is missing: {1}", "{1} has {2} image", "{1} has {2} images"]
