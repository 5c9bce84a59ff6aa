"""The loop: how long, in which precision, with which seed."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .fields import Batch, Count, Section, Seed, Show, WholeNumber


class TrainingOptions(Section):
    """Length, precision, accumulation, averaging, logging interval."""

    title: ClassVar[str] = "Advanced Training"

    max_train_steps: Annotated[Count, Show(basic=True, unit="steps", needs="!max_train_epochs")] = 1600
    """Optimizer steps of the whole run."""
    max_train_epochs: Annotated[Count | None, Show(unit="epochs")] = None
    """Length of the run in epochs instead; replaces max_train_steps when given."""
    seed: Seed = 42
    """Every random draw of the run follows from this number and the number of the sample."""
    mixed_precision: Annotated[Literal["auto", "no", "fp16", "bf16"], Show(basic=True)] = "auto"
    """Precision of the network's arithmetic; trained weights stay in float32. auto takes bf16 where the GPU has it, else fp16, and no on a
    CPU."""
    gradient_accumulation_steps: Batch = 1
    """Batches whose gradients are averaged into one optimizer step."""
    use_ema: bool = False
    """Keep an exponential moving average of the trained weights; previews and saved files use it."""
    ema_decay: Annotated[float, Field(gt=0, lt=1), Show(needs="use_ema")] = 0.999
    """Decay of the moving average per step; it warms up as (1 + step) / (10 + step)."""
    deterministic: bool = False
    """Use only deterministic GPU kernels (slower), so that a resumed run repeats bit for bit on a GPU too."""
    log_every_n_steps: Annotated[Count, Show(unit="steps")] = 1
    """Write one point of the curve every this many steps, with the mean loss since the last one."""
    profile: Annotated[WholeNumber, Field(le=1000), Show(unit="steps")] = 0
    """Record this many steps after the third with torch's profiler: the run's folder gets `profile/`, with a trace for Perfetto or
    chrome://tracing and a text of what took longest. The recorded steps are slower; 0 records none."""
