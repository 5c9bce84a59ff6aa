"""Answers --estimate and --fit: the forecast of a run's memory as sentences and a table, or as lines of JSON for the page."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from sd_scripts import families
from sd_scripts.dataset.plan import Plan as DataPlan
from sd_scripts.families.common.made import CONFIGS as VAE_CONFIGS
from sd_scripts.library.core.devices import CPU
from sd_scripts.library.core.protocols import Beginning, ModelFamily, Parts
from sd_scripts.library.train.environment import with_global_batch
from sd_scripts.runs.command import shown
from sd_scripts.runs.events import ForecastChecked, Forecasted
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line
from sd_scripts.schema.prompts import PromptSpec
from sd_scripts.schema.runs import RunOptions

from .estimate import Forecaster
from .fitting import FitPlan, plan_for
from .structure import EVERYTHING, is_absent, settle
from .values import CARDS, GIB, Bucket, Forecast, Questions, Size

log = logging.getLogger("sd_scripts")


def for_estimate(asked: command_line.Invocation) -> command_line.Invocation:
    """The same invocation, of one process that opens no run folder and forecasts for a GPU, whatever this machine has."""
    options, distributed = asked.options, asked.options.distributed
    if distributed.multi_gpu:
        here = distributed.num_gpus or len(distributed.gpu_ids) or 1
        options = with_global_batch(options, here * distributed.num_machines)
        alone = type(distributed)().model_copy(update={"distributed_strategy": distributed.distributed_strategy, "num_gpus": here})
        options = options.model_copy(update={"distributed": alone})
    if options.training.mixed_precision == "auto":
        options = options.model_copy(update={"training": options.training.model_copy(update={"mixed_precision": "bf16"})})
    return replace(asked, options=options, dry_run=True, run_dir=None)


def questions_of(options: RunOptions, plan: DataPlan, prompts: Sequence[PromptSpec], sources: Sequence[Bucket] = ()) -> Questions:
    """What of a run's data its memory depends on. sources: what evaluations transfer."""

    def area(bucket: Bucket) -> int:
        return sum(width * height for width, height in (bucket.size, *bucket.controls))

    buckets = sorted({Bucket((row.width, row.height), tuple(row.controls)) for row in plan.table()}, key=area, reverse=True)
    kinds = sorted((spec.width, spec.height, spec.cfg_scale) for spec in prompts)
    previews = tuple(((width, height), len(list(same)), cfg) for (width, height, cfg), same in groupby(kinds))
    captions, largest = plan.captions(), max(sources, key=area, default=None)
    return Questions(
        tuple(buckets),
        max(captions, key=len, default=""),
        previews,
        None if largest is None else (largest.size, len(set(captions)), options.samples.sample_cfg_scale),
        max((len(spec.controls) for spec in prompts), default=0),
    )


class Estimate:
    """Forecasts of one run that is about to start, or that is only asked about."""

    def __init__(
        self,
        family: ModelFamily,
        options: RunOptions,
        plan: DataPlan,
        prompts: Sequence[PromptSpec],
        as_json: bool,
        sources: Sequence[Size] = (),
        processes: int = 1,
    ) -> None:
        """sources: sizes of what evaluations transfer. processes: of the run on this machine."""
        self._options, self._as_json, self._family, self._plan = options, as_json, family, plan
        made = None if families.maker_of(family) is None else self._made
        asked = questions_of(options, plan, prompts, [Bucket(size) for size in sources])
        self.forecaster = Forecaster(family, asked, options.dataset.resolution, partial(say, as_json), made, processes)

    def _made(self, options: RunOptions, dtypes: dict[str, torch.dtype]) -> Parts:
        """The structure of a model that the run makes, or goes on from."""
        maker = families.maker_of(self._family)
        assert maker is not None
        if is_absent(getattr(options.model, "vae", None)):
            options = options.model_copy(update={"model": options.model.model_copy(update={"vae": str(VAE_CONFIGS / "vae")})})
            self.forecaster.published = "Stable Diffusion's VAE"
        if maker.is_new(options.model):
            files = maker.files(options.model, self._plan.captions())
            beginning = Beginning(options.training.seed, tuple(dict.fromkeys(self._plan.sizes())), files)
            parts = maker.build(options.model, beginning, CPU, dtypes, EVERYTHING)
        else:
            parts = maker.load(options.model, CPU, dtypes, EVERYTHING)
        settle(parts, {**dtypes, "vae": torch.float32})
        return parts

    def answer(self, card_gib: float | None) -> str:
        """The answer for people, or its last line for programs. card_gib: of the card that the run is to fit on; None asks for no plan."""
        plan = None if card_gib is None else plan_for(int(card_gib * GIB), self._options, self.forecaster)
        return said(self.forecaster(self._options), plan, _about(self._options), self._as_json, verdict)


