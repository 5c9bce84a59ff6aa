"""No option is accepted and ignored: each is read by the engine, and each wrong configuration is a sentence."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from sd_scripts.families import RUNS
from sd_scripts.schema.anchored_flow import TERMS
from sd_scripts.schema.flat import fields

ENGINE = Path(__file__).parents[1] / "sd_scripts"
SECTIONS = [*(ENGINE / "schema").glob("*.py"), *(ENGINE / "families").glob("*/options.py")]
FILES = [file for folder in ("library", "dataset", "runs", "families") for file in (ENGINE / folder).rglob("*.py")]
# Prompts are read by a module that the page uses too.
READERS = {*FILES, ENGINE / "schema" / "prompts.py"} - {*(ENGINE / "families").glob("*/options.py")}


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def loads(found: ast.AST) -> set[str]:
    """Names read as an attribute (options.x)."""
    return {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@functools.cache
def read_attributes() -> set[str]:
    """Names read anywhere in the engine; of the sections themselves what they tell it, and not what validators look at."""
    functions = [node for file in SECTIONS for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef)]
    told = [node for node in functions if not any("validator" in ast.unparse(mark) for mark in node.decorator_list)]
    calls = [node for file in FILES for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    # A further file of a model is asked for by the name of its option: Companion("clip_l", ...), which a family's loader reads.
    companions = {call.args[0].value for call in calls if ast.unparse(call.func) == "Companion" and isinstance(call.args[0], ast.Constant)}
    # The further terms of the loss are read by their names, in dataset/weights.py.
    return {*TERMS, *map(str, companions)}.union(*(loads(found) for found in (*map(tree, READERS), *told)))


def test_a_component_reads_every_option() -> None:
    names = sorted({name for run in RUNS.values() for name in fields(run)})
    unread = [name for name in names if name not in read_attributes()]
    assert names and not unread, f"accepted, but nothing in sd_scripts/library or sd_scripts/dataset reads them: {', '.join(unread)}"


def test_the_check_notices_an_option_that_nobody_reads() -> None:
    assert "an_option_that_nobody_reads" not in read_attributes()
