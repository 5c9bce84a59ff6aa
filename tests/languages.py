"""The languages of the page: what is to be translated, and the catalogues. `python -m tests.languages` brings them up to date.

The English text in the code is the key. It is read from the page's modules (t`...` and plural(...)), from the schema, and from the
sentences in Python that the page shows. Translations are written in kohya_like/languages/*.po. See docs/languages.md.
"""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract
from babel.messages.pofile import read_po, write_po

from kohya_like import form, presets, theme
from kohya_like.catalogues import SOURCES
from kohya_like.tabs.train import cluster_fields
from kohya_like.training_modes import TRAINING_MODES
from sd_scripts.families import FACTS, TOOLS
from sd_scripts.schema.generate import FAMILIES, generate_options

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "kohya_like" / "web"
SPOKEN = [
    *(
        "kohya_like/*.py",
        "kohya_like/data_room/*.py",
        "kohya_like/tabs/*.py",
        "sd_scripts/schema/command_line.py",
        "sd_scripts/schema/flat.py",
        "sd_scripts/schema/outside.py",
        "sd_scripts/schema/toml_files.py",
    ),
    "sd_scripts/schema/errors.py",
    *("sd_scripts/schema/prompts.py", "sd_scripts/schema/runs.py", "sd_scripts/schema/dataset.py", "sd_scripts/schema/distributed.py"),
    *("sd_scripts/schema/model.py", "sd_scripts/schema/memory.py", "sd_scripts/schema/network.py", "sd_scripts/schema/objective.py"),
    *("sd_scripts/schema/output.py", "sd_scripts/schema/anchored_flow.py", "sd_scripts/schema/generate.py"),
    *(f"sd_scripts/dataset/{name}.py" for name in ("buckets", "cache_files", "findings", "images", "pairs", "plan", "scan", "contents")),
    *("sd_scripts/dataset/masks.py", "sd_scripts/dataset/mask_files.py"),
    *(f"sd_scripts/library/memory/forecast/{name}.py" for name in ("values", "estimate", "drawing", "fitting", "drawing_answers")),
    *(
        f"sd_scripts/runs/{name}.py"
        for name in ("early_checks", "schedules", "resume", "model_files", "model_headers", "downloads", "trash")
    ),
    *(f"sd_scripts/library/{name}.py" for name in ("data/cache", "train/reporting", "train/process", "train/trainer", "train/prepare")),
    *("sd_scripts/library/render/sample.py", "sd_scripts/library/tools/*.py", "sd_scripts/families/bases.py"),
    *("sd_scripts/library/captioning/*.py", "sd_scripts/library/masking/*.py"),
]
"""Where sentences are made that the page shows. What only a log or a terminal says stays English."""
SILENT = {
    f"{name}.py"
    for name in "cli cleanup startup console exporting space packing comparison_files theme page ports supporting sweep_cli".split()
}
"""Of these nothing is on the page, or it is a file in English that people keep."""
LABELLING = {"reporting.py", "browsing.py", "dataset_view.py", "guide.py", "predict_routes.py", "predictions.py", "fixes.py"}
"""Where single words are labels of the page too."""
TECHNICAL = re.compile(
    r"[<>\\]|\(\?|^[\W\d{}]*$|max-age|attachment; |%[sYr]|charset=|^[\w.]+ --|--[a-z]+ \{|\[[^\]]*\]\)|^#|\.\*"
    r"|^(?!Loading |Stopping: |Cancelling: )\S+ \{1\}$"
    r"|^script = |src='|: none;|\w\|\w|-src |-uri 'self'|'none'$|'self'$|^(PRAGMA|CREATE|SELECT|Traceback|Raw profile) "
    r"|^dpm|^euler |^schema_version|^image/|^ohwx "
)
"""Not for people: markup, patterns, headers, log lines and command lines."""
UNHEARD = set("compile getLogger debug info warning exception error print add_argument strftime Thread fullmatch sub".split())
"""Calls whose texts nobody on the page sees."""
ENOUGH = 0.95
"""A language with fewer of the texts translated is not offered."""
PLURALS = {"de": "nplurals=2; plural=(n != 1);", "zh": "nplurals=1; plural=0;"}
PLURALS["ru"] = "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);"

Found = Iterator[tuple[int, str, Any, list[str]]]
"""What babel wants of an extractor: line, function, text or texts, comments."""


# --- extractors -----------------------------------------------------------------------------------------------------


def _template_end(code: str, start: int) -> int:
    """Where the template literal ends whose text begins at start."""
    at = start
    while code[at] != "`":
        if code.startswith("${", at):
            at = _hole_end(code, at + 2)
        else:
            at += 2 if code[at] == "\\" else 1
    return at