def say(as_json: bool, what: str) -> None:
    """Tells what is being measured: people, or programs."""
    if as_json:
        sys.stdout.write(json.dumps({"measuring": what}) + "\n")
        sys.stdout.flush()
    else:
        log.info("measuring %s", what)


def said(
    forecast: Forecast,
    plan: FitPlan[Any] | None,
    heading: str,
    as_json: bool,
    judged: Callable[[Forecast, int | None], str],
    **more: Any,
) -> str:
    """The whole answer for people, or its last line for programs, to which more belongs. judged gets the bytes of the card that is here."""
    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    if as_json:
        end = {"here": here, "verdict": judged(forecast, here)} if plan is None else {"plan": plan_as_json(plan)}
        return json.dumps({"forecast": forecast.as_json(), **end, **more})
    return "\n".join([table(forecast, heading), "", *([judged(forecast, here)] if plan is None else plan_lines(plan))])


class ForecastComparison:
    """The forecast of a run in its event log, and what was measured beside it at the end."""

    def __init__(self, run: RunDirectory, forecast: Forecast) -> None:
        self._run, self._forecast = run, forecast
        parts = {name: round(size / GIB, 3) for name, size in forecast.worst.parts.items()}
        phases = {phase.name: round(phase.total / GIB, 3) for phase in forecast.phases}
        run.log(Forecasted(gib=round(forecast.total / GIB, 3), card_gib=round(forecast.on_card / GIB, 3), phases=phases, parts=parts))
        log.info("forecast: %.1f GiB of tensors, most of all in %s", forecast.total / GIB, forecast.worst.name)

    def measured(self, peak_gib: float) -> None:
        """Writes the most that the device's tensors have taken beside the forecast."""
        forecast = self._forecast.total / GIB
        error = round(100 * (forecast / peak_gib - 1), 1) if peak_gib else None
        self._run.log(ForecastChecked(gib=round(forecast, 3), measured_gib=round(peak_gib, 3), error_percent=error))
        log.info("memory: %.2f GiB were forecast, %.2f GiB were the most that tensors took", forecast, peak_gib)


def beside(
    run: RunDirectory,
    family: ModelFamily,
    options: RunOptions,
    plan: DataPlan,
    prompts: Sequence[PromptSpec],
    sources: Sequence[Size],
    processes: int,
) -> ForecastComparison | None:
    """Forecasts a run that is starting, in a few seconds; None, with a line in the log, where that does not work."""
    try:
        return ForecastComparison(run, Estimate(family, options, plan, prompts, False, sources, processes).forecaster(options))
    # Whatever a model may do on the meta device, it is no reason not to train it.
    except Exception as err:
        log.warning("the memory of this run could not be forecast (%s: %s)", type(err).__name__, str(err).partition("\n")[0])
        return None


def _about(options: RunOptions) -> str:
    model = options.model.pretrained_model_name_or_path or "a new model"
    return f"{model}, {options.label}: memory of a GPU ({options.training.mixed_precision})"


