"""Runs in a terminal, from the same code as the Runs tab: `python -m kohya_like.cli runs list|show|compare|rm|queue`, which start and end
none, and `... sweep`, which tries several values of settings.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sd_scripts.runs.trash import bytes_of
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import given_path

from . import desk, sweep_cli
from .comparing import differences, reached
from .supervisor import Job, JobSupervisor, queue_of

_NUMBER = re.compile(r"^\d{8}-\d{6}(_\d+)?-")
"""What the name of a run's folder begins with."""


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser("python -m kohya_like.cli", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parse.add_subparsers(dest="what", required=True)
    sweep_cli.add_to(what.add_parser("sweep", help="try several values of settings", description=sweep_cli.__doc__, allow_abbrev=False))
    runs = what.add_parser("runs", help="the runs of an output folder")
    orders = runs.add_subparsers(dest="order", required=True)
    of_all = argparse.ArgumentParser(add_help=False)
    of_all.add_argument("--output_dir", type=given_path, default=Path("output"), help="folder of the runs (default: output)")
    of_all.add_argument("--json", action="store_true", help="print JSON")
    for name, about, count in (
        ("list", "all runs, newest first", None),
        ("show", "what runs have reached and what is said of them", "+"),
        ("compare", "in which settings runs differ, and what each has reached", "+"),
        ("rm", "move runs that have ended into the trash", "+"),
        ("queue", "runs that are at work, and those that wait, in their order", None),
    ):
        order = orders.add_parser(name, help=about, description=about, parents=[of_all])
        if count:
            order.add_argument("names", nargs=count, metavar="RUN", help="its folder's name, or the end of it")
    orders.choices["rm"].add_argument("--yes", action="store_true", help="do not ask")
    return parse


def _found(jobs: Sequence[Job], names: Sequence[str]) -> list[Job]:
    """The runs that people name by their folder or by the end of it (`cat` for `20261120-162826-cat`), the newest of several.

    jobs: newest first. Raises OptionError for names that no run has, all of them at once.
    """
    chosen = [next((job for job in jobs if job.name == name or job.name.endswith(f"-{name}")), None) for name in names]
    absent = [name for name, job in zip(names, chosen, strict=True) if job is None]
    if absent:
        ends = dict.fromkeys(_NUMBER.sub("", job.name) for job in jobs)
        near = dict.fromkeys(end for name in absent for end in difflib.get_close_matches(name, ends))
        told = f"is {' or '.join(near)} meant?" if near else "`runs list` shows those that are"
        raise OptionError(f"there is no run {', '.join(absent)} here; {told}")
    return [job for job in chosen if job is not None]


def _line(job: Job) -> dict[str, Any]:
    said, brief = desk.read(job.path), job.summary
    steps = {"step": brief.step, "steps": brief.steps, "stop_step": desk.stop_step(job)}
    told = {"label": said.called, "notes": said.notes, "starred": said.starred, "tags": said.tags}
    return {"name": job.name, "state": job.state, **steps, "loss": brief.loss, **told}


def _steps(row: Mapping[str, Any]) -> str:
    return f"{row['step']}/{row['steps']}" + (f", stops after {row['stop_step']}" if row["stop_step"] else "")


def _told(value: Any) -> str:
    if value is None:
        return "-"
    if value is True:
        return "yes"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [list(head), *([_told(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines) + "\n"


def _listed(jobs: Sequence[Job]) -> tuple[Any, str]:
    rows = [_line(job) for job in jobs]
    lines = [[row["name"], row["state"], _steps(row), row["loss"], "*" * row["starred"], row["label"], row["tags"]] for row in rows]
    return rows, _table(["run", "state", "steps", "loss", "", "name", "tags"], lines) if rows else "There are no runs.\n"


def _shown(jobs: Sequence[Job]) -> tuple[Any, str]:
    """What is not known, and what nobody has said, has no line."""
    rows = []
    for job in jobs:
        figures = reached(job)
        both = {"step": figures.pop("steps"), "steps": figures.pop("of steps")}
        rows.append({**_line(job), **both, **figures, "folder": str(job.path), "bytes": bytes_of(job.path)})
    texts = []
    for row in rows:
        lines = row | {"steps": _steps(row), "step": None, "stop_step": None, "bytes": None, "size": f"{row['bytes'] / 2**20:.1f} MiB"}
        known = {name: value for name, value in lines.items() if value is not None and value is not False and value not in ("", ())}
        texts.append("".join(f"{name}: {_told(value)}\n" for name, value in known.items()))
    return rows, "\n".join(texts)


def _compared(jobs: Sequence[Job]) -> tuple[Any, str]:
    if len({job.name for job in jobs}) < 2:
        raise OptionError("compare: name two runs or more")
    names, rows, figures = [job.name for job in jobs], differences(jobs), [reached(job) for job in jobs]
    said = {"runs": names, "settings": [vars(row) for row in rows], "reached": figures}
    settings = (
        _table(["setting", *names], [[f"{row.label} ({row.name})", *row.values] for row in rows]) if rows else "No setting differs.\n"
    )
    return said, settings + "\n" + _table(["reached", *names], [[name, *(figure[name] for figure in figures)] for name in figures[0]])


def _queue(jobs: Sequence[Job]) -> tuple[Any, str]:
    """Those at work first, then those that wait, the next one first."""
    places = desk.places(jobs)
    order = [job for job in jobs if job.state == "running"] + queue_of(jobs)
    rows = [{**_line(job), "waits for": _waits_for(places.get(job.name))} for job in order]
    lines = [[row["name"], row["state"], _steps(row), row["label"], row["waits for"]] for row in rows]
    return rows, _table(["run", "state", "steps", "name", "waits for"], lines) if rows else "No run is at work, and none waits.\n"


def _waits_for(queued: Mapping[str, Any] | None) -> str:
    """Besides a device."""
    if queued is None:
        return ""
    told = ["to be released"] if queued["held"] else []
    if queued["not_before"]:
        told.append(datetime.fromtimestamp(queued["not_before"]).astimezone().strftime("%Y-%m-%d %H:%M"))
    return ", ".join([*told, *([queued["after"]] if queued["after"] else [])])


def _remove(supervisor: JobSupervisor, jobs: Sequence[Job], is_sure: bool) -> tuple[Any, str]:
    names = ", ".join(job.name for job in jobs)
    if not is_sure:
        sys.stderr.write(f"Move {names} into the trash? [y/N] ")
        sys.stderr.flush()
        if not (answer := sys.stdin.readline()):
            raise OptionError("\nrm: nobody answers here; give --yes")
        if answer.strip().lower() not in ("y", "yes"):
            return [], "Nothing was deleted.\n"
    entries = [supervisor.discard(job) for job in jobs]
    return [vars(entry) for entry in entries], "".join(f"{entry.what} is in the trash; the Runs tab puts it back.\n" for entry in entries)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 with a sentence on stderr."""
    asked, rest = parser().parse_known_args(arguments)
    if rest and asked.what != "sweep":
        parser().parse_args(arguments)
    folder = asked.output_dir or Path("output")
    try:
        if asked.what == "sweep":
            sweep_cli.main(asked, rest)
            return 0
        if not folder.is_dir():
            raise OptionError(f"there is no folder {folder}; give the studio's --output_dir")
        supervisor = JobSupervisor(folder)
        jobs = supervisor.seen()
        if asked.order in ("list", "queue"):
            said, text = (_listed if asked.order == "list" else _queue)(jobs)
        else:
            chosen = _found(jobs, asked.names)
            if asked.order == "rm":
                said, text = _remove(supervisor, chosen, asked.yes)
            else:
                said, text = (_shown if asked.order == "show" else _compared)(chosen)
    except OptionError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    sys.stdout.write(json.dumps(said, ensure_ascii=False, indent=1, default=str) + "\n" if asked.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