def _hole_end(code: str, at: int) -> int:
    """Just behind the brace that ends what is put into a template literal."""
    depth = 1
    while depth:
        if code[at] == "`":
            at = _template_end(code, at + 1)
        elif code[at] in "\"'":
            at = re.compile(rf"(?:\\.|[^\\{code[at]}])*{code[at]}").match(code, at + 1).end() - 1  # type: ignore[union-attr]
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        at += 1
    return at


def _key(code: str) -> tuple[str, list[str]]:
    """The key of a template literal, and what its numbers stand for."""
    text, holes, at = "", [], 0
    while at < len(code):
        if code.startswith("${", at):
            end = _hole_end(code, at + 2)
            holes.append(f"{{{len(holes) + 1}}} is {code[at + 2 : end - 1]}")
            text += f"{{{len(holes)}}}"
            at = end
        elif code[at] == "\\":
            escaped = re.compile(r"\\(?:u([0-9a-f]{4})|(.))", re.DOTALL).match(code, at)
            assert escaped
            text += chr(int(escaped[1], 16)) if escaped[1] else {"n": "\n"}.get(escaped[2], escaped[2])
            at = escaped.end()
        else:
            text += code[at]
            at += 1
    return text, holes


def page_texts(file: io.BufferedReader, _keywords: Any, _tags: Any, options: Any) -> Found:
    """t`...` and plural(count, "one", "many") of a module of the page."""
    code = file.read().decode()
    for mark in re.finditer(r"(?<![\w$.])t`", code):
        text, holes = _key(code[mark.end() : _template_end(code, mark.end())])
        yield code.count("\n", 0, mark.start()) + 1, "", text, [" ".join(hole.split()) for hole in holes]
    for call in re.finditer(r'(?<![\w$.])plural\((?:[^"`]|"[^"]*" ?[?:])*?, "([^"]+)", "([^"]+)"', code):
        yield code.count("\n", 0, call.start()) + 1, "ngettext", (f"{{1}} {call[1]}", f"{{1}} {call[2]}"), []