def table(forecast: Forecast, heading: str) -> str:
    """The forecast as a table in GiB, a column for each phase, below a line that says what it is of."""
    names = list(dict.fromkeys(part for phase in forecast.phases for part in phase.parts))
    rows = [[name, *(_gib(phase.parts.get(name, 0)) for phase in forecast.phases)] for name in names]
    rows.append(["all tensors", *(_gib(phase.total) for phase in forecast.phases)])
    rows.append(["on the card", *(_gib(replace(forecast, phases=(phase,)).on_card) for phase in forecast.phases)])
    head = ["GiB", *(phase.name for phase in forecast.phases)]
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            [row[0].ljust(widths[0]), *(value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()

    rule = "-" * len(line(head))
    about = [heading]
    if forecast.published:
        about.append(
            f"Measured on the published structure of {forecast.published}: the model is not on this disk, or does not describe itself."
        )
    about += [f"{phase.name}: {phase.about}" for phase in forecast.phases]
    body = [line(row) for row in rows]
    return "\n".join([*about, "", line(head), rule, *body[:-2], rule, *body[-2:], *(f"Note: {note}" for note in forecast.notes)])


def verdict(forecast: Forecast, card: int | None, what: str = "The run") -> str:
    """One sentence: whether it fits on a card of so many bytes, or which card it needs."""
    need, phase = forecast.on_card, forecast.worst.name
    if forecast.of("training") is not None and forecast.of("previews") is None:
        phase += ", without previews"
    if card is not None:
        fits = "it fits" if forecast.fits(card) else f"{_reason(forecast, card)}; --fit {card / GIB:.0f}GB makes a plan"
        return f"{what} needs {need / GIB:.1f} GiB of this GPU's {card / GIB:.1f} GiB, most of all in {phase}: {fits}."
    enough = next((size for size in CARDS if need <= size * GIB), None)
    card_text = f"a card of {enough} GB is enough" if enough is not None else f"more than the {CARDS[-1]} GB of the largest usual card"
    smaller = max((size for size in CARDS if size * GIB < need), default=None)
    advice = "" if smaller is None else f"; --fit {smaller}GB makes a plan for a smaller one"
    little = "" if forecast.host <= forecast.host_there else ", but this machine has too little host RAM"
    return f"{what} needs {need / GIB:.1f} GiB, most of all in {phase}: {card_text}{little}{advice}."


def _reason(forecast: Forecast, card: int) -> str:
    """Why a run does not fit on a card of so many bytes in this machine."""
    if forecast.on_card > card:
        return "it does not fit"
    return f"it fits on the card, but the {forecast.host / GIB:.1f} GiB of host RAM are more than this machine has"


def plan_lines(plan: FitPlan[Any]) -> list[str]:
    """A plan for people: what each change spares, and the options to take over as flags and as TOML."""
    card, need = plan.card / GIB, plan.forecast.on_card / GIB
    if not plan.steps:
        state = "It fits as it is" if plan.fits else f"Nothing that could be changed helps, and {_reason(plan.forecast, plan.card)}"
        return [f"{state}: {need:.1f} GiB of {card:.1f} GiB."]
    lines = [f"Plan for a card of {card:.0f} GB:"]
    for number, step in enumerate(plan.steps, 1):
        values = ", ".join(f"{name} = {_text(value)}" for name, value in step.options.items())
        lines.append(f"  {number}. {values}: {step.before / GIB:.1f} -> {step.after / GIB:.1f} GiB ({step.cost})")
    host = f"{plan.forecast.host / GIB:.1f} of this machine's {plan.forecast.host_there / GIB:.1f} GiB of host RAM"
    if plan.fits:
        lines.append(f"With it {need:.1f} GiB of {card:.1f} GiB are needed, and {host}: it fits.")
    else:
        most = f", most of all in {plan.forecast.worst.name}" if plan.forecast.on_card > plan.card else ""
        lines.append(
            f"With all of it {need:.1f} GiB of {card:.1f} GiB are still needed{most}, and {host}: {_reason(plan.forecast, plan.card)}."
        )
    lines += [f"Note: {note}" for note in plan.forecast.notes]
    flags = shown([one for name, value in plan.changes.items() for one in _flag(name, value)])
    toml = [f"  {name} = {_text(value)}" for name, value in plan.changes.items()]
    return [*lines, "", "As flags:", f"  {flags}", "In the TOML file:", *toml]


def plan_as_json(plan: FitPlan[Any]) -> dict[str, Any]:
    """A plan for programs."""
    steps = [{"options": step.options, "cost": step.cost, "before": step.before, "after": step.after} for step in plan.steps]
    return {"card": plan.card, "fits": plan.fits, "changes": plan.changes, "steps": steps, "forecast": plan.forecast.as_json()}


def _text(value: Any) -> str:
    """A value as TOML writes it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    return [f"--{name}={','.join(map(str, value))}" if isinstance(value, tuple) else f"--{name}={value}"]


def _gib(size: int) -> str:
    return "" if not size else f"{size / GIB:.2f}"
