"""The loop itself, on a tiny SDXL with batches made up on the spot: real family, network, objective, optimizer and checkpointer."""

from __future__ import annotations

import io
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from sd_scripts.families import RUNS, family
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.core.errors import NonFiniteLoss
from sd_scripts.library.core.protocols import Batch, Geometry, Losses
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.memory.oom_advice import is_out_of_memory
from sd_scripts.library.objectives import make as objectives
from sd_scripts.library.render.renderer import Renderer
from sd_scripts.library.render.sample import OTHERS, Previews
from sd_scripts.library.train.checkpoint import Checkpointer, Identity, read_state
from sd_scripts.library.train.conditioned import TrainedModel
from sd_scripts.library.train.epochs import EpochTable
from sd_scripts.library.train.fallbacks import Steps
from sd_scripts.library.train.learner import Learner
from sd_scripts.library.train.meter import StepLog
from sd_scripts.library.train.optim import make_optimizer
from sd_scripts.library.train.process import Process
from sd_scripts.library.train.profiling import StepProfiler
from sd_scripts.library.train.timetable import Timetable
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.runs.events import RunStarted, Validated, lines_of, read
from sd_scripts.runs.orders import Asked
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import UNetNetworkOptions
from sd_scripts.schema.objective import ObjectiveOptions
from sd_scripts.schema.optimizer import OptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.prompts import Defaults, PromptSpec, read_prompts
from sd_scripts.schema.training import TrainingOptions

SDXL = family("sdxl")
SQUARE = Geometry((64, 64), (0, 0), (64, 64))


@cache
def text_of(caption: str) -> dict[str, torch.Tensor]:
    """What frozen encoders make of a caption."""
    with torch.no_grad():
        return SDXL.encode_prompts(SDXL.tiny(), [caption])[0]


class MadeUp:
    """Batches that follow from their sample numbers, as those of the pipeline do."""

    def __init__(
        self, parts: Any, batch: int, accumulation: int, trained_encoders: tuple[str, ...] = (), spoiled: int | None = None
    ) -> None:
        self.parts, self.batch, self.accumulation, self.trained_encoders, self.spoiled = (
            parts,
            batch,
            accumulation,
            trained_encoders,
            spoiled,
        )

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch:
        first = (step * self.accumulation + micro) * self.batch
        numbers = list(range(first, first + self.batch))
        x0 = torch.stack([torch.randn(4, 8, 8, generator=rng_for(1, number, "made up")) for number in numbers])
        if self.spoiled in numbers:
            x0[numbers.index(self.spoiled)] = math.nan
        captions = [f"caption {number % 5}" for number in numbers]
        texts = [{} if self.trained_encoders else text_of(caption) for caption in captions]
        return Batch(
            x0=x0,
            conditions=[{**text, **SDXL.size_condition(SQUARE)} for text in texts],
            numbers=torch.tensor(numbers),
            weights=torch.ones(self.batch),
            names=[f"{number}.png" for number in numbers],
            captions=captions,
        )

    def validation_batches(self) -> list[Callable[[], Batch]]:
        return [lambda: self.micro_batch(0, 0, 0), lambda: self.micro_batch(1, 0, 0)]


