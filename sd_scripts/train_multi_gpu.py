"""Start a training script in several processes that find each other through a file; start them again when one dies.

    python train_multi_gpu.py --num_processes 2 flux_train_network.py --config_file my.toml
    python train_multi_gpu.py --command --max_restarts 3 accelerate launch --multi_gpu --num_processes 2 my_script.py

Any script that uses torch.distributed will do: it gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, and the file in
KOHYA_LIKE_INIT_FILE. Nothing listens on a network port for that. Ctrl-C, or SIGTERM, lets the processes finish their step and save; a
second one ends them. When one fails, the others get a grace period and are ended, and the exit code is that of the first that failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    from sd_scripts.runs.launcher import GRACE_SECONDS, Launcher, LaunchOrder

    parser = argparse.ArgumentParser("train_multi_gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--num_processes", type=int, help="processes to start, one for each GPU")
    what.add_argument("--command", action="store_true", help="what follows is the command of another launcher, started once")
    parser.add_argument("--max_restarts", type=int, default=0, help="when a process fails, start all again at most this often")
    parser.add_argument(
        "--restart_with", default="", help="arguments added from the second start on, in one word: --restart_with='--resume auto'"
    )
    parser.add_argument(
        "--grace", type=float, default=GRACE_SECONDS, help="seconds for the others to end by themselves when one has failed (%(default)s)"
    )
    parser.add_argument("script", help="Python script to train with; with --command the program of the launcher")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    asked = parser.parse_args(arguments)
    problems = []
    if asked.num_processes is not None and asked.num_processes < 1:
        problems.append(f"--num_processes is {asked.num_processes}; give 1 or more")
    if asked.num_processes is not None and not Path(asked.script).is_file():
        problems.append(f"there is no script {asked.script}; give the path of a Python file")
    if asked.max_restarts < 0:
        problems.append(f"--max_restarts is {asked.max_restarts}; give 0 or more")
    if asked.grace < 0:
        problems.append(f"--grace is {asked.grace:g} seconds; give 0 or more")
    if problems:
        parser.error("; ".join(problems))
    order = LaunchOrder(
        command=(asked.script, *asked.arguments),
        num_processes=asked.num_processes,
        max_restarts=asked.max_restarts,
        restart_with=tuple(shlex.split(asked.restart_with)),
        grace_seconds=asked.grace,
    )
    return Launcher(order).run()


if __name__ == "__main__":
    # Python puts the folder of this file first on the path; the package is one level above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(main(sys.argv[1:]))
