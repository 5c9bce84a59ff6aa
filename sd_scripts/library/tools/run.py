"""What a tool's script does: read the options, do the work, tell; every error ends as a sentence and an exit code.

Nothing heavy is imported before the options are known to be right.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sd_scripts.families import TOOLS
from sd_scripts.runs.importing import uncollected
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.tools import ToolOptions

log = logging.getLogger("sd_scripts")


class ToolCancelled(BaseException):
    """A signal asked the process to end; what was written aside is removed on the way out."""


def main(tool: str, argv: Sequence[str] | None = None) -> None:
    """Does what the command line asks for. Ends the process: 0 done; 1 failed or found broken; 2 wrong options; 130 cancelled."""
    options_class = TOOLS[tool]
    try:
        options = command_line.parse_tool(options_class, sys.argv[1:] if argv is None else list(argv))
    except OptionError as err:
        command_line.fail(err, options_class.script)
    raise SystemExit(start(options))


def start(options: ToolOptions) -> int:
    """Does the work and tells about it; returns the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request to the hub
    module, _, function = options.work.partition(":")
    try:
        with ended_by_signals():
            _spare_inputs(options)
            with uncollected("torch"):
                work = getattr(importlib.import_module(module), function)
            report = work(getattr(options, next(iter(type(options).model_fields))))
            if options.report.report is not None:
                report.write(Path(options.report.report).expanduser())
    except OptionError as err:
        command_line.fail(err, options.script)
    except (ToolCancelled, KeyboardInterrupt):
        log.info("cancelled; files that were finished stay, and no other was changed")
        return 130
    except OSError as err:
        log.error("%s: %s", options.script, f"{err.strerror or err}" + (f" ({err.filename})" if err.filename else ""))
        return 1
    sys.stdout.write(report.text + "\n")
    return 1 if report.broken else 0


def _spare_inputs(options: ToolOptions) -> None:
    """Raises OptionError where a file that is written would take the place of one that is read, whatever path leads to it, or of a
    folder."""
    known, values = flat.fields(type(options)), flat.flatten(options)
    places: dict[str, list[Path]] = {}
    for name, value in values.items():
        if known[name].show.kind in ("file", "folder") and value is not None:
            places[name] = [Path(text).expanduser() for text in ([value] if isinstance(value, str) else value)]
    problems = []
    for written in ("save_to", "report"):
        given = places.get(written, [])
        folders = [target for target in given if target.suffix in (".safetensors", ".json") and target.is_dir()]
        problems += [Problem(written, f"{written}: {target} is a folder; give the name of a file in it") for target in folders]
        for target in filter(Path.is_file, given):
            others = [name for name in places if name != written and (written, name) not in options.in_place]
            read = next((name for name in others if any(_is_in(target, path) for path in places[name])), None)
            if read is not None:
                problems.append(Problem(written, f"{written}: {target} is what {read} names, and would be lost; choose another name"))
    refuse(problems)


def _is_in(file: Path, place: Path) -> bool:
    """Whether a place is this file, or a folder that holds it, by any name."""
    return any(file.samefile(path) for path in (place.rglob("*") if place.is_dir() else [place]) if path.exists())


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While the block runs, SIGTERM raises Cancelled, so that half-written files are removed."""

    def cancel(number: int, frame: FrameType | None) -> None:
        raise ToolCancelled

    before = signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
