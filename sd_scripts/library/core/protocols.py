"""The few interfaces between engine, families and objectives, and the values that pass between them.

Canonical convention, kept everywhere outside a family: t in [0, 1], 0 is the clean image and 1 is noise;
x_t = a(t) x0 + s(t) noise; velocity is noise - x0.

Shapes: B samples, C latent channels, h w latent sides, H W image sides in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from PIL import Image
from torch import Tensor, nn

from sd_scripts.dataset.plan import Plan
from sd_scripts.runs.rundir import RunDirectory

Kind = Literal["epsilon", "v_prediction", "velocity", "sample"]
"""What a network predicts: noise, v = a noise - s x0 (Salimans and Ho 2022), velocity = noise - x0, or x0 itself."""

Condition = dict[str, Tensor]
"""What one sample is conditioned on, without a batch dimension; cacheable. Padding and masks are made in `denoise`."""

ESTIMATE = "estimate"
"""Entry of a condition with the network's own estimate of x0 (C, h, w), in models with self-conditioning; without it there is none."""

EDGES = "edges"
"""Entry of a condition with the map of edges (E, h, w) of what is transferred, in models with edge conditioning; without it they are
unknown."""

StateDict = dict[str, Tensor]

Dtypes: TypeAlias = torch.dtype | Mapping[str, torch.dtype]
"""Precision of backbone and text encoders: one for all, or one for each by its name in Parts.modules()."""

DeviceMap: TypeAlias = torch.device | Mapping[str, torch.device]
"""Where networks are read to: one device for all, or one for each by its name in Parts.modules(). Of a network on META everything is
checked, and no weights are read."""


def mapped(device: DeviceMap, name: str) -> torch.device:
    """Where the network of this name is read to."""
    return device if isinstance(device, torch.device) else device[name]


class Path(Protocol):
    """A probability path from image to noise: x_t = a(t) x0 + s(t) noise."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """a and s of times t (B,) in [0, 1], float32, shape (B,)."""
        ...


class NetworkPath(Path, Protocol):
    """The path that a network was trained on."""

    def model_times(self, t: Tensor) -> Tensor:
        """The clock (B,), float32, that networks on this path are given for times t (B,)."""
        ...


class TrainingAdapter(Protocol):
    """An adapter file that is on a frozen backbone while a run trains another one beside it."""

    @property
    def name(self) -> str:
        """Its file name."""
        ...

    @property
    def sha256(self) -> str:
        """Of the file."""
        ...

    @property
    def strength(self) -> float: ...

    def disabled(self) -> AbstractContextManager[None]:
        """Inside, the model is what it was without this adapter; others stay."""
        ...


@runtime_checkable
class InHostRam(Protocol):
    """A layer that keeps tensors in host RAM, outside of its parameters."""

    @property
    def host_tensors(self) -> list[Tensor]: ...


class Visits(Protocol):
    """What brings networks that are kept elsewhere to where they compute, while images are rendered."""

    @property
    def tiled(self) -> bool:
        """Whether the VAE decodes in tiles."""
        ...

    def bring(self, module: nn.Module) -> None: ...


@dataclass
class Parts:
    """The loaded networks of one model, and what its files say about how they are to be used."""

    backbone: nn.Module
    """The denoising network: UNet or transformer."""
    vae: nn.Module
    text_encoders: dict[str, nn.Module]
    """By the name that the exported adapter keys use: te1, te2."""
    tokenizers: dict[str, Any]
    path: NetworkPath
    kind: Kind
    scheduler_config: dict[str, Any]
    """Configuration of the diffusers scheduler that samples this model."""
    source: str
    """What was loaded, for messages and metadata: a file name or hub id, never a folder path."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the family that encode_prompts needs, such as max_token_length; kept texts are of these settings."""
    processor: Any | None = None
    """What prepares control images for a text encoder that sees, in families that have one."""
    denoising: dict[str, Any] = field(default_factory=dict)
    """Settings of the family that denoise and preview alone need, such as guidance_scale; self_conditioning where the network takes an
    estimate, edge_conditioning where it takes a map of edges."""

    training_adapter: TrainingAdapter | None = None
    """What is on the backbone in training and in validation, also of the base that a prior compares with, but in no preview and in no saved
    file."""
    visits: Visits | None = None
    """Who brings networks from where they are kept; None where each computes where it is."""

    @property
    def device(self) -> torch.device:
        """Where the backbone is."""
        return _first_weight(self.backbone).device

    def bring(self, module: nn.Module) -> torch.device:
        """Brings a network that is about to compute to where it does so, if it is kept elsewhere; its device."""
        if self.visits is not None:
            self.visits.bring(module)
        return _first_weight(module).device

    def without_training_adapter(self) -> AbstractContextManager[None]:
        """Inside, the model is what it is without training_adapter."""
        return nullcontext() if self.training_adapter is None else self.training_adapter.disabled()

    def modules(self) -> dict[str, nn.Module]:
        """All networks by name: backbone, vae, te1, te2, ..."""
        return {"backbone": self.backbone, "vae": self.vae, **self.text_encoders}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Precision of a network: that of its first floating-point parameter, which no adapter replaces."""
    return _first_weight(module).dtype


def _first_weight(module: nn.Module) -> nn.Parameter:
    return next(parameter for parameter in module.parameters() if parameter.is_floating_point())


@dataclass(frozen=True)
class Version:
    """A model by the words that headers of saved files have for it."""

    kohya: str
    """ss_base_model_version."""
    modelspec: str
    """modelspec.architecture."""
    layout: str
    """modelspec.implementation for names in the original layout: it names the layout, not the program."""
    is_v2: bool | None
    """ss_v2; None where kohya's programs know no such model."""


