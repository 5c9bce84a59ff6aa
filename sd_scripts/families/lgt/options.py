"""What style transfer in latent space (LGT) has of its own in each section."""

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import Problem
from sd_scripts.schema.fields import VAST, Batch, Count, Fraction, NotNegative, Positive, Rate, Show, Side, Size, WholeNumber, raise_all
from sd_scripts.schema.memory import UNetFullMemoryOptions
from sd_scripts.schema.model import ModelOptions, file_name, level_problems
from sd_scripts.schema.network import ScratchOptions
from sd_scripts.schema.objective import ObjectiveSection
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import SampleOptions
from sd_scripts.schema.training import TrainingOptions

Integrator = Literal["euler", "midpoint", "heun"]
INTEGRATORS: tuple[str, ...] = get_args(Integrator)
TransferStart = Literal["inversion", "noise"]

_STYLE = Show(fold="Style term")
_CONTENT = Show(fold="Content terms")
_EDGES = Show(needs="edge_conditioning", fold="Content terms")
_FIELD = Show(fold="Velocity terms")
_PATH = Show(fold="Integration")


def start_problems(name: str, noise: float, end: str, strength: float) -> list[str]:
    """What is wrong with an inversion from noise level `noise` to `strength`; name and end are the options that say so."""
    if noise < strength:
        return []
    return [f"{name} ({noise:g}) must be below {end} ({strength:g}), to which the inversion goes"]


