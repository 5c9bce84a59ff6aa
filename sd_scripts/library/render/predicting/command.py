"""What a script for prediction does: make the images that the command line asks for, or serve requests."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.tools.report import Report
from sd_scripts.library.tools.run import ToolCancelled, ended_by_signals
from sd_scripts.runs import drawing
from sd_scripts.runs.drawing import BASE
from sd_scripts.runs.importing import uncollected
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.generate import FAMILIES, USUAL_PROMPT, GenerateOptions, generate_options
from sd_scripts.schema.predict import PredictOptions

from .orders import Read

if TYPE_CHECKING:
    from .work import Event

log = logging.getLogger("sd_scripts")

Parsed = tuple[PredictOptions, command_line.Question | None]


def main(kind: type[PredictOptions], argv: Sequence[str] | None = None) -> None:
    """Does what the command line asks for, with a model of the family that has these options.

    Ends the process: 0 done; 1 failed; 2 wrong options; 130 cancelled.
    """
    line = sys.argv[1:] if argv is None else list(argv)
    _do(kind.script, lambda: command_line.parse_question(kind, line), partial(flat.build, kind))


def generate(argv: Sequence[str] | None = None) -> None:
    """The same with any family, which the command line names or the files that it names tell."""
    line = sys.argv[1:] if argv is None else list(argv)

    def parsed() -> Parsed:
        given = _given(line)
        if given.get("serve") or "--help" in line or "-h" in line:
            return command_line.parse_question(generate_options(str(given.get("family") or FAMILIES[0])), line)
        values, kind = drawing.filled(given)
        if given.get("estimate") or given.get("fit"):
            values = {"prompt": USUAL_PROMPT, **values}
        # What follows from files stands below what a person gave; adapters are those of both.
        under = {name: value for name, value in values.items() if name not in given or name in ("lora", "prompt_list")}
        return command_line.parse_question(kind, line, under, over={"lora": values["lora"]})

    _do(GenerateOptions.script, parsed, drawing.completed)


def _given(line: Sequence[str]) -> dict[str, object]:
    """What a command line of generate.py gives that says which family it is, before that is known."""
    found: dict[str, object] = {}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("draw_with", "family", BASE, "prompt", "prompt_list", "seed", "config_file"):
        parser.add_argument(f"--{name}", default=None)
    parser.add_argument("--lora", nargs="*", default=[])
    parser.add_argument("--fit", default=None)
    for name in ("serve", "estimate"):
        parser.add_argument(f"--{name}", action="store_true")
    known = vars(parser.parse_known_args(list(line))[0])
    if known["config_file"]:
        found = toml_files.read_toml(Path(known["config_file"]))
    return {**found, **{name: value for name, value in known.items() if value and name != "config_file"}}


def _do(script: str, parsed: Callable[[], Parsed], read: Read) -> None:
    try:
        options, question = parsed()
    except OptionError as err:
        command_line.fail(err, script)
    # Set before any library reads them.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if options.predict.serve:
        from .serve import serve

        code = serve(read, {name: value for name, value in flat.changed(options).items() if name != "serve"})
        # The thread that waits for requests holds standard input, and an ordinary exit aborts when it cannot close that.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(start(options) if question is None else estimate(options, question))


def estimate(options: PredictOptions, question: command_line.Question) -> int:
    """Says what memory drawing takes; returns the exit code."""
    with uncollected("torch"):
        from sd_scripts.library.memory.forecast import drawing_answers

    try:
        with ended_by_signals():
            said = drawing_answers.answer(options, question)
    except (ToolCancelled, KeyboardInterrupt):
        log.error("stopped before there was an answer")
        return 130
    except OptionError as err:
        command_line.fail(err, options.script)
    sys.stdout.write(said + "\n")
    return 0


def start(options: PredictOptions) -> int:
    """Makes the images and names their files; returns the exit code."""
    try:
        with ended_by_signals():
            events = _made(options)
    except (ToolCancelled, KeyboardInterrupt):
        log.info("cancelled; images that were finished stay")
        return 130
    last = events[-1]
    if last["event"] == "failed":
        if last["problems"]:
            command_line.fail(OptionError([Problem(item["option"], item["message"]) for item in last["problems"]]), options.script)
        log.error("%s: %s%s", options.script, last["text"], f". {last['advice']}" if last["advice"] else "")
        return 1
    report = Report(last["files"], {name: last[name] for name in ("files", "seeds", "size", "seconds")})
    if options.report.report is not None:
        report.write(Path(options.report.report).expanduser())
    sys.stdout.write(report.text + "\n")
    return 0


def _made(options: PredictOptions) -> list[Event]:
    """Makes the images with a bar on standard error; the events."""
    from .orders import PredictOrder, variant_of

    with uncollected("torch"):
        from .work import Workbench

    order = PredictOrder("command line", options, (variant_of(options),), compares=False, preview_every=0)
    events: list[Event] = []
    with Bar(total=options.predict.steps * options.predict.num_images, desc="drawing", unit="step", file=sys.stderr, delay=0.5) as bar:

        def told(event: Event) -> None:
            events.append(event)
            if event["event"] == "loading":
                bar.set_description(f"loading {Path(event['text']).name}")
            elif event["event"] == "started":
                bar.set_description("drawing")
                bar.total = event["steps"] * event["images"]
            elif event["event"] == "step":
                bar.update()

        Workbench().carry_out(order, told, lambda: False)
    return events
