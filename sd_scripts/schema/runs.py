"""Every kind of run: which sections it has and which script trains it."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from .acrf import ZImageObjectiveOptions
from .compile import CompileOptions
from .dataset import DatasetOptions, QwenImageDatasetOptions, SdDatasetOptions
from .ddpm import (
    DdpmDatasetOptions,
    DdpmModelOptions,
    DdpmNetworkOptions,
    DdpmObjectiveOptions,
    DdpmOptimizerOptions,
    DdpmOutputOptions,
    DdpmSampleOptions,
    DdpmTrainingOptions,
)
from .distributed import DistributedOptions
from .fields import Options, raise_all
from .lgt import (
    LgtDatasetOptions,
    LgtModelOptions,
    LgtNetworkOptions,
    LgtObjectiveOptions,
    LgtOptimizerOptions,
    LgtOutputOptions,
    LgtSampleOptions,
    LgtTrainingOptions,
)
from .memory import AdapterMemoryOptions, MemoryOptions, UNetAdapterMemoryOptions, UNetMemoryOptions
from .model import (
    BaseModelOptions,
    FluxModelOptions,
    ModelOptions,
    QwenImageModelOptions,
    SdModelOptions,
    SdxlModelOptions,
    UNetModelOptions,
    ZImageModelOptions,
)
from .network import (
    FluxFullOptions,
    FluxNetworkOptions,
    QwenImageNetworkOptions,
    SdxlFullOptions,
    TextNetworkOptions,
    TransformerFullOptions,
    TransformerNetworkOptions,
    UNetFullOptions,
    UNetNetworkOptions,
    ZImageFullOptions,
    ZImageNetworkOptions,
)
from .objective import FlowObjectiveOptions, FluxFlowObjectiveOptions, ObjectiveOptions, QwenFlowObjectiveOptions, RegressionOptions
from .optimizer import OPTIMIZERS, FullOptimizerOptions, OptimizerOptions
from .output import (
    AdapterOutputOptions,
    FluxAdapterOutputOptions,
    ModelOutputOptions,
    OutputOptions,
    QwenImageAdapterOutputOptions,
    ZImageAdapterOutputOptions,
)
from .samples import FluxSampleOptions, QwenImageSampleOptions, SampleOptions, UNetSampleOptions, ZImageSampleOptions
from .training import TrainingOptions


class RunOptions(Options):
    """All options of one kind of run, nested by section."""

    family: ClassVar[str]
    method: ClassVar[str]
    """network trains an adapter on a frozen model, full the model itself, scratch a model that is made by the run."""

    model: ModelOptions
    dataset: DatasetOptions
    network: (
        TextNetworkOptions | TransformerNetworkOptions | UNetFullOptions | TransformerFullOptions | DdpmNetworkOptions | LgtNetworkOptions
    )
    optimizer: OptimizerOptions = OptimizerOptions()
    training: TrainingOptions = TrainingOptions()
    compile: CompileOptions = CompileOptions()
    memory: MemoryOptions = MemoryOptions()
    distributed: DistributedOptions = DistributedOptions()
    objective: RegressionOptions | LgtObjectiveOptions
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
        training, distributed = self.training, self.distributed
        if distributed.global_batch_size is not None and training.gradient_accumulation_steps != 1:
            problems.append("gradient_accumulation_steps follows from global_batch_size; remove one of them")
        problems += self._lever_problems() + self._prior_problems()
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

    def _prior_problems(self) -> list[str]:
        """What base_prior_weight needs."""
        if not isinstance(self.objective, FlowObjectiveOptions) or not self.objective.base_prior_weight:
            return []
        problems, data = [], self.dataset
        if self.method != "network":
            problems.append("base_prior_weight needs the base model beside the trained one, which only an adapter run has; set it to 0")
        if self.network.train_text_encoder:
            problems.append("base_prior_weight asks the base model, whose text encoders train_text_encoder changes; turn one of them off")
        toy = data.train_data_dir is not None and data.train_data_dir.startswith("toy:")
        if not (data.reg_data_dir or data.num_class_images or data.dataset_config or toy):
            problems.append(
                "base_prior_weight compares with the base model on regularisation pictures; give reg_data_dir, or num_class_images, "
                "which makes them"
            )
        return problems

    def _lever_problems(self) -> list[str]:
        """Levers for memory and speed that do not go together."""
        compiling, memory, distributed, training = self.compile, self.memory, self.distributed, self.training
        problems = []
        if compiling.compile and distributed.distributed_strategy == "fsdp2":
            problems.append("compile works on a network that each process holds whole; turn it off, or set distributed_strategy to ddp")
        if memory.blocks_to_swap and distributed.distributed_strategy == "fsdp2":
            problems.append("blocks_to_swap and distributed_strategy fsdp2 both decide where weights are; set one of them back")
        if memory.blocks_to_swap and compiling.records_addresses:
            problems.append(
                f"blocks_to_swap moves weights, and CUDA graphs ({compiling.graph_option}) replay fixed addresses; choose compile_mode "
                "default or max-autotune-no-cudagraphs with compile_backend inductor, or set blocks_to_swap to 0"
            )
        if memory.blocks_to_swap and compiling.compile and compiling.compile_scope == "network":
            problems.append(
                "compile_scope network makes one code of all blocks, between which blocks_to_swap has nothing to move; take blocks"
            )
        if memory.cuda_cudnn_benchmark and training.deterministic:
            problems.append("cuda_cudnn_benchmark chooses kernels by their speed, so a run is not deterministic; turn one of them off")
        if isinstance(self.model, BaseModelOptions) and self.model.transformer_quantization != "none":
            if self.method != "network":
                problems.append("transformer_quantization holds a frozen network in few bits, but this run trains it; set it to none")
            if distributed.distributed_strategy == "fsdp2":
                problems.append(
                    "distributed_strategy fsdp2 cannot share out a quantised network; set transformer_quantization to none, or "
                    "distributed_strategy to ddp"
                )
        return problems + self._whole_weight_problems()

    def _whole_weight_problems(self) -> list[str]:
        """What is wrong with the levers of weights that are trained themselves."""
        memory, problems = self.memory, []
        if memory.fused_backward_pass:
            training, optimizer = self.training, self.optimizer
            if training.gradient_accumulation_steps != 1:
                problems.append(
                    "fused_backward_pass moves a weight with each batch, so gradients cannot be summed over "
                    f"{training.gradient_accumulation_steps} batches; set gradient_accumulation_steps to 1"
                )
            if optimizer.max_grad_norm:
                problems.append(
                    "fused_backward_pass lets go of each gradient before all are known, so they cannot be clipped together; set "
                    "max_grad_norm to 0"
                )
            if training.mixed_precision == "fp16":
                problems.append("fused_backward_pass cannot leave out a step whose gradients overflow in fp16; take mixed_precision bf16")
            if self.distributed.multi_gpu:
                problems.append("fused_backward_pass works in one process; turn multi_gpu off")
            if optimizer.optimizer_type == "Prodigy":
                problems.append(
                    "fused_backward_pass moves weights one by one, and Prodigy needs all at once; choose another optimizer_type"
                )
        if memory.full_bf16 and self.training.mixed_precision not in ("bf16", "auto"):
            problems.append(f"full_bf16 needs mixed_precision bf16, not {self.training.mixed_precision}")
        if memory.full_bf16 and self.distributed.distributed_strategy == "fsdp2":
            problems.append("full_bf16 works on weights that each process holds whole; turn it off, or set distributed_strategy to ddp")
        return problems


class _UNetRun(RunOptions):
    """What models on a noise schedule have in common."""

    model: UNetModelOptions
    memory: UNetMemoryOptions = UNetMemoryOptions()
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
    memory: UNetAdapterMemoryOptions = UNetAdapterMemoryOptions()
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
    memory: UNetAdapterMemoryOptions = UNetAdapterMemoryOptions()
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
    memory: AdapterMemoryOptions = AdapterMemoryOptions()
    output: FluxAdapterOutputOptions = FluxAdapterOutputOptions()


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
    memory: AdapterMemoryOptions = AdapterMemoryOptions()
    objective: QwenFlowObjectiveOptions = QwenFlowObjectiveOptions()
    samples: QwenImageSampleOptions = QwenImageSampleOptions()
    output: QwenImageAdapterOutputOptions = QwenImageAdapterOutputOptions()

    @model_validator(mode="after")
    def _levers_go_together(self) -> Self:
        problems = []
        if self.model.modulation_table and self.network.lora_targets == "all_with_modulation":
            problems.append("modulation_table keeps the modulation as it is, but lora_targets trains it; turn one of them off")
        raise_all(problems)
        return self


class _ZImageRun(RunOptions):
    family: ClassVar[str] = "zimage"

    model: ZImageModelOptions
    objective: ZImageObjectiveOptions = ZImageObjectiveOptions()
    samples: ZImageSampleOptions = ZImageSampleOptions()


class ZImageNetwork(_ZImageRun):
    """LoRA and its relatives on Z-Image."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "zimage_train_network.py"
    label: ClassVar[str] = "Z-Image LoRA"

    network: ZImageNetworkOptions = ZImageNetworkOptions()
    memory: AdapterMemoryOptions = AdapterMemoryOptions()
    output: ZImageAdapterOutputOptions = ZImageAdapterOutputOptions()


