"""Lists and ends processes of runs whose launcher is gone: `python -m kohya_like.supervisor cleanup [--yes] [ROOT...]`.

A run that anybody still watches is left alone, and so is everything that is not a run in one of the folders. Processes of the studio's runs
are known by the run id in their environment, those of runs from a terminal by what run_meta.json tells of its ranks; never by their name.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sd_scripts.runs.process_trees import LAUNCH_ID, RUN_FOLDER, RUN_ID, carried, command_of, living, parent_of, ranks, tree, was_given
from sd_scripts.schema.files import given_path
from sd_scripts.schema.outside import object_in

from . import processes
from .runner import RUNNER
from .supervisor import JobSupervisor


@dataclass(frozen=True)
class Found:
    """The processes of one start of a run."""

    folder: Path | None
    """The run folder that they name; None when they name none."""
    members: tuple[psutil.Process, ...]
    is_orphan: bool
    reason: str
    """Why they are orphans, or why they are left alone."""


def look(roots: Iterable[Path]) -> list[Found]:
    """Everything on this machine that carries a run id or is a rank of a run, judged.

    roots: folders of runs, as the studio's --output_dir.
    """
    studios = [JobSupervisor(root) for root in roots]
    parents = {parent.resolve() for studio in studios for parent in studio.parents()}
    found = [_judged(run_id, members, parents) for run_id, members in sorted(processes.of_runs().items())]
    folders = sorted({folder for studio in studios for folder in studio.run_folders()})
    return found + [_judged_terminal(folder, members) for folder in folders if (members := _ranks_of_terminal(folder))]


def _ranks_of_terminal(folder: Path) -> list[psutil.Process]:
    """The ranks of a run of several processes that was started in a terminal of this machine, as far as they live."""
    noted = object_in(folder / "run_meta.json").get("ranks")
    here = [one for one in noted if isinstance(one, dict) and one.get("host") == platform.node()] if isinstance(noted, list) else []
    found = [(living(one["pid"]), one.get("born")) for one in here if isinstance(one.get("pid"), int)]
    return [one for one, born in found if one and processes.created(one) == born and carried(one, RUN_ID) is None]


def _judged_terminal(folder: Path, members: list[psutil.Process]) -> Found:
    scripts = {Path(word).name for process in members for word in command_of(process) if word.endswith(".py")}
    launchers = [living(parent_of(process)) for process in members]
    if any(launcher and was_given(launcher, script) for launcher in launchers for script in scripts):
        return Found(folder, tuple(members), False, "its launcher lives")
    launches = {carried(process, LAUNCH_ID) for process in members} - {None}
    if any(was_given(process, str(launch)) for launch in launches for process in psutil.process_iter()):
        return Found(folder, tuple(members), False, "its launcher was killed, and its guard is ending it")
    everything = {process.pid: process for member in members for process in tree(member.pid)}
    return Found(folder, tuple(everything.values()), True, "its launcher is gone")


def _judged(run_id: str, members: list[psutil.Process], parents: set[Path]) -> Found:
    named = {carried(process, RUN_FOLDER) for process in members} - {None}
    folder = Path(str(named.pop())) if len(named) == 1 else None
    found = tuple(members)
    if folder is None or folder.resolve().parent not in parents:
        return Found(folder, found, False, "not in these folders")
    noted = object_in(folder / "run.json").get("run_id")
    if not isinstance(noted, str):
        return Found(folder, found, False, "not a run (it has no run.json)")
    if _is_owned(folder, run_id, members):
        return Found(folder, found, False, "its launcher lives")
    if noted != run_id:
        return Found(folder, found, True, "left by an earlier start of this run")
    return Found(folder, found, True, "its launcher is gone")


def _is_owned(folder: Path, run_id: str, members: list[psutil.Process]) -> bool:
    """Whether the runner lives, or the launcher that it started, or one that has ranks."""
    pids = {process.pid for process in members}
    runners = {int(value) for value in (carried(process, RUNNER) for process in members) if value and value.isdigit()}
    noted = object_in(folder / "launcher.json")
    trains = ranks(members)
    above = {parent_of(process) for process in trains} & pids
    return bool(runners & pids or above or (noted.get("run_id") == run_id and noted.get("pid") in pids) or not (runners or trains))


def _lines(found: Found) -> list[str]:
    lines = [f"{found.folder or 'a run without a folder'}: {found.reason}"]
    for process in found.members:
        if living(process.pid) is not None:
            rank = carried(process, "RANK")
            began = processes.created(process)
            lines.append(f"  process {process.pid}" + (f", rank {rank}" if rank else "") + f", began {_clock(began)}")
    return lines


def _clock(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _counted(number: int) -> str:
    return f"{number} process" + ("" if number == 1 else "es")


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends the program: 0, or 1 when a process cannot be ended."""
    parser = argparse.ArgumentParser("python -m kohya_like.supervisor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("order", choices=["cleanup"])
    parser.add_argument("--yes", action="store_true", help="end them; without it they are only listed")
    parser.add_argument("root", nargs="*", type=given_path, default=[Path("output")], help="folders of runs (default: output)")
    asked = parser.parse_intermixed_args(arguments)
    asked.root = [root for root in asked.root if root is not None] or [Path("output")]
    absent = [str(root) for root in asked.root if not root.is_dir()]
    if absent:
        parser.error(f"there is no folder {', '.join(absent)}; give the studio's --output_dir")
    everything = look(asked.root)
    orphans = [found for found in everything if found.is_orphan]
    say = sys.stdout.write
    for found in everything:
        if not found.is_orphan:
            say("\n".join(["left alone: " + _lines(found)[0], *_lines(found)[1:]]) + "\n")
    for found in orphans:
        say("\n".join(["orphaned: " + _lines(found)[0], *_lines(found)[1:]]) + "\n")
    number = sum(len(found.members) for found in orphans)
    if not orphans:
        say("No orphaned process of a run in these folders.\n")
    elif not asked.yes:
        say(f"Nothing was ended. Add --yes to end {_counted(number)}.\n")
    else:
        left = processes.end([process for found in orphans for process in found.members])
        say(f"Ended: {_counted(number - len(left))}.\n")
        if left:
            say("These cannot be ended: " + ", ".join(str(process.pid) for process in left) + "\n")
            sys.exit(1)
