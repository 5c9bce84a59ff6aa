"""How large the program is: lines that are neither blank nor comment, of Python, JavaScript and CSS, libraries' own files apart.

usage: lines.py      one line of figures by kind, and what a reader meets: files, functions and their 99th percentile, questions for the
                     class of options outside of families
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

from report import report

ROOT = Path(__file__).parents[2]
COUNTED = ("gui.py", "kohya_like", "sd_scripts")
KINDS = (".py", ".js", ".css")
_COMMENTS = {".js": re.compile(r"/\*.*?\*/|^\s*//[^\n]*", re.DOTALL | re.MULTILINE), ".css": re.compile(r"/\*.*?\*/", re.DOTALL)}
_ASKS_FOR_OPTIONS = re.compile(r"isinstance\([^()]*?,\s*[^()]*Options\b")


def files() -> list[Path]:
    """Tracked files of these kinds, without those of libraries."""
    said = subprocess.run(["git", "ls-files", "-z", *COUNTED], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    found = (Path(name) for name in said.split("\0") if name)
    return [path for path in found if path.suffix in KINDS and "vendor" not in path.parts]


def num_lines(path: Path, text: str) -> int:
    """Lines with something on them that is no comment; a docstring is no comment."""
    if path.suffix == ".py":
        idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        said = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in idle)
        numbers = {number for token in said for number in range(token.start[0], token.end[0] + 1)}
        return sum(bool(line.strip()) for number, line in enumerate(text.splitlines(), 1) if number in numbers)
    return sum(bool(line.strip()) for line in _COMMENTS[path.suffix].sub("", text).splitlines())


def lengths(text: str) -> list[int]:
    """Lines of each function, from its first decorator to its end."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or 0) - min([node.lineno, *(one.lineno for one in node.decorator_list)]) + 1 for node in functions]


def main() -> None:
    lines: Counter[str] = Counter()
    functions: list[int] = []
    asked: Counter[str] = Counter()
    for path in files():
        text = (ROOT / path).read_text(encoding="utf-8")
        lines[path.suffix] += num_lines(path, text)
        if path.suffix == ".py":
            functions += lengths(text)
            asked[path.as_posix()] = len(_ASKS_FOR_OPTIONS.findall(text))
    functions.sort()
    report(
        "size",
        "fewer",
        lines=sum(lines.values()),
        **{kind.removeprefix("."): number for kind, number in lines.items()},
        files=len(files()),
        functions=len(functions),
        p99_lines_of_function=functions[int(0.99 * (len(functions) - 1))],
        isinstance_of_options=sum(asked.values()),
        files_that_ask=sum(number > 0 for number in asked.values()),
    )


if __name__ == "__main__":
    main()
