"""How the weights move: optimizer, learning rate and its schedule, clipping."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .fields import Count, NotNegative, Rate, Section, Show

BUILT_IN = ("AdamW", "AdamW8bit", "PagedAdamW8bit", "Adafactor", "Lion", "Lion8bit", "Prodigy", "SGD")
ZOO = tuple(
    """A2Grad ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaGC AdaMax AdaMod AdaNorm AdaPNM AdaTAM Adai Adalite
    AdamC AdamG AdamP AdamS AdamWSN Adan AggMo Aida Alice Amos Ano ApolloDQN AvaGrad BCOS CAME DAdaptAdam DAdaptAdan DAdaptLion
    DiffGrad DualAdam EXAdam EmoFact EmoLynx EmoNavi FAdam FOCUS FTRL Fira FlashAdamW Fromage GaLore Grams Gravity GrokFastAdamW LARS
    LaProp Lamb MARS MSVAG NAdam Nero NovoGrad PAdam PID PNM QHAdam QHM RAdam RMSprop SCION SCIONLight SGDP SGDSaI SGDW SM3
    SRMM SWATS ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix StableAdamW StableSPAM TAM Tiger
    VSGD Yogi""".split()
)
"""Those of the package pytorch-optimizer that train weights in groups from gradients alone, and go on from a state to the same bits."""
OPTIMIZERS = (*BUILT_IN, *ZOO)
"""Optimizers that need no allow_custom_modules."""
PACKAGES = {
    **dict.fromkeys(("AdamW8bit", "PagedAdamW8bit", "Lion8bit"), "bitsandbytes"),
    "Prodigy": "prodigyopt",
    **dict.fromkeys(ZOO, "pytorch-optimizer"),
}
"""What is installed by those who want an optimizer; it is imported with _ in place of -."""
WEIGHT_BY_WEIGHT = ("AdamW", "AdamW8bit", "PagedAdamW8bit", "Adafactor", "Lion", "Lion8bit", "SGD")
"""Optimizers that look at one weight at a time: each has its state by itself, and nothing is written to their groups."""
OWN_RATE = ("Prodigy", "DAdaptAdam", "DAdaptAdan", "DAdaptLion")
"""Optimizers that find one step size for all weights."""
SCHEDULE_FREE = ("ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD")
"""Optimizers that average weights in place of a schedule, and train others than the average: Defazio et al. 2024 (arXiv 2405.15682)."""
BY_NAME = {name.lower(): name for name in OPTIMIZERS} | {
    "adamwschedulefree": "ScheduleFreeAdamW",
    "radamschedulefree": "ScheduleFreeRAdam",
    "sgdschedulefree": "ScheduleFreeSGD",
}
"""Optimizers by their names in small letters, those of the package schedulefree among them."""

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "piecewise_constant",
]


class OptimizerOptions(Section):
    """Optimizer, learning rate, schedule."""

    title: ClassVar[str] = "Optimizer"

    learning_rate: Annotated[Rate, Show(basic=True)] = 1e-4
    """Peak learning rate. Prodigy and DAdapt optimizers set their own step size: give them 1."""
    optimizer_type: Annotated[str, Show(suggestions=OPTIMIZERS)] = "AdamW"
    """Optimizer: AdamW (fused), AdamW8bit and PagedAdamW8bit (bitsandbytes), Adafactor, Lion, Lion8bit, Prodigy, SGD; by the package
    pytorch-optimizer CAME, AdEMAMix, ScheduleFreeAdamW (with lr_scheduler constant) and many more; or any module.Class with
    allow_custom_modules."""
    optimizer_args: tuple[str, ...] = ()
    """Further arguments of the optimizer as key=value, for example weight_decay=0.01 betas=(0.9,0.99); values are Python literals."""
    max_grad_norm: NotNegative = 1.0
    """Clip gradients to this norm; 0 turns clipping off."""
    lr_scheduler: Schedule = "cosine"
    """How the learning rate changes over the run."""
    lr_scheduler_type: str | None = None
    """A scheduler class module.Class to use instead of lr_scheduler; needs allow_custom_modules."""
    lr_scheduler_args: tuple[str, ...] = ()
    """Further arguments of the schedule as key=value; values are Python literals. piecewise_constant takes
     step_rules="1:10,0.1:20,0.01"."""
    lr_warmup_steps: NotNegative = 0.05
    """Steps (below 1: fraction of the run, to the nearest step) in which the learning rate rises from 0; constant and piecewise_constant
    have none."""
    lr_decay_steps: Annotated[NotNegative, Show(needs="lr_scheduler=warmup_stable_decay")] = 0.1
    """Steps (below 1: fraction of the run, to the nearest step) of the final decay of warmup_stable_decay."""
    lr_scheduler_num_cycles: Annotated[Count, Show(needs="lr_scheduler=cosine_with_restarts|cosine_with_min_lr|warmup_stable_decay")] = 1
    """Cycles of cosine_with_restarts. For cosine_with_min_lr and the decay of warmup_stable_decay half waves of the cosine: 1 falls to the
    floor, 2 rises to the peak again."""
    lr_scheduler_power: Annotated[NotNegative, Show(needs="lr_scheduler=polynomial")] = 1.0
    """Power of polynomial; 1 is linear."""
    lr_scheduler_timescale: Annotated[Count | None, Show(needs="lr_scheduler=inverse_sqrt")] = None
    """Time scale of inverse_sqrt in steps; None takes the warm-up steps."""
    lr_scheduler_min_lr_ratio: Annotated[float, Field(ge=0, lt=1), Show(needs="lr_scheduler=cosine_with_min_lr|warmup_stable_decay")] = 0.0
    """Floor of the learning rate as a part of its peak, for cosine_with_min_lr and warmup_stable_decay."""
    allow_custom_modules: Annotated[bool, Show(cli_only=True)] = False
    """Allow optimizer_type and lr_scheduler_type to name any importable class. This runs other people's code: only on the command line,
    never from a file or the page."""


class FullOptimizerOptions(OptimizerOptions):
    """Optimizer, learning rate, schedule for training a whole model."""

    learning_rate: Annotated[Rate, Show(basic=True)] = 1e-5
    """Peak learning rate, a tenth of what an adapter takes. Prodigy and DAdapt optimizers set their own step size: give them 1."""
