"""Every kind of run: which sections it has and which script trains it."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from .dataset import DatasetOptions, SdDatasetOptions
from .fields import Options, raise_all
from .model import FluxModelOptions, ModelOptions, SdModelOptions, SdxlModelOptions, UNetModelOptions
from .network import FluxFullOptions, FluxNetworkOptions, NetworkOptions, SdxlFullOptions, UNetFullOptions, UNetNetworkOptions
from .objective import FlowObjectiveOptions, ObjectiveOptions, RegressionOptions
from .optimizer import OPTIMIZERS, FullOptimizerOptions, OptimizerOptions
from .output import AdapterOutputOptions, ModelOutputOptions, OutputOptions
from .samples import FluxSampleOptions, SampleOptions, UNetSampleOptions
from .training import TrainingOptions


class RunOptions(Options):
    """All options of one kind of run, nested by section."""

    family: ClassVar[str]
    method: ClassVar[str]
    """network trains an adapter on a frozen model, full the model itself."""

    model: ModelOptions
    dataset: DatasetOptions
    network: NetworkOptions | UNetFullOptions | FluxFullOptions
    optimizer: OptimizerOptions = OptimizerOptions()
    training: TrainingOptions = TrainingOptions()
    objective: RegressionOptions
    samples: SampleOptions
    output: OutputOptions

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        t5_alone = isinstance(self.network, FluxNetworkOptions) and not self.network.train_t5xxl
        if self.network.train_text_encoder and self.dataset.cache_text_encoder_outputs and not t5_alone:
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
        raise_all(problems)
        return self


class _UNetRun(RunOptions):
    """Rules of models on a noise schedule."""

    model: UNetModelOptions

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.model.prediction_type == "flow" and self.model.zero_terminal_snr:
            raise_all(["zero_terminal_snr belongs to noise schedules; prediction_type flow has none. Turn it off"])
        return self


class SdNetwork(_UNetRun):
    """LoRA and its relatives on Stable Diffusion 1.x and 2.x."""

    family: ClassVar[str] = "sd"
    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sd_train_network.py"
    label: ClassVar[str] = "SD 1.5 / 2.x LoRA"

    model: SdModelOptions
    dataset: SdDatasetOptions
    network: UNetNetworkOptions = UNetNetworkOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: UNetSampleOptions = UNetSampleOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdFull(_UNetRun):
    """DreamBooth and fine-tuning of Stable Diffusion 1.x and 2.x."""

    family: ClassVar[str] = "sd"
    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sd_train.py"
    label: ClassVar[str] = "SD 1.5 / 2.x DreamBooth and fine-tuning"

    model: SdModelOptions
    dataset: SdDatasetOptions
    network: UNetFullOptions = UNetFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: UNetSampleOptions = UNetSampleOptions()
    output: ModelOutputOptions = ModelOutputOptions()


class SdxlNetwork(_UNetRun):
    """LoRA and its relatives on SDXL."""

    family: ClassVar[str] = "sdxl"
    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sdxl_train_network.py"
    label: ClassVar[str] = "SDXL LoRA"

    model: SdxlModelOptions
    dataset: DatasetOptions
    network: UNetNetworkOptions = UNetNetworkOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: UNetSampleOptions = UNetSampleOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdxlFull(_UNetRun):
    """DreamBooth and fine-tuning of SDXL."""

    family: ClassVar[str] = "sdxl"
    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sdxl_train.py"
    label: ClassVar[str] = "SDXL DreamBooth and fine-tuning"

    model: SdxlModelOptions
    dataset: DatasetOptions
    network: SdxlFullOptions = SdxlFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: UNetSampleOptions = UNetSampleOptions()
    output: ModelOutputOptions = ModelOutputOptions()


class FluxNetwork(RunOptions):
    """LoRA and its relatives on FLUX.1."""

    family: ClassVar[str] = "flux"
    method: ClassVar[str] = "network"
    script: ClassVar[str] = "flux_train_network.py"
    label: ClassVar[str] = "FLUX LoRA"

    model: FluxModelOptions
    dataset: DatasetOptions
    network: FluxNetworkOptions = FluxNetworkOptions()
    objective: FlowObjectiveOptions = FlowObjectiveOptions()
    samples: FluxSampleOptions = FluxSampleOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class FluxFull(RunOptions):
    """DreamBooth and fine-tuning of FLUX.1."""

    family: ClassVar[str] = "flux"
    method: ClassVar[str] = "full"
    script: ClassVar[str] = "flux_train.py"
    label: ClassVar[str] = "FLUX DreamBooth and fine-tuning"

    model: FluxModelOptions
    dataset: DatasetOptions
    network: FluxFullOptions = FluxFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    objective: FlowObjectiveOptions = FlowObjectiveOptions()
    samples: FluxSampleOptions = FluxSampleOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: dict[tuple[str, str], type[RunOptions]] = {
    (run.family, run.method): run for run in (SdxlNetwork, SdxlFull, SdNetwork, SdFull, FluxNetwork, FluxFull)
}
"""Kinds of runs by (family, method)."""