class LgtModelOptions(ModelOptions):
    """The model that is made: a U-Net that is told a style, in the latents of a frozen VAE."""

    grid: ClassVar[int] = 8
    latent_side: ClassVar[int] = 8
    leading: ClassVar[tuple[str, ...]] = ("pretrained_model_name_or_path", "vae")

    pretrained_model_name_or_path: Annotated[str | None, Show(kind="file")] = None
    """A model that this trainer saved, file or folder, to go on from with its architecture, styles and VAE; None begins from nothing."""
    vae: Annotated[str, Show(basic=True, kind="file", suggestions=("stabilityai/sd-vae-ft-mse", "toy", "toy:photographs"))] = (
        "stabilityai/sd-vae-ft-mse"
    )
    """The frozen VAE in whose latents the model works: a .safetensors file, a diffusers folder, a hub id, or a small built-in one, `toy`
    for drawn shapes and `toy:photographs`."""
    base_channels: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 128
    """Channels of the U-Net's first level."""
    channel_multipliers: Annotated[tuple[Annotated[Count, Field(le=64)], ...], Field(min_length=1, max_length=6)] = (1, 2, 2)
    """Channels of each level as multiples of base_channels; each further level halves the sides."""
    layers_per_block: Annotated[int, Field(ge=1, le=8)] = 2
    """Residual blocks of a level; style and time scale and shift the activations of each."""
    attention_levels: tuple[WholeNumber, ...] = ()
    """Levels with attention of the image to itself, counted from 0 at full size; the middle always has it. It costs the square of the
    number of positions."""
    attention_head_dim: Annotated[int, Field(ge=4, le=256)] = 64
    """Channels of an attention head; the channels of every level with attention must be a multiple of it."""
    unet_dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Share of activations that the residual blocks drop in training."""
    edge_conditioning: bool = False
    """Tell the network where the image that is transferred has its edges, as three more channels of its input: flow matching alone then
    teaches it to draw what stands there in each style. The map is made of the latents and is nearly the same in every style."""

    edge_scale: Annotated[Literal[1, 2, 4], Show(needs="edge_conditioning")] = 1
    """How many times finer than the latents the map of edges is, with three channels for each of its squares. Above 1 it is read from a
    small picture of the latents, by one linear layer that is fitted to the VAE when the model is made: contours come out where they were,
    and a step takes hardly longer."""

    @property
    def unread(self) -> frozenset[str]:
        return frozenset() if self.pretrained_model_name_or_path is None else frozenset({"vae"})

    @model_validator(mode="after")
    def _architecture_fits_together(self) -> Self:
        raise_all(level_problems(self.base_channels, self.channel_multipliers, self.attention_levels, self.attention_head_dim))
        return self

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": "lgt", "vae_name": file_name(self.vae)}


class LgtDatasetOptions(DatasetOptions):
    """Images in one folder for each style, buckets and caches."""

    by_style: ClassVar[bool] = True

    # A style is all that is said of an image, and it is the name of its folder: everything about captions, classes and masks is not there.
    reg_data_dir: ClassVar[str | None] = None  # type: ignore[misc]
    instance_prompt: ClassVar[str] = ""  # type: ignore[misc]
    class_prompt: ClassVar[str] = ""  # type: ignore[misc]
    num_class_images: ClassVar[int] = 0  # type: ignore[misc]
    dataset_config: ClassVar[str | None] = None  # type: ignore[misc]
    in_json: ClassVar[str | None] = None  # type: ignore[misc]
    caption_extension: ClassVar[str] = ".txt"  # type: ignore[misc]
    caption_separator: ClassVar[str] = ","  # type: ignore[misc]
    shuffle_caption: ClassVar[bool] = False  # type: ignore[misc]
    keep_tokens: ClassVar[int] = 0  # type: ignore[misc]
    keep_tokens_separator: ClassVar[str] = ""  # type: ignore[misc]
    secondary_separator: ClassVar[str] = ""  # type: ignore[misc]
    enable_wildcard: ClassVar[bool] = False  # type: ignore[misc]
    caption_prefix: ClassVar[str] = ""  # type: ignore[misc]
    caption_suffix: ClassVar[str] = ""  # type: ignore[misc]
    caption_dropout_every_n_epochs: ClassVar[int] = 0  # type: ignore[misc]
    caption_tag_dropout_rate: ClassVar[float] = 0.0  # type: ignore[misc]
    caption_token_dropout_rate: ClassVar[float] = 0.0  # type: ignore[misc]
    token_warmup_min: ClassVar[int] = 1  # type: ignore[misc]
    token_warmup_step: ClassVar[float] = 0.0  # type: ignore[misc]
    caption_variants: ClassVar[int] = 16  # type: ignore[misc]
    prior_loss_weight: ClassVar[float] = 1.0  # type: ignore[misc]
    masked_loss: ClassVar[bool] = False  # type: ignore[misc]
    conditioning_data_dir: ClassVar[str | None] = None  # type: ignore[misc]
    alpha_mask: ClassVar[bool] = False  # type: ignore[misc]
    normalize_masked_loss: ClassVar[bool] = False  # type: ignore[misc]
    masked_loss_outside_weight: ClassVar[float] = 0.0  # type: ignore[misc]
    # Images of the wanted style are drawn for every sample, which would have to be encoded in every step.
    cache_latents: ClassVar[bool] = True  # type: ignore[misc]
    color_aug: ClassVar[bool] = False  # type: ignore[misc]
    caches_texts: ClassVar[bool] = False
    cache_text_encoder_outputs: ClassVar[bool] = False  # type: ignore[misc]
    cache_text_encoder_outputs_to_disk: ClassVar[bool] = False  # type: ignore[misc]
    text_encoder_batch_size: ClassVar[int] = 16  # type: ignore[misc]

    train_data_dir: Annotated[str | None, Show(basic=True, kind="folder", suggestions=("toy:styles", "toy:photographs"))] = None
    """Folder with one sub-folder for each style, whose name is the style's; the images need not show the same things. `toy:styles` and
    `toy:photographs` draw a built-in data set."""
    resolution: Annotated[Size, Show(basic=True, unit="px")] = (256, 256)
    min_bucket_reso: Annotated[Side, Show(unit="px")] = 64
    train_batch_size: Annotated[Batch, Show(basic=True)] = 16
    caption_dropout_rate: Fraction = 0.1
    """Chance that a sample is trained without a style: towards the average of all styles, by which the model learns what guidance leads
    away from. Drawn for each sample."""
    num_references: Batch = 8
    """Real images of the wanted style that the style term compares a sample with, drawn for each sample."""
    same_style_rate: Fraction = 0.1
    """Chance that the style a sample is to take on is its own; otherwise it is one of the others, each equally likely."""


class LgtNetworkOptions(ScratchOptions):
    """The weights of the U-Net, all trained."""

    train_text_encoder: ClassVar[bool] = False
    text_encoder_lr: ClassVar[tuple[float, ...]] = ()


class LgtOptimizerOptions(FullOptimizerOptions):
    """Optimizer, learning rate, schedule for training from nothing."""

    learning_rate: Annotated[Rate, Show(basic=True)] = 5e-4
    """Peak learning rate. Prodigy and DAdapt optimizers set their own step size: give them 1."""


class LgtTrainingOptions(TrainingOptions):
    """Length, precision, accumulation, averaging, logging interval."""

    max_train_steps: Annotated[Count, Show(basic=True, unit="steps")] = 20_000
    use_ema: bool = True
    """Keep an exponential moving average of the trained weights; evaluations and saved files use it."""


class LgtObjectiveOptions(ObjectiveSection):
    """The energy of a transferred latent, and what else the velocity field is trained on."""

    leading_parts: ClassVar[tuple[str, ...]] = ("swd", "ssm")
    w_style: Annotated[NotNegative, Show(basic=True)] = 1.0
    """Weight of the style term: the sliced Wasserstein distance between patches of the transferred latent and patches of real images of
    the wanted style."""
    w_content: Annotated[NotNegative, Show(basic=True)] = 1.0
    """Weight of the content term: how much the similarities between places of the transferred latent differ from those of the source."""
    w_flow: NotNegative = 1.0
    """Weight of conditional flow matching on each style (Lipman et al. 2023), by which inversion and generation are right; 0 trains on the
    energy alone."""
    w_low: Annotated[NotNegative, _CONTENT] = 0.1
    """Weight of the squared difference of blurred latents: a small anchor for colours and brightness, to which the content term is blind (a
    negative has the same). Take 0 where styles differ in brightness, such as day and night."""
    low_pass_size: Annotated[int, Field(ge=2, le=32), Show(needs="w_low", fold="Content terms")] = 5
    """Side of the square of latent pixels that w_low averages over."""
    w_edges: Annotated[NotNegative, _CONTENT] = 0.0
    """Weight of 1 - the correlation of the maps of edges of transferred latent and source. Unlike w_content it does not ask areas that
    looked different to look different still, such as the inside of a shape that becomes an outline."""
    descriptor_size: Annotated[Literal[1, 3, 5], _CONTENT] = 3
    """Side of the patches that the content term compares, centred over the image; 1 compares single latent pixels, which tells an image
    from few others."""
    content_positions: Annotated[int, Field(ge=16, le=65536), _CONTENT] = 256
    """Most places that the content term compares with each other; more are thinned out at random."""
    swd_scales: Annotated[tuple[Annotated[int, Field(ge=1, le=31)], ...], Field(min_length=1, max_length=8), _STYLE] = (1, 3, 5)
    """Sides of the patches of the style term, odd numbers of latent pixels."""
    swd_scale_weights: Annotated[tuple[NotNegative, ...], _STYLE] = ()
    """Weight of each of swd_scales; empty gives all 1."""
    style_weights: Annotated[tuple[str, ...], _STYLE] = ()
    """Weight of the style term towards single styles, as name=weight; the others have 1."""
    swd_pooling: Annotated[Literal["style", "sample"], _STYLE] = "style"
    """Whose patches are compared together: those of all samples of a micro-batch with the same wanted style, or those of each sample alone.
    Never those of different styles, for then leaving everything as it is would be as good as a perfect transfer. With sample, splitting
    a batch over processes or accumulation changes nothing."""
    num_projections: Annotated[Batch, _STYLE] = 64
    """Directions along which patches are compared, for each scale."""
    projections: Annotated[Literal["fresh", "fixed"], _STYLE] = "fresh"
    """Draw new directions in each step, or the same ones throughout."""
    ode_integration_steps: Annotated[int, Field(ge=1, le=1000), _PATH] = 4
    """Equal steps from the noise level of a sample to the image, through all of which the energy's gradient goes."""
    integrator: Annotated[Integrator, _PATH] = "euler"
    """How a step is made: euler asks the network once, midpoint and heun twice."""
    energy_start: Annotated[TransferStart, _PATH] = "inversion"
    """Where a sample's transfer begins: inversion leads it towards noise along the velocity of its own style, as transfers do later, so
    that its content is all there; noise mixes it with noise, which is a little faster and forgets content at high levels."""
    energy_from_step: Annotated[WholeNumber, Show(unit="steps", needs="w_flow", fold="Integration")] = 0
    """Optimizer steps of flow matching alone, before the energy joins: inversion means something only once the velocity does."""
    edge_noise: Annotated[NotNegative, _EDGES] = 0.1
    """Most noise that flow matching adds to the map of edges, whose own deviation is 1; how much is drawn for each sample. It keeps the
    network from reading more out of the map than where the edges are, such as the style that it comes from."""
    edge_dropout_rate: Annotated[Fraction, _EDGES] = 0.1
    """Chance that flow matching tells a sample nothing of its edges, by which the model learns to draw from noise alone."""
    back_translation_rate: Annotated[Fraction, _EDGES] = 0.0
    """Chance that flow matching tells a sample the edges of what the model itself makes of it in the style it is to take on, drawn from
    noise, in place of its own: the model learns to draw real images of a style from the edges of another, and to mend what is wrong with
    them. It begins with energy_from_step."""
    min_start: Annotated[Fraction, _PATH] = 0.3
    """Least noise level from which a sample is transferred, 0 the image and 1 noise."""
    max_start: Annotated[Fraction, _PATH] = 1.0
    """Highest noise level from which a sample is transferred."""
    checkpoint_steps: Annotated[bool, _PATH] = True
    """Keep only the states between the integration steps and compute the rest again for the gradient, so that memory hardly grows with
    their number; a third to two thirds more time."""
    w_velocity: Annotated[NotNegative, _FIELD] = 0.0
    """Weight of the mean square of the velocity."""
    w_velocity_tv: Annotated[NotNegative, _FIELD] = 0.0
    """Weight of the mean absolute difference of neighbouring velocities."""

    @field_validator("style_weights")
    @classmethod
    def _names_and_weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        problems, names = [], set[str]()
        for text in value:
            name, equals, weight = text.rpartition("=")
            try:
                right = bool(name.strip() and equals) and 0 <= float(weight) <= VAST
            except ValueError:
                right = False
            if not right:
                problems.append(f"{text!r} is not name=weight with a weight of at least 0, such as monet=2")
            elif name.strip() in names:
                problems.append(f"{name.strip()} is named twice; leave one of its weights out")
            names.add(name.strip())
        raise_all(problems)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        even = [scale for scale in self.swd_scales if scale % 2 == 0]
        if even:
            problems.append(f"swd_scales: {', '.join(map(str, even))} has no middle; take odd numbers, such as 1, 3, 5")
        if len(set(self.swd_scales)) != len(self.swd_scales):
            problems.append(f"swd_scales names a scale twice: {self.swd_scales}")
        if self.swd_scale_weights and len(self.swd_scale_weights) != len(self.swd_scales):
            problems.append(
                f"swd_scale_weights: there are {len(self.swd_scale_weights)} for {len(self.swd_scales)} swd_scales; give as many"
            )
        if self.min_start > self.max_start:
            problems.append(f"min_start ({self.min_start:g}) must not be above max_start ({self.max_start:g})")
        if not (self.w_style or self.w_flow):
            problems.append(
                "w_style and w_flow are both 0, so nothing teaches the model what the styles look like; set one of them above 0"
            )
        raise_all(problems)
        return self

    @property
    def weight_of_style(self) -> dict[str, float]:
        """style_weights as a table."""
        return {name.strip(): float(weight) for name, _, weight in (text.rpartition("=") for text in self.style_weights)}

    @property
    def network_calls(self) -> tuple[int, bool]:
        """Inversion without gradient; with it the first step, whose input needs none, and the later ones, whose input does."""
        return 3, False

    @property
    def compares_samples(self) -> bool:
        """Whether patches of several samples are compared together."""
        return self.swd_pooling != "sample"

    def style_problems(self, styles: Collection[str]) -> list[Problem]:
        """What is wrong with style_weights."""
        unknown = [name for name in self.weight_of_style if name not in styles]
        if not unknown:
            return []
        text = f"style_weights: the data set has no style {', '.join(map(repr, unknown))}; it has {', '.join(sorted(styles))}"
        return [Problem("style_weights", f"{text}. Correct the name, or leave it out")]

    def size_problems(self, sides: Collection[tuple[int, int]]) -> list[Problem]:
        """What is wrong with comparing patches of latents of these sides (h, w)."""
        least = min(min(pair) for pair in sides)
        problems = []
        too_large = [str(size) for size in self.swd_scales if size > least]
        if self.w_style and too_large:
            text = f"swd_scales: patches of {', '.join(too_large)} latent pixels are larger than the smallest latents, with {least} a side"
            problems.append(Problem("swd_scales", f"{text}; leave them out, or train on larger images"))
        if self.w_content and self.descriptor_size // 2 >= least:
            text = f"descriptor_size: patches of {self.descriptor_size} latent pixels stick out of latents with {least} a side"
            problems.append(Problem("descriptor_size", f"{text}; choose a smaller one, or train on larger images"))
        return problems