def make(folder: Path, *, batch: int = 2, accumulation: int = 1, steps: int = 6, **options: Any) -> Trainer:
    """A trainer over made-up batches; further options go to the section that has them."""

    def section(kind: Any, **fixed: Any) -> Any:
        return kind(**fixed, **{name: value for name, value in options.items() if name in kind.model_fields})

    folder.mkdir(parents=True, exist_ok=True)
    parts, run = SDXL.tiny(), RunDirectory(folder)
    network_options = section(UNetNetworkOptions, network_dim=2)
    network = attach(parts, network_options, SDXL.adapter_targets(parts, False), seed=5)
    optimizer_options = OptimizerOptions(
        learning_rate=options.get("learning_rate", 1e-2), optimizer_type=options.get("optimizer_type", "AdamW")
    )
    output = section(AdapterOutputOptions)
    data = MadeUp(parts, batch, accumulation, network_options.train_text_encoder, options.get("spoiled"))
    group = batch * accumulation
    exported: list[int] = []
    learner = Learner(
        TrainedModel(family=SDXL, parts=parts, network=network, data=data),
        objectives.make(section(ObjectiveOptions), parts.path, parts.kind),
        make_optimizer(optimizer_options, network.parameter_groups(network_options, optimizer_options.learning_rate)),
        section(TrainingOptions, gradient_accumulation_steps=accumulation),
        Timetable(
            total_steps=steps,
            epochs_done=lambda step: step // 4,
            learning_rate_at=lambda step: 1.0,
            sample_due=lambda step: False,
            samples_with_saves=True,
            validation_due=lambda step: step % 3 == 0 and "validates" in options,
            validates_with_saves=False,
            global_batch=group,
            max_grad_norm=options.get("max_grad_norm", 1.0),
            state_on_train_end=output.save_state_on_train_end,
            names_of=lambda step: [f"{number}.png" for number in range(step * group, (step + 1) * group)],
        ),
        Process(Accelerator(cpu=True), StopRequest(run), run),
    )
    trainer = Trainer(
        Steps(learner),
        checkpointer=Checkpointer(run, output, Identity("s", "d", 1), lambda step: step // 4, steps),
        export=lambda path, step: exported.append(step) or path.write_bytes(b"exported"),  # type: ignore[func-returns-value]
        samples=None,
        observers=[
            StepProfiler(run, options.get("profile", 0), torch.device("cpu")),
            EpochTable(learner, run.epochs),
        ],
    )
    trainer.exported = exported  # type: ignore[attr-defined]
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.learner.weights.values()])


def test_accumulation_is_the_larger_batch(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"{b}", batch=b, accumulation=4 // b, optimizer_type="SGD", learning_rate=1.0) for b in (1, 2, 4)]
    start = weights(runs[0])
    for trainer in runs:
        assert trainer.fit()
    assert float((weights(runs[2]) - start).abs().max()) > 1e-4
    for trainer in runs[:2]:
        torch.testing.assert_close(weights(trainer), weights(runs[2]), rtol=0, atol=1e-6)


def test_a_step_follows_the_gradient_of_the_mean_over_the_global_batch(tmp_path: Path) -> None:
    trainer = make(tmp_path, batch=2, accumulation=2, optimizer_type="SGD", learning_rate=0.5, max_grad_norm=0.0)
    before = {name: weight.detach().clone() for name, weight in trainer.learner.weights.items()}
    log = trainer.steps.step(0)
    moved = {name: (weight.detach() - before[name]).clone() for name, weight in trainer.learner.weights.items()}
    with torch.no_grad():
        for name, weight in trainer.learner.weights.items():
            weight.copy_(before[name])
    batches = [trainer.learner.model.data.micro_batch(0, micro, 0) for micro in (0, 1)]
    whole = replace(
        batches[0],
        x0=torch.cat([b.x0 for b in batches]),
        conditions=[condition for b in batches for condition in b.conditions],
        numbers=torch.cat([b.numbers for b in batches]),
        weights=torch.ones(4),
    )
    loss = trainer.learner.objective(trainer.learner.model.denoiser(whole), whole, trainer.learner.options.seed).loss.mean()
    gradients = torch.autograd.grad(loss, list(trainer.learner.weights.values()), allow_unused=True)
    assert log.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None))
    assert log.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, gradient in zip(trainer.learner.weights, gradients):
        torch.testing.assert_close(
            moved[name], torch.zeros_like(moved[name]) if gradient is None else -0.5 * gradient, rtol=1e-3, atol=1e-6
        )


