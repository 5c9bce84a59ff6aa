"""A sweep in a terminal: `python -m kohya_like.cli sweep SCRIPT --config_file FILE --vary learning_rate=1e-4,3e-4 ...`.

It goes on while this command runs, or a studio on the same output folder; either takes up what was left (--go_on NAME).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sd_scripts import programs
from sd_scripts.families import RUNS
from sd_scripts.runs.early_checks import check_early
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import given_path
from sd_scripts.schema.runs import RunOptions

from . import sweeps
from .supervisor import JobSupervisor

PERIOD_SECONDS = 1.0


def add_to(parse: argparse.ArgumentParser) -> None:
    """The words of the order."""
    parse.add_argument("script", nargs="?", help="the training script, as in the table of the README; its own options follow")
    parse.add_argument(
        "--vary", action="append", default=[], metavar="OPTION=VALUE,VALUE", help="values to try; give it again for another option"
    )
    parse.add_argument("--plan", action="store_true", help="say what would be tried, and stop")
    parse.add_argument("--go_on", metavar="NAME", help="go on with a sweep that was left")
    parse.add_argument("--end", metavar="NAME", help="end a sweep: nothing more is started, what is at work is stopped")
    parse.add_argument("--output_dir", type=given_path, help="folder of the runs (default: that of the settings, or output)")


def main(asked: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raises OptionError."""
    if asked.end or asked.go_on:
        folder = asked.output_dir or Path("output")
        kept = sweeps.Sweeps(JobSupervisor(folder))
        if asked.end:
            kept.end(asked.end)
            say(f"{asked.end} is ended.")
        else:
            _follow(kept, asked.go_on)
        return
    options = _options(asked, rest)
    sweep = sweeps.planned(options, sweeps.read_axes(type(options), _axes(asked.vary)))
    check_early(options)
    say(sweeps.described(sweep))
    if not asked.plan:
        kept = sweeps.Sweeps(JobSupervisor(Path(options.output.output_dir).expanduser()))
        _follow(kept, kept.begin(sweep).name)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options(asked: argparse.Namespace, rest: Sequence[str]) -> RunOptions:
    run = next((run for run in RUNS.values() if run.script == asked.script), None)
    if run is None:
        known = ", ".join(run.script for run in RUNS.values())
        raise OptionError(f"{asked.script or 'no script'}: name the script that trains, one of {known}")
    given = [*rest, *(["--output_dir", str(asked.output_dir)] if asked.output_dir else [])]
    return flat.with_absolute_paths(command_line.parse_cli(run, given, programs.of_config_file).options)


def _axes(given: Sequence[str]) -> dict[str, str]:
    wrong = [text for text in given if "=" not in text]
    if wrong:
        raise OptionError(f"--vary {wrong[0]}: write option=value,value")
    return dict(text.split("=", 1) for text in given)


def _follow(kept: sweeps.Sweeps, name: str) -> None:
    """Goes on with a sweep to its end, and says what happens."""
    told = -1
    say(f"{name}: Ctrl-C leaves it; what is at work goes on.")
    while True:
        kept.supervisor.jobs()
        progress, sweep = kept.advance(name), kept.read(name)
        if progress.rung != told:
            told = progress.rung
            left = sum(not one.out for one in progress.standings)
            say(f"{left} {'runs train' if left > 1 else 'run trains'} to step {sweep.rungs.steps[told]}.")
        if sweep.is_ended:
            break
        try:
            time.sleep(PERIOD_SECONDS)
        except KeyboardInterrupt:
            say(f"Left. To go on: --go_on {name}")
            return
    for one in progress.standings:
        losses = "  ".join(f"{loss:.5g}" for loss in one.losses)
        say(f"  {sweep.tried(one.member).words}: {losses or '-'}{f'  ({one.out})' if one.out else ''}  {one.member.run}")
    won = f"{sweep.tried(sweep.members[progress.winner]).words} wins. " if progress.winner else ""
    say(won + sweeps.verdict(sweep, progress, kept.jobs()))
