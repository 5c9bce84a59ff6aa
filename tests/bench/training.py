"""What the trainer costs beside a bare torch loop over the same model, adapter, optimizer and batches; and how long a step waits for data.

Blocks of both kinds of steps alternate in one process, so that a busy machine slows both.

usage: training.py [blocks, default 12] [batch, default 8] [kind, such as sdxl/network (default), sd/full, flux/network, ddpm/scratch]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from report import median, report

from sd_scripts.families import RUNS
from sd_scripts.library.train.assemble import assemble
from sd_scripts.library.train.load import load
from sd_scripts.library.train.prepare import prepare
from sd_scripts.library.train.process import Process
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema import command_line

STEPS_A_BLOCK = 5


def asked_for(folder: Path, batch: int, steps: int, kind: tuple[str, str]) -> command_line.Invocation:
    """A start of a run on the toy model, or on a new one of middle size in pixels, with warm caches from here on."""
    model = "--resolution 64 --pretrained_model_name_or_path toy"
    if kind[1] == "scratch":
        model = "--resolution 32 --base_channels 48 --channel_multipliers 1,2 --attention_levels 1 --attention_head_dim 16 --no_use_ema"
    arguments = f"{model} --train_data_dir toy:star --output_dir {folder} --min_bucket_reso 32".split()
    arguments += f"--bucket_reso_steps 16 --train_batch_size {batch} --max_train_steps {steps} --no_save_state_on_train_end".split()
    return command_line.parse_cli(RUNS[kind], arguments)


class BareLoop:
    """Noise, forward, loss, backward, clip, step: what any loop must do, and nothing else."""

    def __init__(self, trainer, batches) -> None:  # type: ignore[no-untyped-def]
        self.backbone = trainer.learner.model.parts.backbone
        self.weights = list(trainer.learner.weights.values())
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-6, fused=True)
        self.batches = batches
        self.path = trainer.learner.model.parts.path
        self.encoder = trainer.learner.model.parts.text_encoders["te1"]
        self.forward = self.flow if trainer.learner.model.parts.kind == "velocity" else self.noised
        if "ids" in batches[0][1]:
            self.forward = self.read_and_noised

    def noised(self, x0: torch.Tensor, texts: dict[str, torch.Tensor]) -> torch.Tensor:
        """v-prediction on a noise schedule, SD and SDXL."""
        abar = self.path.alphas_cumprod.float()
        noise, k = torch.randn_like(x0), torch.randint(1000, (len(x0),))
        a, s = abar[k].sqrt().view(-1, 1, 1, 1), (1 - abar[k]).sqrt().view(-1, 1, 1, 1)
        added = {"text_embeds": texts["pooled"], "time_ids": texts["time_ids"]} if "pooled" in texts else None
        out = self.backbone(
            a * x0 + s * noise, k, encoder_hidden_states=texts["prompt_embeds"], added_cond_kwargs=added, return_dict=False
        )[0]
        return torch.nn.functional.mse_loss(out, a * noise - s * x0)

    def read_and_noised(self, x0: torch.Tensor, texts: dict[str, torch.Tensor]) -> torch.Tensor:
        """v-prediction of a U-Net that is trained together with its encoder of captions."""
        mask = texts["mask"]
        states = self.encoder(texts["ids"], mask) * mask[:, :, None]
        abar = self.path.alphas_cumprod.float()
        noise, k = torch.randn_like(x0), torch.randint(1000, (len(x0),))
        a, s = abar[k].sqrt().view(-1, 1, 1, 1), (1 - abar[k]).sqrt().view(-1, 1, 1, 1)
        out = self.backbone(
            a * x0 + s * noise,
            k,
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            class_labels=states.sum(1) / mask.sum(1, keepdim=True),
            return_dict=False,
        )[0]
        weight = (abar / (1 - abar)).clamp(max=5.0)[k] * (1 - abar[k])
        return (weight * (out - (a * noise - s * x0)).square().mean((1, 2, 3))).mean()

    def flow(self, x0: torch.Tensor, texts: dict[str, torch.Tensor]) -> torch.Tensor:
        """The velocity of FLUX, on packed latents."""
        batch, channels, height, width = x0.shape
        noise, t = torch.randn_like(x0), torch.rand(len(x0))
        x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * noise

        def packed(x: torch.Tensor) -> torch.Tensor:
            return x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)

        rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
        ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()
        guidance = torch.ones_like(t) if self.backbone.config.guidance_embeds else None
        out = self.backbone(
            hidden_states=packed(x_t),
            timestep=t,
            guidance=guidance,
            pooled_projections=texts["pooled"],
            encoder_hidden_states=texts["t5"],
            txt_ids=torch.zeros(texts["t5"].shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )[0]
        return torch.nn.functional.mse_loss(out, packed(noise - x0))

    def step(self, number: int) -> None:
        self.forward(*self.batches[number % len(self.batches)]).backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def tokens_of(parts, captions: list[str]) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """What an encoder that is trained reads."""
    encoded = parts.tokenizers["te1"].encode_batch(captions)
    return {
        "ids": torch.tensor([one.ids for one in encoded]),
        "mask": torch.tensor([one.attention_mask for one in encoded], dtype=torch.bool),
    }


def measure(blocks: int, batch: int, kind: tuple[str, str]) -> None:
    """Alternates blocks of both loops and reports the ratio of their medians."""
    with tempfile.TemporaryDirectory() as name:
        asked = asked_for(Path(name), batch, 10_000, kind)
        process = Process.begin(asked, StopRequest(None))
        loaded = load(prepare(process, asked))
        parts, data, trainer = loaded.parts, loaded.data, assemble(loaded)
        ready = []
        for step in range(40):
            made = data.micro_batch(step, 0, 0)
            texts = {key: torch.stack([condition[key] for condition in made.conditions]).float() for key in made.conditions[0]}
            ready.append((made.x0, texts or tokens_of(parts, made.captions)))
        bare = BareLoop(trainer, ready)
        ours, theirs, waits = [], [], []
        for number in range(blocks + 1):
            for which in (ours, theirs) if number % 2 else (theirs, ours):
                first = number * STEPS_A_BLOCK
                began_at = time.perf_counter()
                for step in range(first, first + STEPS_A_BLOCK):
                    if which is ours:
                        log = trainer.steps.step(step % 40)
                        waits.append(log.seconds["data_fetch"] / log.seconds["step_total"])
                    else:
                        bare.step(step % 40)
                which.append((time.perf_counter() - began_at) / STEPS_A_BLOCK)
        process.close()
    ratios = [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)]
    report(
        "training",
        "trainer at most 1.03 of a bare loop, data wait under 0.01 of a step",
        ratio_of_medians=median(ours[1:]) / median(theirs[1:]),
        median_of_ratios=median(ratios),
        trainer_step_seconds=median(ours[1:]),
        bare_step_seconds=median(theirs[1:]),
        data_wait_fraction=median(waits[STEPS_A_BLOCK:]),
        kind="/".join(kind),
        batch=batch,
        blocks=blocks,
    )


if __name__ == "__main__":
    chosen = (sys.argv[3] if len(sys.argv) > 3 else "sdxl/network").split("/")
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 12, int(sys.argv[2]) if len(sys.argv) > 2 else 8, (chosen[0], chosen[1]))