def test_clipping_shortens_the_step_to_the_limit(tmp_path: Path) -> None:
    trainer = make(tmp_path, optimizer_type="SGD", learning_rate=1.0, max_grad_norm=1e-3)
    before = weights(trainer)
    assert trainer.steps.step(0).grad_norm > 1e-3
    assert float((weights(trainer) - before).norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", *(pytest.param(name, marks=pytest.mark.long) for name in ("Lion", "SGD"))])
def test_a_run_in_two_parts_is_the_run_in_one(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer_type": name, "network_dropout": 0.2, "use_ema": True, "save_state_every_n_steps": 1}
    options |= {"save_last_n_states": 99, "steps": 5}
    whole = make(tmp_path / "whole", **options)
    whole.fit()
    stop = random.randint(1, 4)
    part = make(tmp_path / "part", **options)
    torch.manual_seed(random.getrandbits(30))
    part.load_state_dict(read_state(tmp_path / "whole" / "state" / f"{stop:06d}")[0])
    assert part.step == stop
    part.fit()
    assert torch.equal(weights(part), weights(whole))
    assert whole.learner.average is not None and part.learner.average is not None
    for name_, average in whole.learner.average.state_dict().items():
        assert torch.equal(part.learner.average.state_dict()[name_], average)


def test_an_image_that_spoils_the_loss_is_named_and_the_weights_stay(tmp_path: Path) -> None:
    trainer = make(tmp_path, spoiled=5)
    with pytest.raises(NonFiniteLoss, match=r"step 2: the loss is not .* 4\.png, 5\.png"):
        trainer.fit()
    assert trainer.step == 2
    groups, _ = read_state(tmp_path / "state" / "000002")
    assert all(torch.equal(groups["weights"][name], weight) for name, weight in trainer.learner.weights.items())
    assert torch.isfinite(weights(trainer)).all()


def test_a_request_to_stop_finishes_the_step_and_saves(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=50)
    RunDirectory(tmp_path).request_stop()
    assert trainer.fit() is False
    assert 1 <= trainer.step < 50
    assert read_state(tmp_path / "state" / f"{trainer.step:06d}")[0]["loop"]["step"] == trainer.step


def test_files_states_and_points_come_when_they_are_due(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=7, save_every_n_steps=3, log_every_n_steps=2, validates=True)
    assert trainer.fit()
    assert trainer.exported == [3, 6, 7]  # type: ignore[attr-defined]
    events = RunDirectory(tmp_path).events()[0]
    points = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in points] == [2, 4, 6, 7]
    assert [event["epoch"] for event in points] == [0, 0, 1, 1]
    for event in points:
        assert event["step_total"] >= event["data_fetch"] + event["fwd_bwd"] + event["opt_step"] - 0.002
        assert event["lr"] == 1e-2 and event["images_per_second"] > 0 and event["peak_gib"] > 0
    assert points[-1]["eta_seconds"] == 0
    validation = [event for event in events if event["kind"] == "validation"]
    assert [event["step"] for event in validation] == [3, 6]


def test_a_resumed_run_measures_its_own_steps_and_adds_up_its_sessions(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for steps, done in ((4, 4), (7, 3)):
        trainer = make(tmp_path, steps=steps, save_every_n_steps=3, save_state=True)
        if steps == 7:
            trainer.load_state_dict(read_state(tmp_path / "state" / "000004")[0])
        run.log(RunStarted(steps=steps))
        assert trainer.fit()
        *_, last = (event for event in run.events()[0] if event["kind"] == "step")
        session = run.events()[0][-1]
        assert session["kind"] == "session" and session["step"] == last["step"] == steps
        assert session["step_in_session"] == last["step_in_session"] == done
        assert session["trained_seconds"] == last["trained_seconds"] > 0 < session["save_seconds"] <= session["paused_seconds"]
    assert (session["sessions"], session["total_steps_done"]) == (2, 7)
    first = next(event for event in run.events()[0] if event["kind"] == "session")
    for name in ("trained_seconds", "paused_seconds"):
        assert session[f"total_{name}"] == pytest.approx(first[name] + session[name], abs=0.002)


class Terminal(io.StringIO):
    """Standard error of somebody who watches."""

    def isatty(self) -> bool:
        return True


def test_the_bar_shows_the_loss_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert trainer.fit()
    steps = [event["loss"] for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "step"]
    assert f"loss={steps[-1]:.4f}" in terminal.getvalue()


def test_the_remaining_time_knows_the_pauses_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, steps=12, save_every_n_steps=5, save_state=True, validates=True)
    assert trainer._planned() == {"save": [5, 10, 12], "sample": [], "validate": [3, 6, 9, 12]}
    trainer.step = 9
    assert trainer._planned() == {"save": [10, 12], "sample": [], "validate": [12]}
    trainer.step = 0
    # A save takes 400 s, which only the clock notices.
    real, waited = time.perf_counter, []
    monkeypatch.setattr(time, "perf_counter", lambda: real() + 400.0 * len(waited))
    trainer.export = lambda path, step: waited.append(step)
    assert trainer.fit()
    points = {event["step"]: event for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "step"}
    # After the first save, two more are expected, and after the second one.
    assert points[6]["eta_seconds"] >= 800 and 400 <= points[11]["eta_seconds"] < points[6]["eta_seconds"]
    assert points[4]["eta_seconds"] < 400 and points[12]["eta_seconds"] == 0
    assert points[6]["paused_seconds"] >= 400 > points[4]["paused_seconds"]


def test_the_held_out_loss_is_the_same_for_the_same_weights(tmp_path: Path) -> None:
    trainer = make(tmp_path, learning_rate=0.0, validates=True)
    trainer.fit()
    told = [event for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "validation"]
    assert len(told) == 2 and told[0]["loss"] == told[1]["loss"] and told[0]["samples"] == told[1]["samples"]
    times, losses = zip(*told[0]["samples"], strict=True)
    assert len(losses) == 4 and sum(losses) / 4 == pytest.approx(told[0]["loss"], rel=1e-5)
    assert len(set(times)) > 1 and all(0 <= time <= 1 for time in times)
    spoiled = Validated(step=1, loss=1.0, samples=[[0.5, math.nan], [0.25, 2.0]])
    (read_again,) = read(lines_of(spoiled.line(0.0).encode()))
    assert isinstance(read_again, Validated) and read_again.samples == [[0.25, 2.0]]


def test_text_encoders_get_a_gradient_through_live_captions(tmp_path: Path) -> None:
    trainer = make(tmp_path, train_text_encoder=True, train_unet=False)
    before = weights(trainer)
    assert trainer.fit()
    assert float((weights(trainer) - before).abs().max()) > 0


def test_an_overflow_in_fp16_leaves_the_step_out_and_halves_the_scale(tmp_path: Path) -> None:
    trainer = make(tmp_path, mixed_precision="fp16")
    trainer.learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = weights(trainer)
    log = trainer.steps.step(0)
    assert log.overflowed and torch.equal(weights(trainer), before)
    assert trainer.learner.scaler.get_scale() == 2.0**126
    trainer.learner.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert not trainer.steps.step(1).overflowed and not torch.equal(weights(trainer), before)


def test_overflows_at_the_start_of_fp16_leave_steps_out_until_the_scale_fits(tmp_path: Path) -> None:
    trainer = make(tmp_path, mixed_precision="fp16", use_ema=True, steps=5)
    # 2^127 and 2^70 are too much, 2^13 is not.
    trainer.learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-57)
    assert trainer.learner.average is not None
    update, after_step = trainer.learner.average.update, trainer.learner.model.network.after_step
    averaged, told = [], []
    trainer.learner.average.update = lambda step: (averaged.append(step), update(step))[1]  # type: ignore[method-assign, func-returns-value]
    trainer.learner.model.network.after_step = lambda: (told.append(0), after_step())[1]  # type: ignore[method-assign]
    before = weights(trainer)
    assert trainer.fit() and torch.isfinite(weights(trainer)).all() and not torch.equal(weights(trainer), before)
    points = [event for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "step"]
    assert [point["scale"] for point in points] == [2.0**70, 2.0**13, 2.0**13, 2.0**13, 2.0**13]
    assert [point["overflowed"] for point in points] == [1, 1, 0, 0, 0]
    assert averaged == [2, 3, 4] and len(told) == 3
    assert [point["ema_decay"] for point in points] == pytest.approx([(1 + step) / (10 + step) for step in range(5)])


