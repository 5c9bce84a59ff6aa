"""A grid of images as files to be shared: one HTML file with everything in it, and one PNG. Neither has a path of this computer in it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from sd_scripts.dataset import table

MAX_PIXELS = 120_000_000
"""Of the PNG; images are made smaller to stay below it."""
LOSSLESS_SIDE = 256
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 16px; }
h1 { font-size: 19px; }
.scroll { overflow: auto; max-height: 92vh; }
table { border-collapse: separate; border-spacing: 6px; }
thead th { position: sticky; top: 0; background: Canvas; padding: 4px; text-align: left; z-index: 1; }
tbody th { text-align: left; font-weight: 600; padding-top: 10px; }
tbody th span { position: sticky; left: 0; display: inline-block; max-width: 90vw; }
td img { width: min(42vw, 256px); display: block; border-radius: 6px; cursor: zoom-in; }
img.tiny { image-rendering: pixelated; }
dialog { padding: 8px; border: 0; border-radius: 10px; }
dialog img { width: min(94vw, 86vh); height: auto; display: block; }
"""
_SCRIPT = """
const box = document.querySelector('dialog');
const large = box.querySelector('img');
const cells = [...document.querySelectorAll('td img')];
const columns = document.querySelectorAll('thead th').length;
let at = 0;
const show = (place) => {
  if (!cells[place]) return;
  at = place; large.src = cells[at].src; large.alt = cells[at].alt; large.className = cells[at].className;
  box.querySelector('p').textContent = cells[at].alt;
};
cells.forEach((cell, place) => cell.addEventListener('click', () => { show(place); box.showModal(); }));
box.addEventListener('click', () => box.close());
box.addEventListener('keydown', (event) => {
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (moves[event.key]) { event.preventDefault(); show(at + moves[event.key]); }
});
"""


def titles(shown: Mapping[str, Any]) -> list[str]:
    """What stands over each row: its prompt where it is another one than that of the row before."""
    rows = shown["rows"]
    return ["" if place and rows[place - 1]["prompt"] == row["prompt"] else row["prompt"] for place, row in enumerate(rows)]


def image(shown: Mapping[str, Any], cells: Path) -> bytes:
    """The grid as a PNG. Raises KeyError where nothing is drawn yet."""
    found = [[_opened(cells / f"{key}.png") for key in row] for row in shown["keys"]]
    first = next((each for row in found for each in row if each is not None), None)
    if first is None:
        raise KeyError(shown["name"])
    pixels = first.width * first.height * len(shown["rows"]) * len(shown["columns"])
    if pixels > MAX_PIXELS:
        scale = (MAX_PIXELS / pixels) ** 0.5
        for each in (each for row in found for each in row if each is not None):
            each.thumbnail((int(each.width * scale), int(each.height * scale)), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    table.drawn(found, [column["label"] for column in shown["columns"]], titles(shown)).save(stream, format="PNG")
    return stream.getvalue()


def page(shown: Mapping[str, Any], cells: Path) -> bytes:
    """The grid as an HTML file that needs nothing else."""
    labels = [column["label"] for column in shown["columns"]]
    head = "".join(f'<th scope="col">{html.escape(label)}</th>' for label in labels)
    body: list[str] = []
    for prompt, rows in groupby(enumerate(shown["rows"]), key=lambda item: item[1]["prompt"]):
        body.append(f'<tr><th colspan="{len(labels)}"><span>{html.escape(prompt)}</span></th></tr>')
        for number, row in rows:
            words = [f"{label}, {prompt}, seed {row['seed']}" for label in labels]
            cell = "".join(_cell(cells / f"{key}.png", text) for key, text in zip(shown["keys"][number], words, strict=True))
            body.append(f"<tr>{cell}</tr>")
    title = html.escape(shown["title"])
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        f'<dialog aria-label="One image"><img alt=""><p></p></dialog><script>{_SCRIPT}</script></html>\n'
    )
    return text.encode("utf-8", "replace")


def _cell(path: Path, words: str) -> str:
    opened = _opened(path)
    if opened is None:
        return "<td></td>"
    tiny = max(opened.size) < LOSSLESS_SIDE
    stream = io.BytesIO()
    opened.save(stream, format="WEBP", **({"lossless": True} if tiny else {"quality": 90}))
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<td><img loading="lazy" class="{"tiny" if tiny else ""}" alt="{html.escape(words)}" src="data:image/webp;base64,{data}"></td>'


def _opened(path: Path) -> Image.Image | None:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError:
        # It is not drawn yet.
        return None
