"""What the script qwen_image_predict.py does: make the pictures that the command line asks for, or serve requests."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sd_scripts.dataset.progress import Bar
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.library.tools.report import Report
from sd_scripts.library.tools.run import Cancelled, ended_by_signals
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem

if TYPE_CHECKING:
    from .work import Event

log = logging.getLogger("sd_scripts")


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the command line asks for. Ends the process: 0 done; 1 failed; 2 wrong options; 130 cancelled."""
    try:
        options = flat.parse_tool(QwenImagePredict, sys.argv[1:] if argv is None else list(argv))
    except OptionError as err:
        flat.fail(err, QwenImagePredict.script)
    # Set before any library reads them.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if options.predict.serve:
        from .serve import serve

        code = serve(options)
        # The thread that waits for requests holds standard input, and an ordinary exit aborts when it cannot close that.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(start(options))


def start(options: QwenImagePredict) -> int:
    """Makes the pictures and names their files; returns the exit code."""
    try:
        with ended_by_signals():
            events = _made(options)
    except (Cancelled, KeyboardInterrupt):
        log.info("cancelled; pictures that were finished stay")
        return 130
    last = events[-1]
    if last["event"] == "failed":
        if last["problems"]:
            flat.fail(OptionError([Problem(item["option"], item["message"]) for item in last["problems"]]), options.script)
        log.error("%s: %s%s", options.script, last["text"], f". {last['remedy']}" if last["remedy"] else "")
        return 1
    report = Report(last["files"], {name: last[name] for name in ("files", "seeds", "size", "seconds")})
    if options.report.report is not None:
        report.write(Path(options.report.report).expanduser())
    sys.stdout.write(report.text + "\n")
    return 0


def _made(options: QwenImagePredict) -> list[Event]:
    """Makes the pictures with a bar on standard error; the events."""
    from .orders import Order, variant_of
    from .work import Workbench

    order = Order("command line", options, (variant_of(options),), compares=False, preview_every=0)
    events: list[Event] = []
    with Bar(total=options.predict.steps * options.predict.num_images, desc="predicting", unit="step", file=sys.stderr, delay=0.5) as bar:

        def told(event: Event) -> None:
            events.append(event)
            if event["event"] == "loading":
                bar.set_description(f"loading {Path(event['text']).name}")
            elif event["event"] == "started":
                bar.set_description("predicting")
            elif event["event"] == "step":
                bar.update()

        Workbench().carry_out(order, told, lambda: False)
    return events