def test_fields_of_what_is_off_are_not_there(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=1)
    trainer.fit()
    (point,) = [event for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "step"]
    assert not {"scale", "overflowed", "ema_decay", "fwd_bwd_gpu"} & point.keys()


def test_the_sections_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=6, accumulation=2)
    trainer.fit()
    points = [event for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "step"][1:]
    shares = []
    for point in points:
        parts = sum(point[name] for name in ("data_fetch", "fwd_bwd", "opt_step"))
        assert parts <= point["step_total"] + 5e-5
        shares.append(parts / point["step_total"])
    # Of most steps: a busy machine may halt any of them between two sections.
    assert statistics.median(shares) >= 0.95


def test_each_line_has_the_mean_loss_of_the_steps_since_the_last_one(tmp_path: Path) -> None:
    """Also in the short windows before a stop, after a resume and at the end."""
    recorded: dict[int, float] = {}

    def recording(trainer: Trainer, stop_after: int) -> Trainer:
        train = trainer.steps.step

        def step_of(step: int) -> StepLog:
            log = train(step)
            recorded[step + 1] = log.loss
            return replace(log, stop=step + 1 == stop_after)

        trainer.steps.step = step_of  # type: ignore[method-assign]
        return trainer

    options = {"steps": 11, "log_every_n_steps": 3}
    assert not recording(make(tmp_path, **options), stop_after=5).fit()
    resumed = recording(make(tmp_path, **options), stop_after=0)
    resumed.load_state_dict(read_state(tmp_path / "state" / "000005")[0])
    assert resumed.fit()
    told = {event["step"]: event["loss"] for event in RunDirectory(tmp_path).events()[0] if event["kind"] == "step"}
    windows = {3: (1, 2, 3), 5: (4, 5), 6: (6,), 9: (7, 8, 9), 11: (10, 11)}
    assert told == {last: pytest.approx(sum(recorded[step] for step in steps) / len(steps), abs=1e-6) for last, steps in windows.items()}


