"""A folder of runs in which every tab of the studio has something to show: runs in each state, a transfer, a tool, a prediction."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kohya_like.inference import WorkerBackend
from kohya_like.predictions import ENDED, PredictionOrder, PredictionQueue
from kohya_like.supervisor import Job, JobSupervisor
from kohya_like.tools import FOLDER
from sd_scripts.families import RUNS
from sd_scripts.runs.events import RunFinished, RunStopped
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from tests.ui.runs_on_disk import evaluated, made, options, style_run
from tests.ui.standin_runs import SCRIPT, command, until
from tests.ui.test_evaluations_in_browser import transferred
from tests.ui.test_inference import STANDIN, image
from tests.ui.test_runs_in_browser import old_run
from tests.ui.test_tools import lora


def fill(root: Path, session: str) -> None:
    """Runs that have ended, each in its way, a tool that was run, and predictions of the browser of this session."""
    old_run(root, "broken", "failed", text="12 images cannot be read.")
    old_run(root, "no-memory", "died", console="torch.OutOfMemoryError: CUDA out of memory.\n")
    made(root, options(root, output_name="resumable"), (100, 200))
    styles = style_run(root, "styles")
    for epoch in range(3):
        evaluated(styles, epoch)
    transferred(styles)
    styles.log(RunStopped(step=30))
    shapes = RunDirectory.create(
        root,
        "shapes",
        flat.build(RUNS["ddpm", "scratch"], {"train_data_dir": "toy:shapes", "output_dir": str(root), "output_name": "shapes"}),
    )
    (shapes.path / "shapes.safetensors").write_bytes(b"no model")
    shapes.log(RunFinished(step=3, text="", advice=""))
    whole = old_run(root, "whole", "finished")
    path = lora(whole.path / "whole.safetensors")
    verified(root, path)
    predicted(root, session)


def verified(root: Path, path: Path, name: str = "20260101-120000-abcd-verify_lora", returncode: int = 0) -> Path:
    """A check of a file in the Tools tab, as the studio and the tool leave it, in its folder."""
    folder = root / FOLDER / name
    folder.mkdir(parents=True)
    order = {
        "tool": "verify_lora",
        "run_id": "e" * 32,
        "started": 1.7e9,
        "argv": ["python"],
        "texts": {"model": str(path)},
        "output": "",
        "of_run": "",
    }
    report = {"lines": [f"{path.name}: 1 layer", "no problems found"], "layers": [{"name": "a", "rank": 4}]}
    for file, content in (("tool.json", order), ("exit.json", {"run_id": "e" * 32, "returncode": returncode}), ("report.json", report)):
        (folder / file).write_text(json.dumps(content))
    return folder


def predicted(root: Path, session: str) -> None:
    """A prediction of two images from one."""
    queue = PredictionQueue(WorkerBackend([sys.executable, str(STANDIN)]), root)
    try:
        name, _ = queue.take_image(image())
        control = queue.upload(name)
        assert control is not None
        request = {"prompt": "make the sky red", "steps": 2, "variants": [{"label": "base"}, {"label": "whole"}]}
        ordered = queue.submit(PredictionOrder(request, (control,), {"texts": {"prompt": "make the sky red"}, "loras": []}), session)
        until(lambda: ordered.state in ENDED, seconds=60)
        assert ordered.state == "done", ordered.text
    finally:
        queue.close()


def under_way(root: Path) -> tuple[JobSupervisor, Job]:
    """A run that is at work and does not hear that it is to stop."""
    supervisor = JobSupervisor(root, command("stubborn"))
    return supervisor, supervisor.start(SCRIPT, options(root, output_name="under-way", sample_prompts="a star"))
