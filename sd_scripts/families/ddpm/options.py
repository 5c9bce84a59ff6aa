"""What the small text-conditioned diffusion model, trained from nothing, has of its own in each section."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.fields import Batch, Count, Fraction, NotNegative, Positive, Rate, Show, Side, Size, WholeNumber, raise_all
from sd_scripts.schema.memory import UNetFullMemoryOptions
from sd_scripts.schema.model import ModelOptions, file_name, level_problems
from sd_scripts.schema.network import ScratchOptions
from sd_scripts.schema.objective import ObjectiveOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import SamplerSampleOptions
from sd_scripts.schema.training import TrainingOptions

DDPM_SAMPLERS = ("ddpm", "ddim", "euler", "heun", "dpm_solver", "dpmsolver++")
DdpmSampler = Literal["ddpm", "ddim", "euler", "heun", "dpm_solver", "dpmsolver++"]
StepSpacing = Literal["trailing", "lambda", "karras"]
Clamp = Literal["auto", "none", "clamp", "dynamic"]

_CAPTIONS = Show(fold="Reading captions")
_SCHEDULE = Show(fold="Noise schedule")


class DdpmModelOptions(ModelOptions):
    """The model that is made: a U-Net with an encoder of captions of its own, in pixels or in the latents of a VAE."""

    grid: ClassVar[int] = 8
    latent_side: ClassVar[int] = 1
    leading: ClassVar[tuple[str, ...]] = ("pretrained_model_name_or_path", "vae")

    pretrained_model_name_or_path: Annotated[str | None, Show(kind="file")] = None
    """A model that this trainer saved, file or folder, to go on from with its architecture, tokenizer and VAE; None begins from nothing."""
    vae: Annotated[str | None, Show(basic=True, kind="file", suggestions=("toy",))] = None
    """The frozen VAE in whose latents the model works: a .safetensors file, a diffusers folder, a hub id such as
    `stabilityai/sd-vae-ft-mse`, or `toy` for the small built-in one. None works on pixels, which is for small images."""
    vae_dtype: Annotated[Literal["float", "fp16", "bf16"], Show(needs="vae or pretrained_model_name_or_path")] = "float"
    """Precision of the VAE while it encodes and decodes."""
    base_channels: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Channels of the U-Net's first level."""
    channel_multipliers: Annotated[tuple[Annotated[Count, Field(le=64)], ...], Field(min_length=1, max_length=8)] = (1, 2, 3, 4)
    """Channels of each level as multiples of base_channels; each further level halves the sides."""
    layers_per_block: Annotated[int, Field(ge=1, le=8)] = 2
    """Residual blocks of a level."""
    attention_levels: tuple[WholeNumber, ...] = (2, 3)
    """Levels with attention to the image itself and to the caption, counted from 0 at full size; the middle always has it. Attention
    costs the square of the number of positions, so it is for the small sides."""
    attention_head_dim: Annotated[int, Field(ge=4, le=256)] = 32
    """Channels of an attention head; the channels of every level with attention must be a multiple of it."""
    unet_dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Share of activations that the U-Net's residual blocks drop in training; 0.1 is usual for small data sets."""
    scale_shift_norm: bool = True
    """Let time scale and shift the activations instead of only being added to them (Dhariwal and Nichol 2021)."""
    self_conditioning: bool = False
    """Give the network its own last estimate of the image as further channels (Chen et al. 2022). Better images for about a quarter
    more time."""
    tokenizer: Annotated[str | None, Show(kind="file", fold="Reading captions")] = None
    """A tokenizer.json to read captions with; None makes one from the captions of the data set. The run keeps it beside its settings."""
    vocab_size: Annotated[int, Field(ge=260, le=65536), _CAPTIONS] = 8192
    """Most tokens that a tokenizer made here has: 256 bytes, three special ones, and pairs that the captions join most often."""
    lowercase: Annotated[bool, _CAPTIONS] = True
    """Read capital letters as small ones."""
    max_token_length: Annotated[int, Field(ge=4, le=512), _CAPTIONS] = 64
    """Tokens of a caption that are read, start and end among them."""
    text_width: Annotated[int, Field(ge=16, le=2048, multiple_of=8), _CAPTIONS] = 256
    """Width of the caption encoder."""
    text_layers: Annotated[int, Field(ge=1, le=24), _CAPTIONS] = 4
    """Layers of the caption encoder."""
    text_heads: Annotated[Count, _CAPTIONS] = 4
    """Attention heads of the caption encoder; text_width must be a multiple of it."""
    text_dropout: Annotated[Fraction, Field(lt=1), _CAPTIONS] = 0.1
    """Share of activations that the caption encoder drops in training."""
    prediction_type: Annotated[Literal["v_prediction", "epsilon", "sample"], _SCHEDULE] = "v_prediction"
    """What the network predicts: v = a noise - s image (Salimans and Ho 2022), the noise, or the image itself."""
    beta_schedule: Annotated[Literal["linear", "scaled_linear", "cosine"], _SCHEDULE] = "linear"
    """How noise grows over the schedule: linear betas (Ho et al. 2020), squares of linear roots (Stable Diffusion), or a cosine (Nichol and
    Dhariwal 2021), which needs beta_start and beta_end for nothing."""
    num_train_timesteps: Annotated[int, Field(ge=10, le=10000), _SCHEDULE] = 1000
    """Steps of the noise schedule."""
    beta_start: Annotated[Positive, Field(lt=1), Show(needs="beta_schedule=linear|scaled_linear", fold="Noise schedule")] = 1e-4
    """Beta of the schedule's first step, the least noisy one."""
    beta_end: Annotated[Positive, Field(lt=1), Show(needs="beta_schedule=linear|scaled_linear", fold="Noise schedule")] = 2e-2
    """Beta of the schedule's last step."""
    zero_terminal_snr: Annotated[bool, _SCHEDULE] = False
    """Rescale the schedule so that its last step is pure noise (Lin et al. 2023). For v_prediction and sample."""

    @property
    def takes_estimate(self) -> bool:
        return self.self_conditioning

    @model_validator(mode="after")
    def _architecture_fits_together(self) -> Self:
        problems = level_problems(self.base_channels, self.channel_multipliers, self.attention_levels, self.attention_head_dim)
        if self.text_width % self.text_heads:
            problems.append(f"text_heads: text_width {self.text_width} is not a multiple of {self.text_heads}")
        if self.beta_schedule != "cosine" and self.beta_start >= self.beta_end:
            problems.append(f"beta_start ({self.beta_start:g}) must be below beta_end ({self.beta_end:g})")
        if self.zero_terminal_snr and self.prediction_type == "epsilon":
            problems.append(
                "zero_terminal_snr ends in pure noise, of which a network that predicts noise says nothing about the image; take "
                "prediction_type v_prediction or sample"
            )
        if self.tokenizer is not None and self.pretrained_model_name_or_path is not None:
            problems.append("tokenizer: the model in pretrained_model_name_or_path brings its own; remove one of them")
        raise_all(problems)
        return self

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": "ddpm", "max_token_length": self.max_token_length, "vae_name": file_name(self.vae)}