def test_the_best_file_is_that_of_the_lowest_held_out_loss_and_a_resumed_run_knows_it(tmp_path: Path) -> None:
    options = {"validates": True, "save_best": True, "save_state_every_n_steps": 3, "save_last_n_states": 99, "use_ema": True}
    run, trainer = RunDirectory(tmp_path), make(tmp_path, steps=12, **options)
    measured = iter([3.0, 2.0, 2.5, 1.0])
    trainer.export = lambda path, step: path.write_text(str(step))  # type: ignore[func-returns-value, assignment, return-value]
    spoil_losses(trainer, measured)
    assert trainer.fit()
    bests = [(event["step"], event["loss"], event["file"]) for event in run.events()[0] if event.get("what") == "best"]
    assert bests == [(3, 3.0, "lora-best.safetensors"), (6, 2.0, "lora-best.safetensors"), (12, 1.0, "lora-best.safetensors")]
    assert trainer.best == (1.0, 12) and (tmp_path / "lora-best.safetensors").read_text() == "12"

    again = make(tmp_path, steps=12, **options)
    saved = read_state(tmp_path / "state" / "000009")[0]
    again.load_state_dict(saved)
    assert again.best == (2.0, 6)
    (tmp_path / "lora-best.safetensors").unlink()
    again.load_state_dict(saved)
    assert again.best is None, "in a folder without the file the next one is the best"
    (tmp_path / "lora-best.safetensors").write_bytes(b"x")
    del saved["loop"]["best"]
    again.load_state_dict(saved)
    assert again.best is None and again.step == 9, "a state of an earlier version"