class LgtSampleOptions(SampleOptions):
    """Evaluation during training: images of every style in every other style, and how good they are."""

    title: ClassVar[str] = "Evaluation"
    leading: ClassVar[tuple[str, ...]] = ("test_image_dir", "test_images_per_style", "sample_every_n_epochs")

    by_prompt: ClassVar[bool] = False
    sample_prompts: ClassVar[str] = ""  # type: ignore[misc]
    sample_negative_prompt: ClassVar[str] = ""  # type: ignore[misc]
    sample_size: ClassVar[Size | None] = None  # type: ignore[misc]

    test_image_dir: Annotated[str | None, Show(kind="folder")] = None
    """Folder with test images, one sub-folder for each style, named as in train_data_dir; None takes training images, held-out ones
    first."""
    test_images_per_style: WholeNumber = 1
    """How many images of each style are transferred, the first by name; 0 takes all."""
    sample_every_n_epochs: Annotated[Count | None, Show(unit="epochs")] = 5
    """Evaluate every this many epochs; None as sample_every_n_steps says."""
    sample_every_n_steps: Annotated[Count | None, Show(unit="steps")] = None
    """Evaluate every this many steps as well; None evaluates with each save."""
    sample_at_first: bool = True
    """Evaluate before the first step too, to compare with."""
    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 15
    """Steps of the inversion, and as many of the generation."""
    sample_sampler: Integrator = "midpoint"
    """How a step is made: euler asks the network once, midpoint and heun twice and are much more exact."""
    sample_strength: Annotated[Positive, Field(le=1)] = 1.0
    """How far an image is taken towards noise before it comes back in the other style: 1 all the way, less keeps more of it."""
    sample_start: TransferStart = "inversion"
    """How it gets there: inversion follows the velocity of its own style backwards, so that the same image comes back in its own style;
    noise mixes it with noise, as in training."""
    sample_start_noise: Annotated[Fraction, Field(lt=1)] = 0.0
    """Noise level that an image is mixed to before its inversion, which goes on from there: plain areas become noise as the model knows
    it, and the finest detail is lost. 0.3 to 0.5 does well; 0 adds none."""
    sample_cfg_scale: NotNegative = 1.0
    """Guidance towards the wanted style and away from the average one; 1 turns it off and halves the time."""
    sample_temperature: NotNegative = 0.0
    """Strength of the noise that is added and taken away again while generating, with the score term that keeps the distribution; 0 adds
    none."""

    @model_validator(mode="after")
    def _starts_before_its_end(self) -> Self:
        raise_all(start_problems("sample_start_noise", self.sample_start_noise, "sample_strength", self.sample_strength))
        return self


class LgtOutputOptions(ModelOutputOptions):
    """Run folder, saved models, states, trackers, metadata."""

    output_name: Annotated[str, Show(basic=True), Field(pattern=r"^[^\x00-\x1f/\\:*?\"<>|.][^\x00-\x1f/\\:*?\"<>|]{0,119}$")] = "styles"
    save_model_as: Literal["safetensors", "diffusers"] = "safetensors"
    """How the model is written. safetensors: one file with U-Net, VAE and the names of the styles, which `lgt_infer.py` reads; diffusers: a
    folder with a part in each sub-folder."""


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
    memory: UNetFullMemoryOptions = UNetFullMemoryOptions()
    objective: LgtObjectiveOptions = LgtObjectiveOptions()
    samples: LgtSampleOptions = LgtSampleOptions()
    output: LgtOutputOptions = LgtOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (Lgt,)