class DdpmDatasetOptions(DatasetOptions):
    """Images, captions, buckets and caches of a model that learns everything from them."""

    # The caption encoder is trained, so what it makes of a caption changes with every step: these are no options here.
    caches_texts: ClassVar[bool] = False
    cache_text_encoder_outputs: ClassVar[bool] = False  # type: ignore[misc]
    cache_text_encoder_outputs_to_disk: ClassVar[bool] = False  # type: ignore[misc]
    text_encoder_batch_size: ClassVar[int] = 16  # type: ignore[misc]

    train_data_dir: Annotated[str | None, Show(basic=True, kind="folder", suggestions=("toy:shapes",))] = None
    """Folder with the training images and a text file of the same name for each: either directly, or in kohya's sub-folders
    `<repeats>_<token> <class>`. Images without any caption train an unconditional model. `toy:shapes` draws a built-in data set."""
    resolution: Annotated[Size, Show(basic=True, unit="px")] = (64, 64)
    """Training size, N or W,H: each image is resized to about this area, in its own aspect ratio when buckets are on. Pixels: 32 to 128;
    latents: 256 or more."""
    min_bucket_reso: Annotated[Side, Show(unit="px")] = 32
    train_batch_size: Annotated[Batch, Show(basic=True)] = 16
    caption_dropout_rate: Fraction = 0.1
    """Chance that an image is shown with an empty caption, by which the model learns what guidance (CFG) leads away from."""