def test_a_run_ends_when_its_held_out_loss_was_not_lower_for_long_and_can_go_on(tmp_path: Path) -> None:
    options = {"validates": True, "save_best": True, "early_stop_patience": 2}
    run, trainer = RunDirectory(tmp_path), make(tmp_path, steps=24, **options)
    trainer.export = lambda path, step: path.write_text(str(step))  # type: ignore[func-returns-value, assignment, return-value]
    # A loss that is no number is not lower.
    spoil_losses(trainer, iter([3.0, 2.0, 2.5, 1.5, math.nan, 1.5, 9.0]))
    assert not trainer.fit() and trainer.step == 18 and trainer.best == (1.5, 12)
    told = "2 held-out losses since step 12 not lower than its 1.5; lora-best.safetensors is of that step"
    assert trainer.ended_early == told
    assert any(told in event["text"] for event in run.events()[0] if event["kind"] == "warning")
    assert (tmp_path / "lora-best.safetensors").read_text() == "12" and not (tmp_path / "lora.safetensors").exists()

    again = make(tmp_path, steps=24, **options)
    again.load_state_dict(read_state(tmp_path / "state" / "000018")[0])
    assert (again.best, again.waited, again.step) == ((1.5, 12), 2, 18)
    again.export = trainer.export
    spoil_losses(again, iter([1.0, 1.2]))
    assert again.fit() and again.ended_early == "" and again.best == (1.0, 21)

    patient = make(tmp_path / "patient", steps=9, **{**options, "early_stop_patience": 3})
    spoil_losses(patient, iter([1.0, 2.0, 3.0]))
    assert patient.fit(), "two are not three, and the last step is the end"


def test_a_held_out_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=6, validates=True, save_best=True)
    spoil_losses(trainer, iter([math.nan, 5.0]))
    assert trainer.fit() and trainer.best == (5.0, 6)


def spoil_losses(trainer: Trainer, measured: Iterator[float]) -> None:
    """Gives these numbers as held-out losses, one for each validation."""
    objective, current = trainer.learner.objective, [0.0]

    def told(model: Any, batch: Batch, seed: int) -> Losses:
        if torch.is_grad_enabled():
            return objective(model, batch, seed)
        current[0] = next(measured) if batch.numbers[0] == 0 else current[0]
        return Losses(torch.full((len(batch.names),), current[0]))

    trainer.learner.objective = told


def test_a_broken_step_leaves_a_report_and_its_images(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", spoiled=9, accumulation=2, steps=6)
    fetch, shown = trainer.learner.model.data.micro_batch, {}
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(f"image {number}".encode())

    def named(step: int, micro: int, rank: int) -> Batch:
        batch = fetch(step, micro, rank)
        shown.update(zip(batch.numbers.tolist(), batch.x0))
        return replace(batch, names=[str(tmp_path / name) for name in batch.names])

    trainer.learner.model.data.micro_batch = named  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match="nonfinite-000002"):
        trainer.fit()
    folder = tmp_path / "run" / "nonfinite-000002"
    report = json.loads((folder / "report.json").read_text())
    assert (report["step"], report["loss"], report["process"], report["scale"], report["lr"]) == (2, "nan", 0, None, [1e-2])
    assert [sample["number"] for sample in report["samples"]] == [8, 9, 10, 11]
    for sample in report["samples"]:
        number, x0 = sample["number"], shown[sample["number"]]
        assert (folder / sample["image"]).read_bytes() == f"image {number}".encode()
        assert sample["caption"] == f"caption {number % 5}" and sample["weight"] == 1.0 and 0 <= sample["time"] <= 1
        if number == 9:
            assert sample["loss"] == "nan" and sample["x0"]["mean"] == "nan" and sample["x0"]["not_finite"] == x0.numel()
        else:
            assert 0 < sample["loss"] < 100 and sample["x0"]["not_finite"] == 0
            told = [sample["x0"][name] for name in ("mean", "std", "min", "max")]
            assert told == pytest.approx([float(x0.mean()), float(x0.std(correction=0)), float(x0.min()), float(x0.max())], abs=1e-6)


