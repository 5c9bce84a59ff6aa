"""A process that writes the events of a training and trains nothing: what the supervisor and the page are tried on.

`standin_trainer.py RUN_FOLDER BEHAVIOUR`: see the table at the end. Rank 0 of several writes the log.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

from sd_scripts.runs.events import (
    Cached,
    FileSaved,
    PhaseBegun,
    Previewed,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    Validated,
)
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.rundir import RunDirectory

STEPS = 400


def train(run: RunDirectory, steps: int = STEPS, seconds: float = 0.02, obey: bool = True, images: bool = False) -> None:
    """Logs steps until the end, or until the stop file when it obeys."""
    first = int(os.environ.get("RANK", "0")) == 0
    before = done(run)
    if first:
        run.log(PhaseBegun(name="cache", seconds=0.1))
        run.log(Cached(what="latents", done=8, total=8))
        run.log(RunStarted(steps=steps, start_step=before, epochs=1, images=8, batch=1, seed=1, pid=os.getpid(), script="standin"))
        run.log(PhaseBegun(name="train", seconds=0.2))
    for step in range(before + 1, steps + 1):
        time.sleep(seconds)
        if first:
            loss = 1.0 / step + 0.1 + 0.02 * (step % 3)
            here = step - before
            session = {"seconds_per_step": seconds, "step_in_session": here, "trained_seconds": here * seconds, "paused_seconds": 0.0}
            ahead = {"eta_seconds": (steps - step) * seconds, "peak_gib": 0.5}
            run.log(StepDone(step=step, epoch=0, loss=loss, lr=1e-4, step_total=seconds, **session, **ahead))
            sys.stderr.write(f"\rtrain: {step}/{steps}")
            sys.stderr.flush()
            if images and step % 50 == 0:
                draw(run, step)
        if obey and run.stop_requested():
            if first:
                (run.path / "progress").write_text(str(step))
                (run.state / f"{step:06d}").mkdir(parents=True, exist_ok=True)
                run.log(FileSaved(step=step, what="state", file=f"state/{step:06d}"))
                run.log(RunStopped(step=step, text="stopped as asked", advice=""))
            return
    if first:
        run.log(RunFinished(step=steps, text="", advice=""))


def done(run: RunDirectory) -> int:
    """Steps of an earlier start."""
    return int((run.path / "progress").read_text()) if (run.path / "progress").exists() else 0


def draw(run: RunDirectory, step: int) -> None:
    """Two previews of a step, as plain colours."""
    from PIL import Image

    run.samples.mkdir(exist_ok=True)
    for index in range(2):
        name = f"{run.name}-{step:06d}-{index:02d}.png"
        Image.new("RGB", (96, 64), (step % 256, 90 + 80 * index, 160)).save(run.samples / name)
        run.log(Previewed(step=step, index=index, file=f"samples/{name}", prompt=f"a plain colour {index}", seed=index))


def die(run: RunDirectory) -> None:
    run.log(RunStarted(steps=10, start_step=0, pid=os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def fail(run: RunDirectory) -> None:
    run.log(RunStarted(steps=10, start_step=0, pid=os.getpid()))
    run.log(RunFailed(step=0, text="12 images cannot be read.", advice="Replace them."))
    sys.exit(1)


def tried(run: RunDirectory) -> None:
    """A member of a sweep: its held-out loss is the lower the nearer its learning rate is to 1e-3, and falls; a rate of 9 breaks it."""
    said = tomllib.loads(run.config.read_text(encoding="utf-8"))
    rate, steps = said["optimizer"]["learning_rate"], said["training"]["max_train_steps"]
    every = said["dataset"].get("validate_every_n_steps")
    before = done(run)
    run.log(RunStarted(steps=steps, start_step=before, pid=os.getpid()))
    if rate == 9:
        run.log(RunFailed(step=before, text="The loss is not a number.", advice=""))
        sys.exit(1)
    for step in range(before + 1, steps + 1):
        run.log(StepDone(step=step, epoch=0, loss=0.5, lr=rate, step_total=0.01, step_in_session=step - before))
        stop = run.orders.stop_step() == step
        if (every and step % every == 0) or (step == steps and every is None):
            losses = [[0.1 * each, abs(math.log10(rate) + 3) + each / 100 + 1 / step] for each in range(8)]
            run.log(Validated(step=step, loss=sum(loss for _, loss in losses) / 8, samples=losses))
        if stop and step < steps:
            run.orders.take_back(Asked.STOP)
            (run.path / "progress").write_text(str(step))
            (run.state / f"{step:06d}").mkdir(parents=True)
            run.log(RunStopped(step=step, text="stopped as asked", advice=""))
            return
    run.log(RunFinished(step=steps, text="", advice=""))


BEHAVIOURS = {
    "train": train,
    "quick": lambda run: train(run, steps=5),
    "rest": lambda run: train(run, steps=done(run) + 5),
    "slow": lambda run: train(run, steps=3000, seconds=0.1, images=True),
    "stubborn": lambda run: train(run, steps=100_000, seconds=0.1, obey=False),
    "endless": lambda run: train(run, steps=100_000, seconds=0.1),
    "deaf": lambda run: train(run, steps=100_000, obey=False),
    "raise": lambda run: (run.log(RunStarted(steps=9, start_step=0)), sys.exit("torch.OutOfMemoryError: CUDA out of memory.")),
    "die": die,
    "fail": fail,
    "tried": tried,
}

if __name__ == "__main__":
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    BEHAVIOURS[sys.argv[2]](RunDirectory(Path(sys.argv[1])))
