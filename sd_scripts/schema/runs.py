"""Every kind of run: which sections it has and which script trains it."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from .dataset import DatasetOptions
from .fields import raise_all
from .model import SdxlModelOptions
from .network import NetworkOptions
from .objective import ObjectiveOptions
from .optimizer import OPTIMIZERS, OptimizerOptions
from .output import OutputOptions
from .samples import SampleOptions
from .training import TrainingOptions


class RunOptions(BaseModel):
    """All options of one kind of run, nested by section; flat.py knows them by their flat names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: ClassVar[str]
    method: ClassVar[str]
    script: ClassVar[str]
    label: ClassVar[str]


class SdxlNetwork(RunOptions):
    """SDXL LoRA and its relatives."""

    family: ClassVar[str] = "sdxl"
    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sdxl_train_network.py"
    label: ClassVar[str] = "SDXL LoRA"

    model: SdxlModelOptions
    dataset: DatasetOptions
    network: NetworkOptions = NetworkOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    training: TrainingOptions = TrainingOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: SampleOptions = SampleOptions()
    output: OutputOptions = OutputOptions()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.network.train_text_encoder and self.dataset.cache_text_encoder_outputs:
            problems.append(
                "train_text_encoder changes the text embeddings in every step, so cache_text_encoder_outputs must be off; "
                "turn one of them off"
            )
        optimizer = self.optimizer
        if not optimizer.allow_custom_modules:
            if optimizer.optimizer_type not in OPTIMIZERS:
                problems.append(
                    f"optimizer_type: {optimizer.optimizer_type} is not in the list ({', '.join(OPTIMIZERS)}); a class of your own "
                    "needs --allow_custom_modules on the command line, because it runs other people's code"
                )
            if optimizer.lr_scheduler_type is not None:
                problems.append(
                    f"lr_scheduler_type: {optimizer.lr_scheduler_type} runs other people's code and needs --allow_custom_modules on the "
                    "command line"
                )
        if self.model.prediction_type == "flow" and self.model.zero_terminal_snr:
            problems.append("zero_terminal_snr belongs to noise schedules; prediction_type flow has none. Turn it off")
        raise_all(problems)
        return self


RUNS: dict[tuple[str, str], type[RunOptions]] = {(run.family, run.method): run for run in (SdxlNetwork,)}
"""Kinds of runs by (family, method)."""
