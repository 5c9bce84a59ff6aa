"""No option is accepted and ignored: each is read by the engine, and each wrong configuration is a sentence."""

from __future__ import annotations

import ast
from pathlib import Path

from sd_scripts.families import RUNS
from sd_scripts.schema.flat import fields

ENGINE = Path(__file__).parents[1] / "sd_scripts"
READERS = [file for folder in ("library", "dataset") for file in (ENGINE / folder).rglob("*.py")]
# Prompts, what a launcher is told, and the table that style_weights is, are read by modules that the page uses too.
READERS += [ENGINE / "schema" / name for name in ("prompts.py", "command.py", "lgt.py")]


def read_attributes() -> set[str]:
    """Names read as an attribute (options.x) anywhere in the engine; the schema's own validators do not count."""
    names: set[str] = set()
    for file in READERS:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


READ = read_attributes()


def test_a_component_reads_every_option() -> None:
    names = sorted({name for run in RUNS.values() for name in fields(run)})
    unread = [name for name in names if name not in READ]
    assert names and not unread, f"accepted, but nothing in sd_scripts/library or sd_scripts/dataset reads them: {', '.join(unread)}"


def test_the_check_notices_an_option_that_nobody_reads() -> None:
    assert "an_option_that_nobody_reads" not in READ