@dataclass(frozen=True)
class Geometry:
    """How an image was cut, in pixels: its (width, height), (left, top) of the crop after resizing, (width, height) of the result."""

    original: tuple[int, int]
    crop: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True)
class Preview:
    """An image to render. seed decides the noise; sampler is a name of schema.samples.SAMPLERS or auto."""

    prompt: str
    negative_prompt: str = ""
    width: int = 1024
    height: int = 1024
    seed: int = 42
    steps: int = 28
    cfg_scale: float = 6.0
    sampler: str = "auto"
    guidance: float = 3.5
    """What an embedding of guidance is told, in models that have one."""
    controls: tuple[Image.Image, ...] = ()
    """Images to be edited, RGB, in models that edit."""
    scheduler: str = "auto"
    """What chooses the noise levels, by ComfyUI's name; see schema.samples.Scheduler."""
    shift: float | None = None
    """Of the scheduler's levels, in flow models; None as the model's usual graph has it."""


OnStep = Callable[[int, int, Tensor], None]
"""(step from 1, number of steps, the estimate of the clean latents (B, C, h, w) that this step was made with); what it raises ends the
rendering. Families that draw image by image tell the steps of each."""


class ModelFamily(Protocol):
    """What a model knows, and nothing about training. Stateless: everything loaded is in Parts."""

    name: ClassVar[str]
    grid: ClassVar[int]
    """Image sides are multiples of this, in pixels."""
    separate_texts: ClassVar[bool]
    """Whether each text encoder makes entries of its own, so that one can be trained while the other's stay cached."""

    def load(self, options: Any, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts on `device`; backbone and text encoders in dtype. Raises OptionError with a sentence for what cannot be read.

        without names parts that nobody will run: they have their structure, on the meta device, and no weights are read for them.
        """
        ...

    def tiny(self) -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode."""
        ...

    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB images: (B, 3, H, W) in [-1, 1] -> (B, C, h, w) float32; the mean of the posterior."""
        ...

    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images of scaled latents: (B, C, h, w) -> (B, 3, H, W) in [-1, 1], float32."""
        ...

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of the condition of each caption, without gradient unless grad mode is on.

        encoders: names of text encoders, for only the entries that they make; None means all. Families whose encoders make one entry
        together are never asked for less (separate_texts is False).
        """
        ...

    def version(self, parts: Parts) -> Version:
        """What saved files say that they, or their model, are."""
        ...

    def usual_size(self, parts: Parts) -> tuple[int, int]:
        """(width, height) in pixels of an image where nobody says otherwise: what the model was made for."""
        ...

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        """Fewest and most control images that a sample has; (0, 0) for models that do not edit."""
        ...

    def size_condition(self, geometry: Geometry) -> Condition:
        """The part of the condition that follows from how the image was cut; empty for most families."""
        ...

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's prediction, of kind parts.kind, at canonical times t (B,); same shape as x_t, float32."""
        ...

    def objective(
        self,
        options: Any,
        path: Path,
        kind: Kind,
        scheduler_config: Mapping[str, Any] = MappingProxyType({}),
        colours: Tensor | None = None,
    ) -> Objective:
        """The objective that the options of a run's section ask for; see objectives.make, which makes those that families share."""
        ...

    def equipped(self, parts: Parts, options: Any, device: torch.device) -> Parts:
        """Loaded parts with what the model options put on them besides weights, such as an adapter for training, made on `device`.

        Networks are changed in place.
        """
        ...

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """Text part of the conditions of so many captions as long as this one, on the meta device, as are the networks."""
        ...

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What the text encoder of this name makes of so many captions as long as this one, on the meta device, as is the encoder."""
        ...

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that get an adapter by default, by module name (backbone, te1, ...); conv adds 3x3 convolutions."""
        ...

    def save(
        self,
        parts: Parts,
        path: FilePath,
        save_model_as: Literal["safetensors", "diffusers"],
        dtype: torch.dtype | None,
        metadata: Mapping[str, str],
    ) -> None:
        """Writes a whole model to `path`, aside and renamed when it is complete.

        `safetensors` is one file of the layout in which the model was published, `diffusers` a folder. dtype None keeps the precision of
        each network; metadata are texts for the header of the file, or of the backbone's files.
        """
        ...

    def preview(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> list[Image.Image]:
        """Renders images of equal size, steps, cfg_scale and sampler in one batch; on_step is told of every step."""
        ...


class PublishedFamily(ModelFamily, Protocol):
    """A family whose models are loaded; the counterpart of NewFamily."""

    def published(self, options: Any, header: Any) -> tuple[Parts, str]:
        """The published model that these options most likely mean, on the meta device, and its name for people.

        header: of the file that the options name; None for a hub id. Raises OptionError for a file of another family.
        """
        ...


class EditingFamily(PublishedFamily, Protocol):
    """A family whose models edit images; controls are asked of models with num_controls above 0.

    Parts.settings has `model_version`, as people call it, and `area`, the pixels of an image where nobody says otherwise.
    """

    def control_area(self, options: Any) -> int:
        """Pixels of a control image as the VAE gets it, found without loading the model. Raises OptionError for a broken folder."""
        ...

    def control_size(self, parts: Parts, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a control image of this size is given to the VAE."""
        ...

    def encode_instructions(self, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Text rows of instructions on the same control images, (3, H, W) in [-1, 1] each: those that all instructions share, (P, D),
        and those of each instruction, (S, D).

        A condition has both together under `text`, and the encoded control images under `control_0`, `control_1`, ...
        """
        ...

    def control_pixels(self, parts: Parts, image: Image.Image) -> Tensor:
        """A control image as the VAE gets it, (3, H, W) in [-1, 1]."""
        ...

    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """Conditions of the requests' prompts, and of their negative prompts where guidance is on."""
        ...


@dataclass(frozen=True)
class Beginning:
    """What a model that is made by its run is made from."""

    seed: int
    sizes: tuple[tuple[int, int], ...]
    """(width, height) of all buckets and previews, in pixels."""
    files: Mapping[str, str]
    """Content of the text files of `NewFamily.files`, by name."""


class NewFamily(ModelFamily, Protocol):
    """A family whose models are made by the run that trains them."""

    file_names: ClassVar[tuple[str, ...]]
    """Names of what `files` makes."""

    def is_new(self, options: Any) -> bool:
        """Whether these model options ask for a new model, and not for one that is loaded."""
        ...

    def files(self, options: Any, captions: Collection[str]) -> dict[str, str]:
        """Text files that the model cannot do without, by name, such as a tokenizer made from captions.

        Called once in the life of a run, in its first process; the run folder keeps them, and later starts read them there.
        """
        ...

    def check_sizes(self, parts: Parts, sizes: Collection[tuple[int, int]]) -> None:
        """Raises OptionError when the model cannot work on images (width, height) of all these sizes, in pixels."""
        ...

    def check_captions(self, parts: Parts, captions: Collection[str]) -> None:
        """Raises OptionError for captions of a data set that the model cannot be trained on."""
        ...

    def latent_factor(self, parts: Parts) -> int:
        """How many pixels one latent is wide."""
        ...

    def build(self, options: Any, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """A model with random weights, which follow from beginning.seed alone; the counterpart of `load`.

        Raises OptionError with every problem: sizes that the architecture cannot halve, files that cannot be read.
        """
        ...


class Sources(Protocol):
    """What evaluations of a run are made of."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) in pixels, each once."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for a person."""
        ...

    def lines(self, plan: Plan) -> list[str]:
        """How many there are, for a dry run."""
        ...


class Samples(Protocol):
    """What shows during training how far the network is."""

    def render(self, step: int, missing_only: bool = False) -> None: ...

    def try_out(self) -> str:
        """Renders what takes most memory, as short as possible, into nowhere; says what it was. Raises what rendering raises."""
        ...


@runtime_checkable
class PromptSamples(Samples, Protocol):
    """Samples that are made of prompts, and of others too."""

    def render_other(self, step: int, prompts: str) -> None:
        """Renders prompts that are not the run's own, written as sample_prompts are. The first process knows them."""
        ...


class EdgeFamily(ModelFamily, Protocol):
    """A family some of whose models have edge conditioning."""

    def edge_map(self, parts: Parts, latents: Tensor) -> Tensor:
        """Where the edges of what latents (B, C, h, w) show are, as the network is told: (B, E, h, w), float32."""
        ...


class EvaluatingFamily(ModelFamily, Protocol):
    """A family whose runs are shown by evaluations of its own instead of prompts; see FamilyFacts.evaluates."""

    def sources(self, options: Any, plan: Plan, cache_folder: FilePath) -> Sources:
        """What evaluations will be made of. Raises OptionError for what is not there or cannot be read."""
        ...

    def evaluation(
        self,
        parts: Parts,
        options: Any,
        plan: Plan,
        sources: Any,
        data: Any,
        run: RunDirectory,
        saves: bool,
        agreed: Callable[[list[int]], list[int]],
        progress: Callable[[], None],
    ) -> Samples:
        """What makes evaluations of these sources, which `sources` has found, and of the images of `data`.

        saves: off in processes that only lend their share of a network to the one that writes. agreed gives that one's choice to all that
        compute together; progress is called now and then, for those who wait.
        """
        ...


class Denoiser(Protocol):
    """What an objective sees of family, parts, network and conditions."""

    @property
    def kind(self) -> Kind:
        """What the network predicts."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether all processes must call the network equally often, because each holds a share of it."""
        ...

    @property
    def takes_estimate(self) -> bool:
        """Whether the network is one with self-conditioning, which is told an ESTIMATE."""
        ...

    @property
    def takes_edges(self) -> bool:
        """Whether the network is one with edge conditioning, which is told EDGES."""
        ...

    def edges(self, latents: Tensor) -> Tensor:
        """The maps of edges (B, E, h, w) of latents (B, C, h, w), for networks with edge conditioning."""
        ...

    def only(self, rows: Sequence[int]) -> Denoiser:
        """The denoiser of these samples of the batch."""
        ...

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Prediction at times t (B,); conditions are bound already."""
        ...

    def base(self, x_t: Tensor, t: Tensor) -> Tensor:
        """The same without the adapter and without gradient."""
        ...

    def without_text(self, x_t: Tensor, t: Tensor) -> Tensor:
        """The same with the condition of the empty caption in place of each sample's text."""
        ...

    def told(self, entries: Sequence[Condition]) -> Denoiser:
        """The denoiser with these entries in the condition of each sample, in place of those of the same names: another style, an
        ESTIMATE of the clean latents (C, h, w), for networks with self-conditioning, or EDGES (E, h, w); zeros are none."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch; everything that depends on the sample number is chosen already."""

    x0: Tensor
    """(B, C, h, w) scaled latents, float32."""
    conditions: list[Condition]
    numbers: Tensor
    """(B,) int64 sample numbers, counted from the start of the run over all GPUs."""
    weights: Tensor
    """(B,) weight of each sample in the loss."""
    names: list[str]
    """File of each image, for messages."""
    masks: Tensor | None = None
    """(B, 1, h, w) in [0, 1], or None."""
    towards: list[Condition] = field(default_factory=list)
    """Per sample what it is to become, in place of its own condition; empty where nothing is transferred."""
    goals: list[str] = field(default_factory=list)
    """Per sample the style it is to take on; empty for the average of all styles."""
    references: list[Tensor] = field(default_factory=list)
    """Per sample (R, C, h', w') latents of real images of that style."""
    captions: list[str] = field(default_factory=list)
    """The caption each sample got, for live text encoding and for logs."""
    regularisation: Tensor | None = None
    """(B,) bool: the sample is a regularisation image; None is as good as all False."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """(B,) weight of a term of the loss by its name (schema.anchored_flow.TERMS), where data sets or samples have weights of their own."""
    step: int = 0
    """Optimizer step that the batch belongs to, from 0; -1 for held-out images."""
    progress: float = 0.0
    """Share of the run's steps that are done before it, in [0, 1)."""

    def to(self, device: torch.device) -> Batch:
        """The same on a device; the numbers stay, because they are drawn from on the CPU, and who is a regularisation image with them."""
        at_home = {"numbers", "regularisation"}
        return replace(self, **{one.name: _moved(getattr(self, one.name), device) for one in fields(self) if one.name not in at_home})

    def __getitem__(self, rows: slice) -> Batch:
        """The samples of these rows."""
        whole = {"step", "progress"}
        return replace(self, **{one.name: _rows(getattr(self, one.name), rows) for one in fields(self) if one.name not in whole})


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors on the device, in whatever holds them."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: _moved(one, device) for name, one in value.items()}
    return [_moved(one, device) for one in value] if isinstance(value, list) else value


def _rows(value: Any, rows: slice) -> Any:
    """The rows of a tensor or list, or of each in a dictionary."""
    if isinstance(value, dict):
        return {name: one[rows] for name, one in value.items()}
    return None if value is None else value[rows]


@dataclass(frozen=True)
class Losses:
    """Loss of each sample, shape (B,), and named parts of it for the log."""

    loss: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """How a clean latent becomes a loss."""

    def __call__(self, model: Denoiser, batch: Batch, seed: int) -> Losses:
        """Draws from rng_for(seed, number) for each number of the batch, on the CPU."""
        ...


class Network(Protocol):
    """What is trained, an adapter or the model itself, as the loop sees it."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Its tensors by name, in an order that is the same in every process and run; those that require a gradient are trained."""
        ...

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of every network it is part of."""
        ...

    def disabled(self) -> AbstractContextManager[None]:
        """Within the block the networks compute as before training."""
        ...

    def after_step(self) -> None:
        """What the options want done to the weights after each optimizer step."""
        ...
