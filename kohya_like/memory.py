"""What memory the run on the page would take, or drawing, and what makes it fit: asks the script that does it in a process of its own.

The script measures without weights and without a GPU (--estimate, --fit). This turns its JSON lines into what web/common/memory.js draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sd_scripts.runs.command import SCRIPTS
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.fields import Options
from sd_scripts.schema.generate import GenerateOptions
from sd_scripts.schema.labels import label
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.runs import RunOptions

from . import console, form, presets

Line = dict[str, Any]
"""{"say": sentence} while it works, then {"forecast", "plan"?} or {"problem": sentence}."""

LONGEST_SECONDS = 600
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
"""It takes nothing of a GPU that somebody else works on, and fetches nothing."""
_one_at_a_time = threading.Semaphore(1)


def ask(options: RunOptions, card_gib: float | None, payload: Mapping[str, Any]) -> Iterator[Line]:
    """The script's answers on a run, as they come. card_gib: the card that a plan is wanted for; payload: what the page's controls show.

    Ends the process when nobody listens any more.
    """
    yield from _one(options, card_gib, lambda found: answer(options, found, payload))


def ask_of_drawing(options: GenerateOptions, card_gib: float | None) -> Iterator[Line]:
    """The same on drawing."""
    yield from _one(options, card_gib, lambda found: answer_of_drawing(options, found))


def _one(options: Options, card_gib: float | None, made: Callable[[Mapping[str, Any]], Line]) -> Iterator[Line]:
    if not _one_at_a_time.acquire(blocking=False):
        yield {"problem": "Another estimate is being made; try again in a moment."}
        return
    try:
        with tempfile.TemporaryDirectory(prefix="kl-memory-") as folder:
            yield from _asked(options, card_gib, made, Path(folder))
    finally:
        _one_at_a_time.release()


def _asked(options: Options, card_gib: float | None, made: Callable[[Mapping[str, Any]], Line], folder: Path) -> Iterator[Line]:
    config, errors = folder / "config.toml", folder / "errors.txt"
    config.write_text(toml_files.to_toml(options), encoding="utf-8")
    wanted = ["--estimate"] if card_gib is None else [f"--fit={card_gib:g}GB"]
    command = [sys.executable, str(SCRIPTS / options.script), "--config_file", str(config), *wanted, "--json"]
    with errors.open("wb") as stream:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream, env={**os.environ, **_ENVIRONMENT}, text=True
        )
    overdue = threading.Timer(LONGEST_SECONDS, child.kill)
    overdue.start()
    assert child.stdout is not None
    try:
        found = None
        for line in child.stdout:
            said = _json(line)
            if "measuring" in said:
                yield {"say": f"Measuring {said['measuring']} …"}
            found = said if "forecast" in said else found
        code = child.wait()
        if found is not None and code == 0:
            yield made(found)
        else:
            yield {"problem": _why(errors.read_text(encoding="utf-8", errors="replace"), code)}
    finally:
        overdue.cancel()
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()


def answer(options: RunOptions, found: Mapping[str, Any], payload: Mapping[str, Any]) -> Line:
    """The script's answer for the page: the forecast, and the plan with what it would change in the form."""
    plan = found.get("plan")
    if plan is None:
        return {"forecast": found["forecast"]}
    run = type(options)
    known = form.shown_fields(run)
    now = {name: text for name, text in dict(payload.get("values") or {}).items() if name in known}
    texts = {name: form.to_text(known[name], value) for name, value in plan["changes"].items()}
    changes = [vars(change) for change in presets.difference(run, now, {**form.texts(run, {}), **now, **texts})]
    shown = {key: plan[key] for key in ("card", "fits", "steps", "forecast")}
    return {"forecast": found["forecast"], "plan": {**shown, "changes": changes, "run": form.run_key(run), "texts": texts}}


def answer_of_drawing(options: GenerateOptions, found: Mapping[str, Any]) -> Line:
    """The script's answer for the Generate tab: the forecast, and the plan with the fields that it would change."""
    line = {"forecast": found["forecast"], "on_cpu": found["on_cpu"]}
    plan = found.get("plan")
    if plan is None:
        return line
    known, now = form.shown_fields(type(options)), flat.flatten(options)
    texts = {name: form.to_text(known[name], value) for name, value in plan["changes"].items()}
    changes = [
        {"label": label(name), "before": _word(form.to_text(known[name], now[name])), "after": _word(text)} for name, text in texts.items()
    ]
    shown = {key: plan[key] for key in ("card", "fits", "steps", "forecast")}
    return {**line, "plan": {**shown, "changes": changes, "texts": texts}}


def _word(text: str | bool) -> str:
    return text if isinstance(text, str) else "on" if text else "off"


def _json(line: str) -> dict[str, Any]:
    try:
        said = json_of(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _why(errors: str, code: int) -> str:
    """The sentences in which the script has said what is wrong, or that it ended."""
    last = console.last_line(errors)
    return console.told(errors) or f"The estimate ended with {code}" + (f": {last}" if last else "")
