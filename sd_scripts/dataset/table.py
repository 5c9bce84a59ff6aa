"""Several images as one: a table with a label over each column and, where there are several rows that differ in more than a seed, over each
row."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
GAP = 8
MOST_LINES = 4
"""Of a label. Names of checkpoints are long, begin alike and have no spaces."""


def drawn(rows: Sequence[Sequence[Image.Image | None]], labels: Sequence[str], titles: Sequence[str] = ()) -> Image.Image:
    """Images as a table with a label over each column, and with titles a line over each row; "" takes no line. None leaves a cell empty.

    Images are of one size; others are brought into the first one's, with their shape kept.
    """
    width, height = next(image for row in rows for image in row if image is not None).size
    size = max(12, min(32, width // 16))
    font, band = ImageFont.load_default(size), 2 * GAP + size
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    titles = titles or [""] * len(rows)
    lines = [_wrapped(label, width, pen, font) for label in labels]
    head = band + (max(map(len, lines), default=1) - 1) * (size + 2)
    total = head + sum(height + GAP + (band if title else 0) for title in titles) - GAP
    table = Image.new("RGB", (len(labels) * (width + GAP) - GAP, total), "white")
    pen = ImageDraw.Draw(table)
    for column, label in enumerate(lines):
        for number, line in enumerate(label):
            pen.text((column * (width + GAP), GAP + number * (size + 2)), line, fill="black", font=font)
    top = head
    for row, title in zip(rows, titles, strict=True):
        if title:
            pen.text((0, top + GAP // 2), _fitted(title, table.width, pen, font), fill="black", font=font)
            top += band
        for column, image in enumerate(row):
            if image is not None:
                small = image if image.size == (width, height) else _inside(image, (width, height))
                table.paste(small, (column * (width + GAP), top))
        top += height + GAP
    return table


def _inside(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    scale = min(size[0] / image.width, size[1] / image.height)
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.LANCZOS)


def _wrapped(text: str, width: int, pen: ImageDraw.ImageDraw, font: Font) -> list[str]:
    """A label in lines; of one that is too long its beginning and its end, by which checkpoints differ."""
    kept = len(text)
    found = _broken(text, width, pen, font)
    while len(found) > MOST_LINES:
        kept -= 2
        found = _broken(f"{text[: kept // 2]}…{text[len(text) - kept // 2 :]}", width, pen, font)
    return found


def _broken(text: str, width: int, pen: ImageDraw.ImageDraw, font: Font) -> list[str]:
    lines = [""]
    for letter in text:
        if lines[-1] and pen.textlength(lines[-1] + letter, font) > width:
            lines.append("")
        lines[-1] += letter
    return lines


def _fitted(text: str, width: int, pen: ImageDraw.ImageDraw, font: Font) -> str:
    """As much of a text as fits."""
    while len(text) > 1 and pen.textlength(text, font) > width:
        text = text.rstrip("…")[:-1] + "…"
    return text