def test_when_memory_runs_out_the_last_good_state_is_saved(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=9)
    fetch = trainer.learner.model.data.micro_batch

    def greedy(step: int, micro: int, rank: int) -> Batch:
        return fetch(step, micro, rank) if step < 3 else replace(fetch(step, micro, rank), x0=torch.empty(2**48))

    trainer.learner.model.data.micro_batch = greedy  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        trainer.fit()
    assert is_out_of_memory(caught.value)
    groups, _ = read_state(tmp_path / "state" / "000003")
    assert all(torch.equal(groups["weights"][name], weight) for name, weight in trainer.learner.weights.items())


def test_a_state_of_another_network_is_refused(tmp_path: Path) -> None:
    small, other = make(tmp_path / "a"), make(tmp_path / "b", target_modules=("attn2",))
    with pytest.raises(ValueError, match=r"(?s)other weights .* missing, [1-9]\d* unexpected, 0 of another shape.*in the state") as caught:
        other.load_state_dict(small.state_dict())
    assert "lora_A" in str(caught.value) or "lora_down" in str(caught.value)
    state = small.state_dict()
    name = next(iter(state["weights"]))
    state["weights"][name] = state["weights"][name][:1]
    before = weights(small)
    with pytest.raises(ValueError, match="0 missing, 0 unexpected, 1 of another shape"):
        small.load_state_dict(state)
    assert torch.equal(weights(small), before)


def test_samples_that_somebody_asks_for_come_after_the_step_that_is_under_way(tmp_path: Path) -> None:
    class Noted:
        """Notes when it was asked to render."""

        steps: list[int] = []

        def render(self, step: int, missing_only: bool = False) -> None:
            self.steps.append(step)

    trainer, run = make(tmp_path, steps=4), RunDirectory(tmp_path)
    trainer.samples = Noted()
    run.request_evaluation()
    assert trainer.fit()
    assert Noted.steps == [1, 4], "once on request, and with the last file"
    assert not run.evaluation_requested()