class ZImageFull(_ZImageRun):
    """DreamBooth and fine-tuning of Z-Image."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "zimage_train.py"
    label: ClassVar[str] = "Z-Image DreamBooth and fine-tuning"

    network: ZImageFullOptions = ZImageFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    output: ModelOutputOptions = ModelOutputOptions()

    @model_validator(mode="after")
    def _weights_are_plain(self) -> Self:
        problems = []
        if self.model.training_adapter is not None:
            problems.append(
                "training_adapter is for adapters; a model that is trained itself cannot leave it out of the saved file. Remove it"
            )
        raise_all(problems)
        return self


class Ddpm(RunOptions):
    """A small text-conditioned diffusion model, trained from nothing."""

    family: ClassVar[str] = "ddpm"
    method: ClassVar[str] = "scratch"
    script: ClassVar[str] = "ddpm_train.py"
    label: ClassVar[str] = "Small DDPM from scratch"

    model: DdpmModelOptions = DdpmModelOptions()
    dataset: DdpmDatasetOptions
    network: DdpmNetworkOptions = DdpmNetworkOptions()
    optimizer: DdpmOptimizerOptions = DdpmOptimizerOptions()
    training: DdpmTrainingOptions = DdpmTrainingOptions()
    memory: UNetMemoryOptions = UNetMemoryOptions()
    objective: DdpmObjectiveOptions = DdpmObjectiveOptions()
    samples: DdpmSampleOptions = DdpmSampleOptions()
    output: DdpmOutputOptions = DdpmOutputOptions()


class Lgt(RunOptions):
    """Style transfer in the latents of a VAE, trained from nothing."""

    family: ClassVar[str] = "lgt"
    method: ClassVar[str] = "scratch"
    script: ClassVar[str] = "lgt_train.py"
    label: ClassVar[str] = "LGT style transfer"
    renamed: ClassVar[dict[str, str]] = {
        "accumulation_steps": "gradient_accumulation_steps",
        "batch_size": "train_batch_size",
        "data_root": "train_data_dir",
        "eval_interval": "sample_every_n_epochs",
        "full_eval_interval": "sample_every_n_epochs, with test_images_per_style",
        "label_drop_prob": "caption_dropout_rate",
        "num_encoder_blocks": "layers_per_block",
        "num_decoder_blocks": "layers_per_block",
        "num_epochs": "max_train_epochs",
        "num_styles": "nothing: there are as many as folders",
        "resume_checkpoint": "resume",
        "save_dir": "output_dir",
        "save_interval": "save_every_n_epochs",
        "style_subdirs": "nothing: every sub-folder of train_data_dir is a style",
        "temperature_lambda": "sample_temperature",
        "use_amp": "mixed_precision",
        "use_gradient_checkpointing": "checkpoint_steps",
        "vel_reg_weight": "w_velocity",
        "vel_smooth_weight": "w_velocity_tv",
    }

    model: LgtModelOptions = LgtModelOptions()
    dataset: LgtDatasetOptions
    network: LgtNetworkOptions = LgtNetworkOptions()
    optimizer: LgtOptimizerOptions = LgtOptimizerOptions()
    training: LgtTrainingOptions = LgtTrainingOptions()
    memory: UNetMemoryOptions = UNetMemoryOptions()
    objective: LgtObjectiveOptions = LgtObjectiveOptions()
    samples: LgtSampleOptions = LgtSampleOptions()
    output: LgtOutputOptions = LgtOutputOptions()


RUNS: dict[tuple[str, str], type[RunOptions]] = {
    (run.family, run.method): run
    for run in (SdxlNetwork, SdxlFull, SdNetwork, SdFull, FluxNetwork, FluxFull, QwenImageNetwork, ZImageNetwork, ZImageFull, Ddpm, Lgt)
}
"""Kinds of runs by (family, method)."""
