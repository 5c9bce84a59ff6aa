"""What the trainer costs beside a bare torch loop over the same model, adapter, optimizer and batches; and how long a step waits for data.

Blocks of both kinds of steps alternate in one process, so that a busy machine slows both.

usage: training.py [blocks, default 12] [batch, default 8]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from report import median, report

from sd_scripts.library.session import Session
from sd_scripts.library.stopping import StopRequest
from sd_scripts.schema.flat import parse_cli
from sd_scripts.schema.runs import SdxlNetwork

STEPS_A_BLOCK = 5


def session(folder: Path, batch: int, steps: int) -> Session:
    """A start of a run on the toy model, with warm caches from here on."""
    arguments = (
        f"--pretrained_model_name_or_path toy --train_data_dir toy:star --output_dir {folder} --resolution 64 --min_bucket_reso 32".split()
    )
    arguments += f"--bucket_reso_steps 16 --train_batch_size {batch} --max_train_steps {steps} --no_save_state_on_train_end".split()
    return Session(parse_cli(SdxlNetwork, arguments), StopRequest(None))


class BareLoop:
    """Noise, forward, loss, backward, clip, step: what any loop must do, and nothing else."""

    def __init__(self, trainer, batches) -> None:  # type: ignore[no-untyped-def]
        self.unet = trainer.parts.backbone
        self.weights = list(trainer.weights.values())
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-6, fused=True)
        self.batches = batches
        self.abar = trainer.parts.path.alphas_cumprod.float()

    def step(self, number: int) -> None:
        x0, text, pooled, sizes = self.batches[number % len(self.batches)]
        noise, k = torch.randn_like(x0), torch.randint(1000, (len(x0),))
        a, s = self.abar[k].sqrt().view(-1, 1, 1, 1), (1 - self.abar[k]).sqrt().view(-1, 1, 1, 1)
        conditions = {"text_embeds": pooled, "time_ids": sizes}
        out = self.unet(a * x0 + s * noise, k, encoder_hidden_states=text, added_cond_kwargs=conditions, return_dict=False)[0]
        torch.nn.functional.mse_loss(out, a * noise - s * x0).backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(blocks: int, batch: int) -> None:
    """Alternates blocks of both loops and reports the ratio of their medians."""
    with tempfile.TemporaryDirectory() as name:
        start = session(Path(name), batch, 10_000)
        start.plan = start._scan()
        start.total_steps = 10_000
        prompts, began = start._prompts(), start._begin()
        parts = start._load()
        data = start._prepare(parts)
        network = start._attach(parts)
        from sd_scripts.library.optim import make_optimizer

        groups = network.parameter_groups(start.options.network, 1e-6)
        trainer = start._make_trainer(parts, network, data, make_optimizer(start.options.optimizer, groups), prompts, began)
        ready = []
        for step in range(40):
            made = data.micro_batch(step, 0, 0)
            stacked = [torch.stack([condition[key] for condition in made.conditions]) for key in ("prompt_embeds", "pooled", "time_ids")]
            ready.append((made.x0, *[tensor.float() for tensor in stacked]))
        bare = BareLoop(trainer, ready)
        ours, theirs, waits = [], [], []
        for number in range(blocks + 1):
            for which in (ours, theirs) if number % 2 else (theirs, ours):
                first = number * STEPS_A_BLOCK
                began_at = time.perf_counter()
                for step in range(first, first + STEPS_A_BLOCK):
                    if which is ours:
                        log = trainer.train_step(step % 40)
                        waits.append(log.seconds["data_fetch"] / log.seconds["total"])
                    else:
                        bare.step(step % 40)
                which.append((time.perf_counter() - began_at) / STEPS_A_BLOCK)
        start.close()
    ratios = [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)]
    report(
        "training",
        "trainer at most 1.03 of a bare loop, data wait under 0.01 of a step",
        ratio_of_medians=median(ours[1:]) / median(theirs[1:]),
        median_of_ratios=median(ratios),
        trainer_step_seconds=median(ours[1:]),
        bare_step_seconds=median(theirs[1:]),
        data_wait_fraction=median(waits[STEPS_A_BLOCK:]),
        batch=batch,
        blocks=blocks,
    )


if __name__ == "__main__":
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 12, int(sys.argv[2]) if len(sys.argv) > 2 else 8)
