"""Every kind of run: which sections it has and which script trains it."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from .dataset import DatasetOptions, QwenImageDatasetOptions, SdDatasetOptions
from .fields import Options, raise_all
from .model import FluxModelOptions, ModelOptions, QwenImageModelOptions, SdModelOptions, SdxlModelOptions, UNetModelOptions
from .network import (
    FluxFullOptions,
    FluxNetworkOptions,
    QwenImageNetworkOptions,
    SdxlFullOptions,
    TextNetworkOptions,
    TransformerNetworkOptions,
    UNetFullOptions,
    UNetNetworkOptions,
)
from .objective import FluxFlowObjectiveOptions, ObjectiveOptions, QwenFlowObjectiveOptions, RegressionOptions
from .optimizer import OPTIMIZERS, FullOptimizerOptions, OptimizerOptions
from .output import AdapterOutputOptions, ModelOutputOptions, OutputOptions
from .samples import FluxSampleOptions, QwenImageSampleOptions, SampleOptions, UNetSampleOptions
from .training import TrainingOptions


class RunOptions(Options):
    """All options of one kind of run, nested by section."""

    family: ClassVar[str]
    method: ClassVar[str]
    """network trains an adapter on a frozen model, full the model itself."""

    model: ModelOptions
    dataset: DatasetOptions
    network: TextNetworkOptions | TransformerNetworkOptions | UNetFullOptions | FluxFullOptions
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
        if self.training.fsdp and self.method != "network":
            problems.append("fsdp shares out a frozen base, but this run trains the base itself; turn fsdp off")
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
    """What models on a noise schedule have in common."""

    model: UNetModelOptions
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: UNetSampleOptions = UNetSampleOptions()

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.model.prediction_type == "flow" and self.model.zero_terminal_snr:
            raise_all(["zero_terminal_snr belongs to noise schedules; prediction_type flow has none. Turn it off"])
        return self


class _SdRun(_UNetRun):
    family: ClassVar[str] = "sd"

    model: SdModelOptions
    dataset: SdDatasetOptions


class SdNetwork(_SdRun):
    """LoRA and its relatives on Stable Diffusion 1.x and 2.x."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sd_train_network.py"
    label: ClassVar[str] = "SD 1.5 / 2.x LoRA"

    network: UNetNetworkOptions = UNetNetworkOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdFull(_SdRun):
    """DreamBooth and fine-tuning of Stable Diffusion 1.x and 2.x."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sd_train.py"
    label: ClassVar[str] = "SD 1.5 / 2.x DreamBooth and fine-tuning"

    network: UNetFullOptions = UNetFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    output: ModelOutputOptions = ModelOutputOptions()


class _SdxlRun(_UNetRun):
    family: ClassVar[str] = "sdxl"

    model: SdxlModelOptions


class SdxlNetwork(_SdxlRun):
    """LoRA and its relatives on SDXL."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sdxl_train_network.py"
    label: ClassVar[str] = "SDXL LoRA"

    network: UNetNetworkOptions = UNetNetworkOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdxlFull(_SdxlRun):
    """DreamBooth and fine-tuning of SDXL."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sdxl_train.py"
    label: ClassVar[str] = "SDXL DreamBooth and fine-tuning"

    network: SdxlFullOptions = SdxlFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    output: ModelOutputOptions = ModelOutputOptions()


class _FluxRun(RunOptions):
    family: ClassVar[str] = "flux"

    model: FluxModelOptions
    objective: FluxFlowObjectiveOptions = FluxFlowObjectiveOptions()
    samples: FluxSampleOptions = FluxSampleOptions()


class FluxNetwork(_FluxRun):
    """LoRA and its relatives on FLUX.1."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "flux_train_network.py"
    label: ClassVar[str] = "FLUX LoRA"

    network: FluxNetworkOptions = FluxNetworkOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class FluxFull(_FluxRun):
    """DreamBooth and fine-tuning of FLUX.1."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "flux_train.py"
    label: ClassVar[str] = "FLUX DreamBooth and fine-tuning"

    network: FluxFullOptions = FluxFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    output: ModelOutputOptions = ModelOutputOptions()


class QwenImageNetwork(RunOptions):
    """LoRA and its relatives on Qwen-Image and Qwen-Image-Edit."""

    family: ClassVar[str] = "qwen_edit"
    method: ClassVar[str] = "network"
    script: ClassVar[str] = "qwen_image_train_network.py"
    label: ClassVar[str] = "Qwen-Image-Edit LoRA"

    model: QwenImageModelOptions
    dataset: QwenImageDatasetOptions
    network: QwenImageNetworkOptions = QwenImageNetworkOptions()
    objective: QwenFlowObjectiveOptions = QwenFlowObjectiveOptions()
    samples: QwenImageSampleOptions = QwenImageSampleOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()

    @model_validator(mode="after")
    def _levers_go_together(self) -> Self:
        problems = []
        if self.model.modulation_table and self.network.lora_targets == "all_with_modulation":
            problems.append("modulation_table keeps the modulation as it is, but lora_targets trains it; turn one of them off")
        if self.training.fsdp and self.model.transformer_quantization != "none":
            problems.append("fsdp cannot share out a quantised transformer; set transformer_quantization to none or turn fsdp off")
        raise_all(problems)
        return self


RUNS: dict[tuple[str, str], type[RunOptions]] = {
    (run.family, run.method): run for run in (SdxlNetwork, SdxlFull, SdNetwork, SdFull, FluxNetwork, FluxFull, QwenImageNetwork)
}
"""Kinds of runs by (family, method)."""