class DdpmNetworkOptions(ScratchOptions):
    """The weights of the U-Net and of the caption encoder, all trained."""

    train_text_encoder: ClassVar[bool] = True

    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=1)] = ()
    """Learning rate of the caption encoder; 0 leaves it as it is, empty takes learning_rate."""


class DdpmOptimizerOptions(FullOptimizerOptions):
    """Optimizer, learning rate, schedule for training from nothing."""

    learning_rate: Annotated[Rate, Show(basic=True)] = 2e-4
    """Peak learning rate. Prodigy and DAdapt optimizers set their own step size: give them 1."""


class DdpmTrainingOptions(TrainingOptions):
    """Length, precision, accumulation, averaging, logging interval."""

    max_train_steps: Annotated[Count, Show(basic=True, unit="steps")] = 100_000
    use_ema: bool = True
    """Keep an exponential moving average of the trained weights; previews and saved files use it. From nothing it makes a large
    difference."""


class DdpmObjectiveOptions(ObjectiveOptions):
    """The training objective: what the network predicts is an option of the model, prediction_type."""

    self_conditioning_rate: Annotated[Fraction, Show(needs="self_conditioning")] = 0.5
    """Chance that a sample is trained with the network's own estimate instead of none."""


class DdpmSampleOptions(SamplerSampleOptions):
    """Previews of a model trained from nothing."""

    sample_sampler: DdpmSampler = "ddim"
    """Sampler of a preview without --ss; docs/ddpm.md compares them."""
    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    """Denoising steps of a preview without --s: exactly so many steps of the sampler."""
    sample_cfg_scale: NotNegative = 3.0


class DdpmOutputOptions(ModelOutputOptions):
    """Run folder, saved models, states, trackers, metadata."""

    save_model_as: Literal["safetensors", "diffusers"] = "safetensors"
    """How the model is written. safetensors: one file with U-Net, caption encoder, VAE, tokenizer and schedule, which `ddpm_sample.py`
    reads; diffusers: a folder with a part in each sub-folder."""


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
        **dict.fromkeys(("curriculum_enabled", "curriculum_steps"), "nothing: put the images to begin with into a run of their own"),
        "data_root": "train_data_dir",
        **dict.fromkeys(("caption_field", "meta_dir", "tags_dir"), "in_json with captions, or a text file beside each image"),
        **dict.fromkeys(("failed_list", "min_tag_count", "require_512"), "nothing: leave images out of the folder"),
        **dict.fromkeys(("prefetch_factor", "pin_memory", "persistent_workers"), "max_data_loader_n_workers"),
        "decay_steps": "lr_decay_steps",
        "dropout": "unet_dropout",
        **dict.fromkeys(("ema_decay_fast", "ema_decay_slow", "ema_switch_step"), "ema_decay, which warms up by itself"),
        **dict.fromkeys(("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp"), "attention_backend"),
        "eval_cfg": "sample_cfg_scale",
        "eval_every": "sample_every_n_steps",
        "eval_n": "sample_prompts, with a line for each image",
        "eval_prompts_file": "sample_prompts, with the path of the file",
        "eval_sampler": "sample_sampler",
        "eval_seed": "seed, or --d in a line of sample_prompts",
        "eval_steps": "sample_steps",
        "grad_accum_steps": "gradient_accumulation_steps",
        "grad_checkpointing": "gradient_checkpointing",
        "grad_clip_norm": "max_grad_norm",
        "image_dir": "train_data_dir",
        "image_size": "resolution",
        "images_only": "nothing: images without captions train an unconditional model",
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
            ("sanity_overfit_steps", "sanity_overfit_images", "sanity_overfit_max_loss"), "nothing: train on a few images first"
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
        "use_text_conditioning": "nothing: images without captions train an unconditional model",
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
    memory: UNetFullMemoryOptions = UNetFullMemoryOptions()
    objective: DdpmObjectiveOptions = DdpmObjectiveOptions()
    samples: DdpmSampleOptions = DdpmSampleOptions()
    output: DdpmOutputOptions = DdpmOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (Ddpm,)
