"""What a family states about itself without torch: frozen, complete, and with no default that could be wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class TensorNames(Protocol):
    """Names and shapes of the tensors in a file, see runs.model_headers.Header."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def has(self, *parts: str) -> bool:
        """Whether some tensor's name contains one of these."""
        ...

    def starts(self, *prefixes: str) -> bool:
        """Whether some tensor's name starts with one of these."""
        ...


@dataclass(frozen=True)
class Sign:
    """A kind of file that is told by the names and shapes of its tensors."""

    what: str
    """A noun for a sentence: "a VAE alone"."""
    recognises: Callable[[TensorNames], bool]
    """True for no file of another family, but for one that trains the same network."""
    companion: bool = False
    """Whether it is of a network that stands beside those of several families, such as a text encoder: it tells no family."""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """What memory, kernels and compiled code follow from. Functions take the model options of a run."""

    head_sizes: Callable[[Any], tuple[int, ...]]
    """Numbers of each attention head: in published models, or as the options have it."""
    text_lengths_vary: Callable[[Any], bool]
    """Whether the denoising network is given texts of different lengths."""
    always_masked: bool
    """Whether attention is told in every call what is padding; off where only texts of different lengths need that."""
    mostly_weights: bool
    """Whether the network's weights are most of what training has on the GPU."""
    guided_together: bool
    """Whether previews ask the network for both sides of guidance at once."""
    quantized_encoder: str | None
    """The text encoder that text_encoder_quantization is about, by its name in Parts.modules(); None where no option quantises one."""
    vae_in_16_bits: bool
    """Whether the published VAE computes in 16 bits what it does in 32."""


@dataclass(frozen=True)
class KohyaVersion:
    """A later version of a family, which kohya's scripts are told by a switch."""

    switch: str
    recognises: Callable[[TensorNames], bool]
    """Whether a model's file is one of it."""
    text_width: int
    """cross_attention_dim of the UNet in a diffusers folder."""
    names: str
    """An expression on names of its models, whatever the case of letters."""


@dataclass(frozen=True, kw_only=True)
class KohyaFacts:
    """What kohya's programs (sd-scripts, and its page kohya_ss) have for a family that they train as well, to read what they write."""

    asked: int
    """In which order a file is asked whether it is for this family, from 0."""
    boxes: tuple[str, ...]
    """Switches that say so."""
    versions: tuple[KohyaVersion, ...]
    """Its later versions, whose switches say the family where neither its options nor names of models do."""
    marks: tuple[str, ...]
    """Options that only the family's scripts have."""
    hints: tuple[str, ...]
    """Options that all scripts have, and that are on for this family mostly."""
    models: tuple[str, ...]
    """Pieces of names of its base models, in small letters."""
    side: int | None
    """A file without any other sign is for it from this resolution on, in pixels; None never."""
    model_type: str | None
    """The model_type of its scripts; None where they have no such option."""
    like: tuple[str, ...]
    """Families that are trained there and not here, and are more like this one than like the others."""
    prefix: str
    """How names that are for this family alone begin; empty where none do."""
    names: Mapping[str, str]
    """What the page calls otherwise for this family, with the name that others have for it."""
    options: Mapping[str, tuple[str, ...]]
    """What its scripts call options that have another name here, by the option; the first of several names decides."""
    types: Mapping[str, str]
    """Modules and types of adapters that are for this family alone, with the type that they are, in small letters."""
    defaults: Mapping[str, object]
    """Defaults of its scripts that are others than ours and change what is trained."""
    text_rates: tuple[str, ...]
    """Learning rates of the text encoders of a whole model, one for each."""
    dreambooth_trains_text: bool
    """Whether a script for DreamBooth trains the text encoder unless it is told not to."""
    unet_blocks: tuple[int, int, int] | None
    """Input, middle and output blocks that have ranks and rates of their own; None without a UNet."""
    middle_parts: int
    """In how many parts the middle block has them there: of three the second alone has transformers."""
    swaps_pairs: bool
    """Whether blocks_to_swap there counts half as double blocks, and the rest twice as single blocks."""


@dataclass(frozen=True, kw_only=True)
class AdapterMarks:
    """By what the header of an adapter's file is known to be for a family."""

    architectures: tuple[str, ...]
    """How ss_base_model_version or modelspec.architecture begins, in small letters."""
    text_widths: tuple[int, ...]
    """Width of the texts that its UNet's attention reads; empty without a UNet."""
    layers: str
    """A regular expression for a name of a layer; families that stand later in lists are asked first."""


@dataclass(frozen=True, kw_only=True)
class PublishedBase:
    """What is known of published models by their names."""

    pieces: tuple[str, ...]
    """Pieces that all occur in the name, in small letters; the first entry of a family that fits counts, so the last has none."""
    licence: str
    """The licence in a word or two, for sentences."""
    undistilled: str | None
    """What to train in the place of a model that was distilled to few steps; None for others, and for those made to be trained."""


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """Everything the program must know of a family besides its options and its model. What is missing is an error at import."""

    label: str
    """The family's name on the page."""
    place: int
    """Where it stands in lists, beside what it is like: tens leave room between. Two families never have the same."""
    edits: bool
    """Whether its models may take control images: an EditingFamily."""
    lora_module: str | None
    """What in kohya's programs trains such a LoRA, for headers; None for families without adapters."""
    signs: tuple[Sign, ...]
    """Kinds of its files and of those that are taken for them; the first that recognises a file counts."""
    companions: tuple[str, ...]
    """Model options that name a network beside the base model's own."""
    whole_files: bool
    """Whether a single file of it holds all networks of a model, so that nothing else is looked for."""
    network: NetworkFacts
    evaluates: bool
    """Whether its runs are shown by evaluations of its own, and not by prompts."""
    demo: str | None
    """Built-in preset of an adapter that teaches the family's toy base a star, or an edit; the demo takes that of the first family which
    has one."""
    labels: Mapping[str, str]
    """What options are called on the page where they mean something else than elsewhere."""
    kohya: KohyaFacts | None
    """None for a family that kohya's programs do not train, or not as this one does."""
    adapters: AdapterMarks | None
    """None for a family without adapters."""
    bases: tuple[PublishedBase, ...]
    """Its published models; empty where none are."""
