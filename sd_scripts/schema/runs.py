"""Every kind of run: which sections it has and which script trains it."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from sd_scripts.families.ddpm.options import (
    DdpmDatasetOptions,
    DdpmModelOptions,
    DdpmNetworkOptions,
    DdpmObjectiveOptions,
    DdpmOptimizerOptions,
    DdpmOutputOptions,
    DdpmSampleOptions,
    DdpmTrainingOptions,
)
from sd_scripts.families.lgt.options import (
    LgtDatasetOptions,
    LgtModelOptions,
    LgtNetworkOptions,
    LgtObjectiveOptions,
    LgtOptimizerOptions,
    LgtOutputOptions,
    LgtSampleOptions,
    LgtTrainingOptions,
)
from sd_scripts.families.zimage.objective import ZImageObjectiveOptions

from .compile import CompileOptions
from .dataset import DatasetOptions, QwenImageDatasetOptions, SdDatasetOptions
from .distributed import DistributedOptions
from .fields import Options, raise_all
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

    renamed: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("amp", "amp_dtype"), "mixed_precision"),
        "attn_head_dim": "attention_head_dim",
        "attn_heads": "attention_head_dim: a level has as many heads as fit into its channels",
        "attn_resolutions": "attention_levels, which counts levels from 0 at full size",
        **dict.fromkeys(("batch", "batch_size"), "train_batch_size"),
        **dict.fromkeys(("caption_drop_prob", "cond_drop_prob"), "caption_dropout_rate"),
        "channel_mults": "channel_multipliers",
        "ckpt_keep_last": "save_last_n_states, or save_last_n_steps for saved models",
        "compile_cudagraphs": "compile_mode reduce-overhead",
        "compile_warmup_steps": "nothing: compiling is counted apart from training",
        "config": "config_file, with a TOML file of this program's own names",
        "cosine_s": "nothing: beta_schedule cosine has 0.008, as published",
        "cudnn_benchmark": "cuda_cudnn_benchmark",
        **dict.fromkeys(("curriculum_enabled", "curriculum_steps"), "nothing: put the pictures to begin with into a run of their own"),
        "data_root": "train_data_dir",
        **dict.fromkeys(("caption_field", "meta_dir", "tags_dir"), "in_json with captions, or a text file beside each picture"),
        **dict.fromkeys(("failed_list", "min_tag_count", "require_512"), "nothing: leave pictures out of the folder"),
        **dict.fromkeys(("prefetch_factor", "pin_memory", "persistent_workers"), "max_data_loader_n_workers"),
        "decay_steps": "lr_decay_steps",
        "dropout": "unet_dropout",
        **dict.fromkeys(("ema_decay_fast", "ema_decay_slow", "ema_switch_step"), "ema_decay, which warms up by itself"),
        **dict.fromkeys(("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp"), "attention_backend"),
        "eval_cfg": "sample_cfg_scale",
        "eval_every": "sample_every_n_steps",
        "eval_n": "sample_prompts, with a line for each picture",
        "eval_prompts_file": "sample_prompts, with the path of the file",
        "eval_sampler": "sample_sampler",
        "eval_seed": "seed, or --d in a line of sample_prompts",
        "eval_steps": "sample_steps",
        "grad_accum_steps": "gradient_accumulation_steps",
        "grad_checkpointing": "gradient_checkpointing",
        "grad_clip_norm": "max_grad_norm",
        "image_dir": "train_data_dir",
        "image_size": "resolution",
        "images_only": "nothing: pictures without captions train an unconditional model",
        "latent_cache": "cache_latents",
        "latent_cache_dir": "cache_dir",
        **dict.fromkeys(
            ("latent_cache_sharded", "latent_cache_index", "latent_cache_strict", "latent_cache_fallback", "latent_shard_cache_size"),
            "nothing: entries of the cache are found by content, and missing ones are made",
        ),
        **dict.fromkeys(("latent_channels", "latent_downsample_factor", "vae_scaling_factor"), "nothing: the vae says it"),
        "latent_dtype": "vae_dtype",
        "latent_precompute": "--cache_only, which fills the cache and stops",
        "log_every": "log_every_n_steps",
        "lr": "learning_rate",
        "max_steps": "max_train_steps",
        "min_lr_ratio": "lr_scheduler_min_lr_ratio",
        "mode": "vae: with one the model works in its latents, without in pixels",
        "noise_schedule": "beta_schedule",
        "num_res_blocks": "layers_per_block",
        "num_workers": "max_data_loader_n_workers",
        "out_dir": "output_dir",
        "resume_ckpt": "resume",
        **dict.fromkeys(
            ("sanity_overfit_steps", "sanity_overfit_images", "sanity_overfit_max_loss"), "nothing: train on a few pictures first"
        ),
        "save_every": "save_every_n_steps",
        "scheduler": "lr_scheduler",
        "self_cond_prob": "self_conditioning_rate",
        "tag_drop_prob": "caption_tag_dropout_rate",
        "text_dim": "text_width",
        "text_max_len": "max_token_length",
        **dict.fromkeys(("text_merges_path", "text_vocab_path", "tokenizer_type"), "tokenizer, with a tokenizer.json"),
        "tf32": "cuda_allow_tf32",
        "timesteps": "num_train_timesteps",
        "token_drop_prob": "caption_token_dropout_rate",
        "use_scale_shift_norm": "scale_shift_norm",
        "use_text_conditioning": "nothing: pictures without captions train an unconditional model",
        "vae_freeze": "nothing: the vae is never trained",
        "vae_pretrained": "vae",
        "val_ratio": "validation_split",
        "warmup_steps": "lr_warmup_steps",
        "weight_decay": "optimizer_args with weight_decay=...",
    }

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
