"""Records a few steps with torch's profiler: a trace to look at, and a text of what took longest."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from sd_scripts.runs.events import Profiled, Warned
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.files import write_atomically, written_aside

from .meter import StepLog
from .observing import Observer

STEPS_BEFORE = 3
"""Steps of a session that are not recorded: kernels are chosen and compiled in them."""
ROWS = 50


class StepProfiler(Observer):
    """Records `num_steps` steps of this session after the third; 0 records none. Changes no number of the training."""

    def __init__(self, run: RunDirectory, num_steps: int, device: torch.device) -> None:
        self._run, self._num_steps, self._on_gpu = run, num_steps, device.type == "cuda"
        self._done = self._recorded = 0
        self._profile: profile | None = None

    def before_step(self, step: int) -> None:
        if self._num_steps and self._done == STEPS_BEFORE:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities, profile_memory=True)
            self._profile.start()

    def after_step(self, step: int, log: StepLog) -> None:
        self._done += 1
        if self._profile is not None:
            self._recorded += 1
            if self._recorded == self._num_steps:
                self.end(step)

    def end(self, step: int) -> None:
        """Ends the recording, at the end of a session too, and writes what there is."""
        if self._num_steps and not self._recorded:
            text = f"profile: this session ended before its step {STEPS_BEFORE + 1}, the first to be recorded"
            self._run.log(Warned(text=text))
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        if not self._recorded:
            return
        folder = self._run.path / "profile"
        trace, top = folder / f"trace-{step:06d}.json", folder / f"top-{step:06d}.txt"
        with written_aside(trace) as aside:
            recorded.export_chrome_trace(str(aside))
        averages = recorded.key_averages()
        orders = ["self_cpu_time_total", "self_cpu_memory_usage"]
        if self._on_gpu:
            orders = ["self_device_time_total", *orders, "self_device_memory_usage"]
        head = f"{self._recorded} steps up to step {step}, by"
        tables = [f"{head} {order}\n{averages.table(sort_by=order, row_limit=ROWS)}" for order in orders]
        write_atomically(top, "\n".join(tables))
        self._run.log(Profiled(step=step, steps=self._recorded, files=[f"profile/{path.name}" for path in (trace, top)]))