def test_what_is_asked_while_it_trains_is_done_and_changes_nothing(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", steps=6)
    assert plain.fit()
    trainer, run = make(tmp_path / "asked", steps=6), RunDirectory(tmp_path / "asked")
    run.orders.ask(Asked.SAVE)
    seen = []

    class Watching:
        """Asks for a pause after step 3, and sees that nothing goes on until it is taken back."""

        kept = ""

        def begin(self, step: int) -> None: ...
        def before_step(self, step: int) -> None: ...
        def end(self, step: int) -> None: ...
        def after_step(self, step: int, log: Any) -> None:
            seen.append((step, log.asked))
            if step == 2:
                run.orders.ask(Asked.PAUSE)
                threading.Timer(0.6, lambda: (seen.append(("waits", trainer.step)), run.orders.take_back(Asked.PAUSE))).start()

    trainer.observers = (Watching(),)
    assert trainer.fit()
    assert seen == [
        (1, Asked.SAVE),
        (2, Asked.NOTHING),
        (3, Asked.PAUSE),
        ("waits", 3),
        *((step, Asked.NOTHING) for step in (4, 5, 6)),
    ]
    assert trainer.checkpointer.export_path(1).is_file() and run.orders.asked() == Asked.NOTHING
    states = [event["step"] for event in run.events()[0] if event["kind"] == "saved" and event["what"] == "state"]
    assert {1, 3} <= set(states), "it can go on from a save and from a pause"
    assert [event["name"] for event in run.events()[0] if event["kind"] == "phase"].count("pause") == 1
    assert torch.equal(weights(plain), weights(trainer))


def test_other_prompts_are_drawn_while_it_trains_and_change_nothing(tmp_path: Path) -> None:
    """Once, and from now on: the images are those of these prompts, and the weights those of a run that nobody disturbed."""

    def prompts(text: str) -> list[PromptSpec]:
        samples = options.samples.model_copy(update={"sample_prompts": text})
        return read_prompts(Defaults(samples, (64, 64), 8, 3))

    options = flat.build(RUNS["sdxl", "network"], {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": "x"})

    def written(text: str) -> str:
        return toml_files.to_toml(options.model_copy(update={"samples": options.samples.model_copy(update={"sample_prompts": text})}))

    plain = make(tmp_path / "plain", steps=6)
    assert plain.fit()
    trainer, run = make(tmp_path / "asked", steps=6), RunDirectory(tmp_path / "asked")
    run.config.write_text(written("a red cat --s 2"))
    renderer = Renderer(SDXL, trainer.learner.model.parts)
    trainer.samples = Previews(renderer, prompts("a red cat --s 2"), run, "x", read=prompts)

    class Asking:
        """Asks after steps 1 to 5."""

        kept = ""

        def begin(self, step: int) -> None: ...
        def before_step(self, step: int) -> None: ...
        def end(self, step: int) -> None: ...
        def after_step(self, step: int, log: Any) -> None:
            if step in (1, 5):
                run.orders.ask_other("a blue dog --s 2\na house --s 2 --d 9")
            elif step == 2:
                run.config.write_text(written("a green bird --s 2"))
                run.request_evaluation()
            elif step == 3:
                run.orders.ask_other("a dog --w 65")

    trainer.observers = (Asking(),)
    assert trainer.fit()
    drawn = [(event["step"], event["index"], event["prompt"]) for event in run.events()[0] if event["kind"] == "sample"]
    others = [(OTHERS, "a blue dog"), (OTHERS + 1, "a house")]
    assert drawn == [
        *((2, index, prompt) for index, prompt in others),
        (3, 0, "a green bird"),
        (6, 0, "a green bird"),
        *((6, index, prompt) for index, prompt in others),
    ]
    assert all((run.path / event["file"]).is_file() for event in run.events()[0] if event["kind"] == "sample")
    (warned,) = (event["text"] for event in run.events()[0] if event["kind"] == "warning")
    assert "step 4: the changed prompts were not taken" in warned and "65" in warned
    assert run.orders.asked() == Asked.NOTHING
    assert torch.equal(weights(plain), weights(trainer))


def test_it_ends_after_the_step_that_is_asked_and_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", steps=6)
    assert plain.fit()
    trainer, run = make(tmp_path / "asked", steps=6), RunDirectory(tmp_path / "asked")
    run.orders.stop_after(4)
    assert not trainer.fit() and trainer.step == 4 and run.orders.stop_step() is None
    again = make(tmp_path / "asked", steps=6)
    again.load_state_dict(read_state(run.state / "000004")[0])
    run.orders.ask(Asked.PAUSE)
    assert again.fit(), "a pause of a session before is none of this one"
    assert torch.equal(weights(plain), weights(again))
    with pytest.raises(OptionError, match="at least 1"):
        run.orders.stop_after(0)
    (run.path / "stop_at.request").write_text("soon")
    assert run.orders.asked(99) == Asked.NOTHING


def test_the_table_of_epochs_has_each_epoch_and_the_event_too(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=10)
    assert trainer.fit()
    steps, epochs = ([event for event in RunDirectory(tmp_path).events()[0] if event["kind"] == kind] for kind in ("step", "epoch"))
    header, *rows = (tmp_path / "epochs.csv").read_text().splitlines()
    assert header == "epoch,loss_total,lr,seconds,loss_unweighted" and [row.partition(",")[0] for row in rows] == ["1", "2", "3"]
    for number, event in enumerate(epochs):
        own = [step["loss"] for step in steps[4 * number : 4 * number + 4]]
        assert event["loss"] == pytest.approx(sum(own) / len(own)) and event["epoch"] == number + 1
        assert rows[number].split(",")[1] == repr(event["loss"])
