"""A run as one zip for whoever is to help with it: log, settings, versions, findings. No image, prompt, weight or path is in it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

from sd_scripts.runs.events import Previewed
from sd_scripts.runs.resume import meta_of
from sd_scripts.schema import flat

from . import causes, console, monitor
from .hiding import Hidden
from .supervisor import Job

DOCTOR_SECONDS = 120.0
MOST_LINES = 5000
"""Of the console and of the log of events, the newest."""
TEXTS = frozenset({"caption_prefix", "caption_suffix", "class_prompt", "instance_prompt", "sample_prompts", "training_comment"})
"""Options in which people write what their images show."""
ABOUT = """{name} ({state})

What is in this zip, to be read before it is sent:
  settings.txt   the settings of the run; of folders and files the last name, prompts left out
  console.txt    what the run printed, its newest {lines} lines
  events.jsonl   its log, the newest {lines} entries; entries of previews left out
  findings.txt   what is known of its end, and what `setup.sh doctor` says of this computer
  versions.json  versions, devices, the hash of the data set

No image, no caption file, no weights and no access token is in it. Folders of this computer are left out of all texts; names of files stay.
"""


def archive(job: Job) -> bytes:
    """The zip, whatever state the run is in."""
    hidden = Hidden(job, TEXTS)
    texts = {
        "ABOUT.txt": ABOUT.format(name=job.name, state=job.state, lines=MOST_LINES),
        "settings.txt": "".join(f"{line}\n" for line in _settings(hidden)),
        "console.txt": "".join(f"{hidden.out_of(line)}\n" for line in console.last_lines(job.run.console, MOST_LINES)),
        "events.jsonl": "".join(f"{line}\n" for line in _events(job, hidden)),
        "findings.txt": "\n\n".join(hidden.out_of(text) for text in (*_findings(job), _doctor())) + "\n",
        "versions.json": json.dumps(_without_places(_versions(job), hidden), ensure_ascii=False, indent=1) + "\n",
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in texts.items():
            packed.writestr(f"{job.name}/{name}", text)
    return stream.getvalue()


def _settings(hidden: Hidden) -> Iterator[str]:
    options = hidden.options
    if options is None:
        yield "They cannot be read any more."
        return
    yield f"{options.label}, {options.script}"
    for name, field in flat.fields(type(options)).items():
        if name == "output_dir":
            continue
        value = flat.flatten(options)[name]
        mark = "" if value == field.default else "* "
        told = f"({len(str(value))} characters)" if name in TEXTS and value else hidden.of_option(name, value, field)
        yield f"{mark}{name} = {told}"


def _events(job: Job, hidden: Hidden) -> Iterator[str]:
    for line in job.run.events()[0][-MOST_LINES:]:
        if line.get("kind") != Previewed.kind:
            yield json.dumps(_without_places(line, hidden), ensure_ascii=False)


def _without_places(value: Any, hidden: Hidden) -> Any:
    """The same without private texts, however deep they lie."""
    if isinstance(value, dict):
        return {hidden.out_of(str(name)): _without_places(each, hidden) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each, hidden) for each in value]
    return hidden.out_of(value) if isinstance(value, str) else value


def _findings(job: Job) -> Iterator[str]:
    if job.damage:
        yield job.damage
    progress = monitor.Progress()
    progress.fold(job.run.events()[0])
    if job.state in ("failed", "died"):
        cause = causes.diagnose(console.last_lines(job.run.console), job.returncode, progress.farewell if job.state == "failed" else None)
        yield "\n".join(text for text in (cause.text, cause.why, cause.advice) if text)
    yield from (f"{text} ({count} x)" for text, count in progress.warnings.items())


def _doctor() -> str:
    """What the doctor says, in a process of its own: a broken torch may take its process with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sd_scripts.doctor"], capture_output=True, text=True, timeout=DOCTOR_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"The doctor did not answer: {err}"
    return (done.stdout or done.stderr).strip()


def _versions(job: Job) -> dict[str, Any]:
    meta = meta_of(job.run)
    return {name: meta.get(name) for name in ("versions", "devices", "git", "dataset_hash", "fingerprint", "processes")}