def _texts(node: ast.expr) -> Iterator[tuple[str, list[str]]]:
    """The keys of a string or f-string: one for each of the words that a condition inside may choose."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Texts for str.format count from 0.
        yield re.sub(r"\{(\d)\}", lambda number: f"{{{int(number[1]) + 1}}}", node.value) if "{0}" in node.value else node.value, []
    if not isinstance(node, ast.JoinedStr):
        return
    found: list[tuple[str, list[str]]] = [("", [])]
    for piece in node.values:
        value = piece.value if isinstance(piece, ast.FormattedValue) else piece
        if isinstance(value, ast.Constant):
            found = [(f"{text}{value.value}", holes) for text, holes in found]
        elif isinstance(value, ast.IfExp) and all(isinstance(each, ast.Constant) for each in (value.body, value.orelse)):
            words = [str(each.value) for each in (value.body, value.orelse) if isinstance(each, ast.Constant)]
            found = [(f"{text}{word}", holes) for text, holes in found for word in words]
        else:
            found = [(f"{text}{{{len(holes) + 1}}}", [*holes, f"{{{len(holes) + 1}}} is {ast.unparse(value)}"]) for text, holes in found]
    yield from found


def _unheard(tree: ast.Module) -> set[int]:
    """Strings that are documentation, parts of others, or in calls of which the page shows nothing."""
    apart = set()
    for node in ast.walk(tree):
        inside: Iterable[ast.AST] = ()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = (each.value for each in node.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        elif isinstance(node, ast.JoinedStr | ast.Assert) or (
            isinstance(node, ast.Call) and (getattr(node.func, "attr", None) or getattr(node.func, "id", "")) in UNHEARD
        ):
            inside = (each for each in ast.walk(node) if each is not node)
        apart |= {id(each) for each in inside}
    return apart


def sentences(file: io.BufferedReader, _keywords: Any, _tags: Any, options: Any) -> Found:
    """Strings of several words in a Python file, and the single ones that are labels."""
    tree = ast.parse(file.read())
    labels = Path(file.name).name in LABELLING
    apart = _unheard(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in apart:
            for text, holes in _texts(node):
                words = re.sub(r"\{\d\}", "", text)
                if labels and re.fullmatch("[A-Z][a-z]{3,}", text):
                    yield node.lineno, "", text, []
                if " " in text.strip() and len(re.findall(r"[a-z]", words)) > 2 and not TECHNICAL.search(text):
                    yield node.lineno, "", text.strip(), holes


def of_options() -> Iterator[str]:
    """The words of the schema: of the form, of the tools, of what draws, of the export."""
    schema = json.loads(form.schema_json())
    of_tools = [form.specification(field) for tool in TOOLS.values() for field in form.shown_fields(tool).values()]
    drawing = {family: form.shown_fields(generate_options(family)).values() for family in FAMILIES}
    of_drawing = [form.specification(field, family) for family, fields in drawing.items() for field in fields]
    for spec in [*schema["fields"], *of_tools, *of_drawing, *cluster_fields()]:
        yield from (spec[key] for key in ("label", "help", "unit", "fold") if spec.get(key))
        yield _with_places(spec.get("range", ""))
    for run in schema["runs"].values():
        yield run["label"]
        yield from (block["about"] for group in run["groups"] for block in group["blocks"])
    yield from (theme.BASICS, *theme.GROUPS, *schema["families"].values())
    for mode in TRAINING_MODES:
        yield from (mode.label, mode.about, mode.title)
    yield from (tool.label for tool in TOOLS.values())
    yield from (" ".join((tool.__doc__ or "").split()) for tool in TOOLS.values())


def of_presets() -> Iterator[str]:
    """The titles of the built-in presets, and the sentences of what they are for."""
    for path in sorted(presets.BUILT_IN.glob("*/*.toml")):
        preset = presets.read(path, own=False)
        yield from map(_with_places, (preset.title, *re.split(r"(?<=[.!?]) (?=\S)", preset.about)))


def of_licences() -> Iterator[str]:
    """What is said of published models; names of licences are names."""
    return (base.licence for facts in FACTS.values() for base in facts.bases if " " in base.licence)


def of_system() -> Iterator[str]:
    """What the system says of files and folders; sentences put it in."""
    names = "EACCES EBUSY EEXIST EIO EISDIR ELOOP EMFILE ENAMETOOLONG ENOENT ENOSPC ENOTDIR ENOTEMPTY EPERM EROFS".split()
    return (os.strerror(getattr(errno, name)) for name in names)


def _with_places(text: str) -> str:
    """A text with {1}, {2} in place of its numbers."""
    numbers = count(1)
    return re.sub(r"-?[\d.,]*\d", lambda _number: f"{{{next(numbers)}}}", text)


# --- catalogues -----------------------------------------------------------------------------------------------------


@cache
def template() -> Catalog:
    """Everything that is to be translated."""
    catalog = Catalog(fuzzy=False)
    for text in dict.fromkeys(text for text in (*of_options(), *of_presets(), *of_licences(), *of_system()) if text):
        catalog.add(text, locations=[("schema", 1)])
    modules = sorted(path for path in WEB.rglob("*.js") if "vendor" not in path.parts)
    spoken = sorted({path for pattern in SPOKEN for path in ROOT.glob(pattern) if path.name not in SILENT})
    for path in [*modules, *spoken]:
        with path.open("rb") as file:
            method = page_texts if path.suffix == ".js" else sentences
            for line, text, comments, _context in extract(method, file, keywords={"": None, "ngettext": (1, 2)}):
                catalog.add(text, locations=[(path.relative_to(ROOT).as_posix(), line)], auto_comments=comments)
    return catalog


def languages() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.po"))


def catalogue(language: str) -> Catalog:
    with (SOURCES / f"{language}.po").open("rb") as file:
        return read_po(file, locale=language)


def is_translated(message: Message) -> bool:
    return all(message.string) if isinstance(message.string, list | tuple) else bool(message.string)


def renewed(language: str) -> Catalog:
    """The catalogue of a language with the texts that there are now; what is not needed any more is left out."""
    before = catalogue(language)
    after = Catalog(locale=language, header_comment=f"# The page of kohya_like in {language}; see docs/languages.md.", fuzzy=False)
    for message in template():
        if message.id:
            kept = before.get(message.id if isinstance(message.id, str) else message.id[0])
            same = kept is not None and bool(kept.pluralizable) == bool(message.pluralizable)
            after.add(message.id, kept.string if kept and same else None, message.locations, auto_comments=message.auto_comments)
    return after


def written(catalog: Catalog) -> bytes:
    stream = io.BytesIO()
    write_po(stream, catalog, width=0, include_lineno=False, omit_header=False)
    # What changes with every run of babel, and what it finds anew in each text: 29 kB of every language. A text of the schema alone,
    # which is every other one, has no place.
    lines = stream.getvalue().replace(b", python-brace-format", b"").splitlines(keepends=True)
    needless = re.compile(rb'"(POT|PO|Generated|Project|Report|Last|Language-Team)[\w-]*: |#$|#: schema$')
    return b"".join(line for line in lines if not needless.match(line))


def main() -> None:
    for language in languages():
        catalog = renewed(language)
        (SOURCES / f"{language}.po").write_bytes(written(catalog))
        missing = [message.id for message in catalog if message.id and not is_translated(message)]
        print(f"{language}: {len(catalog) - len(missing)} of {len(catalog)} texts")
        if "--missing" in sys.argv:
            print("\n".join(f"  {text!r}" for text in missing))


if __name__ == "__main__":
    main()
