"""What a second process on the same machine costs: time of a step of two processes with a batch each, against one process with that batch.

Both sides run in turns, each for some seconds, so that a busy machine slows both; every process has one thread. With a free core for each
the quotient would be 1; what is above is waiting for the slower one, summing, and sharing memory and caches of one machine.

usage: scaling.py [turns, default 5] [steps a turn, default 20] [batch, default 4]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import median, report
from safetensors import safe_open

from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.runs.command import SCRIPTS, launch_command
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.flat import build

WARM_STEPS = 5


def step_seconds(folder: Path, processes: int, steps: int, batch: int, turn: int) -> list[float]:
    """Times of the steps of one start, without the first ones."""
    options = build(
        SdxlNetwork,
        {
            "pretrained_model_name_or_path": "toy",
            "train_data_dir": "toy:star",
            "resolution": 64,
            "min_bucket_reso": 32,
            "bucket_reso_steps": 16,
            "train_batch_size": batch,
            "max_train_steps": WARM_STEPS + steps,
            "sample_at_first": False,
            "output_dir": str(folder),
            "resume": "none",
            "cache_dir": str(folder / "cache"),
            "save_state": False,
            **({"multi_gpu": True, "num_gpus": processes, "launcher": "torchrun"} if processes > 1 else {}),
            "save_state_on_train_end": False,
        },
    )
    run = RunDirectory.create(folder, f"turn{turn}", options)
    command = launch_command(options, run.path)
    if processes == 1:
        command = [sys.executable, str(SCRIPTS / options.script), *command[command.index(str(SCRIPTS / options.script)) + 1 :]]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    times = [event["step_total"] for event in run.events()[0] if event["kind"] == "step"]
    return times[WARM_STEPS:]


def message_bytes(folder: Path) -> int:
    """Bytes that each process gives to a sum: its gradients in float32."""
    file = next(folder.glob("*/*.safetensors"))
    with safe_open(file, "pt") as opened:
        return sum(4 * opened.get_tensor(name).numel() for name in opened.keys() if not name.endswith("alpha"))  # noqa: SIM118


def main() -> None:
    turns, steps, batch = (int(word) for word in [*sys.argv[1:], *("5", "20", "4")[len(sys.argv) - 1 :]])
    quotients = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(turns):
            one = median(step_seconds(folder, 1, steps, batch, 2 * turn))
            two = median(step_seconds(folder, 2, steps, batch, 2 * turn + 1))
            quotients.append(two / one)
        report(
            "scaling",
            "-",
            step_of_two_by_one=median(quotients),
            least=min(quotients),
            most=max(quotients),
            samples_per_second_gained=2 / median(quotients),
            message_mib=message_bytes(folder) / 2**20,
            one_step_seconds=one,
        )


if __name__ == "__main__":
    main()
