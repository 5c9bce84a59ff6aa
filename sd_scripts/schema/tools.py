"""Options of the tools for adapter and model files, and the registry that command line and Tools tab share."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Count, NotNegative, Number, Options, Positive, Section, Seed, Show, raise_all
from .kohya_words import MODELS_OF_TOOLS
from .model import is_hub_id
from .network import Rank

Precision = Literal["float", "fp16", "bf16"]
AdapterLayout = Literal["kohya", "diffusers", "comfyui"]
DynamicMethod = Literal["rank", "sv_ratio", "sv_fro", "sv_cumulative"]
Quantile = Annotated[float, Field(gt=0, le=1)]


class ReportOptions(Section):
    """What a tool tells about its work."""

    title: ClassVar[str] = "Report"

    report: Annotated[str | None, Show(kind="file")] = None
    """Also write the report as JSON to this file; None shows it on the console only."""


class ToolOptions(Options):
    """All options of one tool, nested by section."""

    name: ClassVar[str]
    """As in TOOLS and in the name of the script."""
    work: ClassVar[str]
    """What does the work: module:function, from the tool's first section to a Report."""
    family: ClassVar[str] = ""
    """The model family whose saved files the tool draws images with, from its options `ckpt` to `out`; empty for all other tools."""
    deed: ClassVar[str] = ""
    """What a tool of a family does, "draw" or "transfer": the page has words for each."""
    in_place: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Options that name what is written and what is read, and may name one file; no other file that is read is ever written over."""
    tab: ClassVar[str] = "tools"
    """Where the page has it: the Tools tab, data for images of a data set, or generate for drawn ones."""
    settled: ClassVar[tuple[str, ...]] = ()
    """Options that the page decides and does not show."""
    hub: ClassVar[tuple[str, ...]] = ()
    """Options that name a model by a path or by its hub id."""
    server: ClassVar[str] = ""
    """The option with the address of a server; where it is given, those of `hub` are names that the server knows."""
    secret: ClassVar[str] = ""
    """Environment variable with a token that it takes: in no file, no command line and no log. The page has a field for it."""
    if TYPE_CHECKING:
        report: ReportOptions

    @property
    def needs_device(self) -> bool:
        """Whether it computes on a GPU, or at length on the processor, and so waits for a device as a training does."""
        return False


class MergeSection(Section):
    """LoRA files merged into a model, or into one another."""

    title: ClassVar[str] = "Merge"

    models: Annotated[tuple[str, ...], Show(basic=True, kind="file"), Field(min_length=1)]
    """LoRA files to merge, in this order. Into a model: lora, dora, loha, lokr and oft, under the names of any trainer. Into one another:
    lora."""
    ratios: Annotated[tuple[Number, ...], Show(basic=True)] = ()
    """Strength of each file in models; empty means 1.0 for all. An oft file has no strength other than 1."""
    base_model: Annotated[str | None, Show(basic=True, kind="file", suggestions=("toy",))] = None
    """Model that the files are merged into: a .safetensors file in the original or the diffusers layout, a diffusers folder, or toy for the
    built-in model of their family. None merges the files into one LoRA file."""
    save_to: Annotated[str, Show(basic=True, kind="file")]
    """File or folder to write; a model is written in the layout of base_model."""
    merge_precision: Literal["same", "float", "fp16", "bf16", "fp8_e4m3fn"] = "same"
    """Precision of a written model; same keeps that of every tensor. Sums are made in float32 and rounded once. fp8_e4m3fn is for models
    that are stored in it: small updates are lost in its rounding, and the report says how much."""
    merge_text_encoder: bool = True
    """Merge the text encoders' part of the files as well; off leaves it out, for a base_model without text encoders."""
    new_rank: Annotated[Rank | None, Show(basic=True)] = None
    """Rank of a merged LoRA file: the sum is approximated by its largest singular values, and the report gives the error. None keeps the
    sum exactly: the ranks of the files add up."""
    new_conv_rank: Annotated[Rank | None, Show(needs="new_rank")] = None
    """Rank of 3x3 convolutions in a merged LoRA file; None takes new_rank."""
    save_precision: Precision = "fp16"
    """Precision of a merged LoRA file."""
    save_model_as: AdapterLayout = "kohya"
    """Names in a merged LoRA file; see docs/adapter-files.md."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.ratios and len(self.ratios) != len(self.models):
            problems.append(f"ratios has {len(self.ratios)} numbers for {len(self.models)} files in models; give one for each, or none")
        if self.base_model is not None:
            if self.new_rank is not None:
                problems.append("new_rank is for merging LoRA files into one another, but base_model is given; remove one of them")
            if self.save_precision != "fp16":
                problems.append("save_precision is for a merged LoRA file; use merge_precision for a model")
            if self.save_model_as != "kohya":
                problems.append("save_model_as is for a merged LoRA file; a model keeps the layout of base_model, so remove it")
        else:
            if self.merge_precision != "same":
                problems.append("merge_precision is for a model; use save_precision for a merged LoRA file")
        raise_all(problems)
        return self


class MergeLora(ToolOptions):
    """Merge LoRA files into a model, or into one another."""

    name: ClassVar[str] = "merge_lora"
    work: ClassVar[str] = "sd_scripts.library.tools.merging:merge"
    script: ClassVar[str] = "networks/merge_lora.py"
    label: ClassVar[str] = "Merge LoRA"
    renamed: ClassVar[dict[str, str]] = {
        **dict.fromkeys(MODELS_OF_TOOLS, "base_model"),
        "precision": "nothing: sums are always made in float32",
        "concat": "nothing: without new_rank files are concatenated, exactly",
        "shuffle": "nothing: concatenation is exact without it",
        "network_weights": "models",
        "no_metadata": "edit_metadata.py to remove keys",
        "device": "nothing: the CPU is enough, one tensor at a time",
        "mem_eff_load_save": "nothing: tensors are always read and written one at a time",
    }

    merge: MergeSection
    report: ReportOptions = ReportOptions()


def _dynamic_problems(method: str, parameter: float | None) -> list[str]:
    """What is wrong with a limit by singular values."""
    if method == "rank":
        return []
    if parameter is None:
        return [f"dynamic_method = {method} needs dynamic_param"]
    if method == "sv_ratio" and parameter < 1:
        return [f"dynamic_param: sv_ratio keeps singular values above the largest divided by it, so it is at least 1, not {parameter:g}"]
    if method != "sv_ratio" and not 0 < parameter <= 1:
        return [f"dynamic_param: {method} keeps a share, so it is between 0 and 1, not {parameter:g}"]
    return []


class ExtractSection(Section):
    """A LoRA file from the difference of two models."""

    title: ClassVar[str] = "Extract"

    model_org: Annotated[str, Show(basic=True, kind="file", suggestions=("toy",))]
    """The original model: a .safetensors file in the original or the diffusers layout, a diffusers folder, or toy for the built-in model of
    the tuned one's family."""
    model_tuned: Annotated[str, Show(basic=True, kind="file")]
    """The model tuned from it, in any of these layouts."""
    save_to: Annotated[str, Show(basic=True, kind="file")]
    """The LoRA file to write (.safetensors); one that is there is replaced in one step."""
    dim: Annotated[Rank, Show(basic=True)] = 16
    """Largest rank of a layer."""
    conv_dim: Annotated[Rank | None, Show(basic=True)] = None
    """Largest rank of a 3x3 convolution; None leaves them out, and the report says what is lost."""
    dynamic_method: Annotated[DynamicMethod, Show(basic=True)] = "rank"
    """How many singular values of a layer are kept, up to dim. rank: dim of them; sv_ratio: those above the largest divided by
    dynamic_param; sv_fro: as many as give this share of the Frobenius norm; sv_cumulative: as many as give this share of their sum."""
    dynamic_param: Annotated[Positive | None, Show(needs="dynamic_method!=rank")] = None
    """The ratio of sv_ratio (2 or more is usual) or the share of sv_fro and sv_cumulative (0 to 1)."""
    clamp_quantile: Quantile = 1.0
    """Cut the largest elements of both matrices of a layer at this quantile of their magnitudes; 1 cuts nothing. kohya's script cuts at
    0.99, which makes the error larger."""
    min_diff: NotNegative = 0.01
    """A text encoder none of whose weights differs by more than this is taken to be the same in both models and left out."""
    extract_text_encoder: bool = True
    """Extract the text encoders' part as well, where both models have text encoders."""
    save_precision: Precision = "fp16"
    """Precision of the LoRA file."""
    save_model_as: AdapterLayout = "kohya"
    """Names in the LoRA file; see docs/adapter-files.md."""
    seed: Seed = 0
    """Start of the random search for the largest singular values of large layers; the result hardly depends on it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        raise_all(_dynamic_problems(self.dynamic_method, self.dynamic_param))
        return self


class ExtractLora(ToolOptions):
    """Extract a LoRA from the difference of two models."""

    name: ClassVar[str] = "extract_lora"
    work: ClassVar[str] = "sd_scripts.library.tools.extracting:extract"
    script: ClassVar[str] = "networks/extract_lora.py"
    label: ClassVar[str] = "Extract LoRA"
    renamed: ClassVar[dict[str, str]] = {
        "load_precision": "nothing: differences are always made in float32",
        "device": "nothing: the CPU is enough, one tensor at a time",
        "no_metadata": "edit_metadata.py to remove keys",
        "mem_eff_safe_open": "nothing: tensors are always read one at a time",
    }

    extract: ExtractSection
    report: ReportOptions = ReportOptions()


class ResizeSection(Section):
    """A LoRA file of another rank with the same effect, as nearly as the rank allows."""

    title: ClassVar[str] = "Resize"

    model: Annotated[str, Show(basic=True, kind="file")]
    """LoRA file to change (lora or dora, names of any trainer)."""
    save_to: Annotated[str, Show(basic=True, kind="file")]
    """The LoRA file to write (.safetensors); one that is there is replaced in one step."""
    new_rank: Annotated[Rank, Show(basic=True)]
    """New rank; with a dynamic_method the largest rank of a layer."""
    new_conv_rank: Rank | None = None
    """New rank of 3x3 convolutions; None takes new_rank."""
    dynamic_method: Annotated[DynamicMethod, Show(basic=True)] = "rank"
    """How many singular values of a layer are kept, up to new_rank. rank: new_rank of them; sv_ratio: those above the largest divided by
    dynamic_param; sv_fro: as many as give this share of the Frobenius norm; sv_cumulative: as many as give this share of their sum."""
    dynamic_param: Annotated[Positive | None, Show(needs="dynamic_method!=rank")] = None
    """The ratio of sv_ratio (2 or more is usual) or the share of sv_fro and sv_cumulative (0 to 1)."""
    save_precision: Literal["same", "float", "fp16", "bf16"] = "same"
    """Precision of the new file; same takes that of the old one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        raise_all(_dynamic_problems(self.dynamic_method, self.dynamic_param))
        return self


class ResizeLora(ToolOptions):
    """Change the rank of a LoRA file."""

    name: ClassVar[str] = "resize_lora"
    work: ClassVar[str] = "sd_scripts.library.tools.resizing:resize"
    script: ClassVar[str] = "networks/resize_lora.py"
    label: ClassVar[str] = "Resize LoRA"
    renamed: ClassVar[dict[str, str]] = {
        "device": "nothing: only small matrices are decomposed",
        "verbose": "nothing: the report always has every layer",
    }

    resize: ResizeSection
    report: ReportOptions = ReportOptions()


class ConvertSection(Section):
    """A LoRA file under other names or in another precision."""

    title: ClassVar[str] = "Convert"

    model: Annotated[str, Show(basic=True, kind="file")]
    """File to convert, of any trainer (kohya, diffusers, ComfyUI, ai-toolkit, OneTrainer, LyCORIS, peft)."""
    save_to: Annotated[str, Show(basic=True, kind="file")]
    """The file to write (.safetensors); one that is there is replaced in one step."""
    save_model_as: Annotated[AdapterLayout, Show(basic=True)] = "kohya"
    """Names in the new file; see docs/adapter-files.md. What has no common names (oft; loha and lokr under diffusers names) gets peft's."""
    save_precision: Literal["same", "float", "fp16", "bf16"] = "same"
    """Precision of the new file; same takes that of the old one."""
    base_model: Annotated[str | None, Show(kind="file", suggestions=("toy",))] = None
    """The model the file is for: a .safetensors file, a diffusers folder, or toy for the built-in model of its family. None finds the
    family by the names in the file and takes the published model."""


class ConvertLora(ToolOptions):
    """Convert a LoRA file between the names of kohya, diffusers and ComfyUI."""

    name: ClassVar[str] = "convert_lora"
    work: ClassVar[str] = "sd_scripts.library.tools.converting:convert"
    script: ClassVar[str] = "networks/convert_lora.py"
    label: ClassVar[str] = "Convert LoRA"
    renamed: ClassVar[dict[str, str]] = {
        "src_path": "model",
        "dst_path": "save_to",
        "dst": "save_model_as",
        "src": "nothing: the names in the file say where it comes from",
    }

    convert: ConvertSection
    report: ReportOptions = ReportOptions()


class VerifySection(Section):
    """What is in a LoRA file, and whether it is whole."""

    title: ClassVar[str] = "Verify"

    model: Annotated[str, Show(basic=True, kind="file")]
    """The LoRA file to check; nothing is written."""
    base_model: Annotated[str | None, Show(kind="file", suggestions=("toy",))] = None
    """The model the file is for: a .safetensors file, a diffusers folder, or toy for the built-in model of its family. None finds the
    family by the names in the file and takes the published model."""
    num_largest: Annotated[Count, Show(unit="layers")] = 10
    """How many of the layers with the largest updates are listed."""


class VerifyLora(ToolOptions):
    """Check a LoRA file: names, shapes, values, and which programs read it."""

    name: ClassVar[str] = "verify_lora"
    work: ClassVar[str] = "sd_scripts.library.tools.verifying:verify"
    script: ClassVar[str] = "networks/verify_lora.py"
    label: ClassVar[str] = "Verify LoRA"

    verify: VerifySection
    report: ReportOptions = ReportOptions()


class MetadataSection(Section):
    """The texts in the header of a .safetensors file."""

    title: ClassVar[str] = "Metadata"

    model: Annotated[str, Show(basic=True, kind="file")]
    """A .safetensors file of any kind."""
    set_keys: Annotated[tuple[str, ...], Show(basic=True)] = ()
    """Texts to set, as key=value, for example modelspec.title=Stars. Nothing else in the file changes."""
    remove_keys: Annotated[tuple[str, ...], Show(basic=True)] = ()
    """Keys to remove; a * stands for anything, for example ss_dataset*."""
    save_to: Annotated[str | None, Show(kind="file", needs="set_keys or remove_keys")] = None
    """File to write; None changes model itself, which is replaced in one step."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            f"set_keys: {text!r} is not key=value, such as modelspec.title=Stars"
            for text in self.set_keys
            if not text.partition("=")[0].strip() or "=" not in text
        ]
        problems += [f"set_keys: {key} is a key of the format itself" for key in self.keys_to_set if key == "__metadata__"]
        raise_all(problems)
        return self

    @property
    def keys_to_set(self) -> dict[str, str]:
        """set_keys as a table."""
        return {key.strip(): value for key, _, value in (text.partition("=") for text in self.set_keys)}


class EditMetadata(ToolOptions):
    """Show or edit the metadata of a .safetensors file without touching its tensors."""

    name: ClassVar[str] = "edit_metadata"
    work: ClassVar[str] = "sd_scripts.library.tools.headers:edit"
    script: ClassVar[str] = "networks/edit_metadata.py"
    label: ClassVar[str] = "Metadata"
    in_place: ClassVar[tuple[tuple[str, str], ...]] = (("save_to", "model"),)

    metadata: MetadataSection
    report: ReportOptions = ReportOptions()


class FetchSection(Section):
    """A model on the hub, and what of it is wanted."""

    title: ClassVar[str] = "Fetch"

    hub_id: Annotated[str, Show(basic=True)]
    """The model on the hub, as owner/name, such as stabilityai/stable-diffusion-xl-base-1.0. It comes into the hub's cache, where every run
    finds it under that name."""
    look_only: Annotated[bool, Show(basic=True)] = False
    """Only say what it is: how many files, how large, how much of it is here already, free disk, licence, and whether it is gated."""
    fetch_revision: str | None = None
    """Branch, tag or commit; None takes the main branch."""
    fetch_files: tuple[str, ...] = ("*.json", "*tokenizer*/*", "*/*.safetensors", "*.jinja", "*.txt", "*.model")
    """Which files, by their names, where a * stands for anything. Of weights these are those in the folders of a pipeline; *.safetensors
    takes those beside them, too."""
    leave_files: tuple[str, ...] = ("*.fp16*", "*.bf16*", "*.fp32*", "*.non_ema*")
    """Which of these not: copies of the weights in another precision double a fetch."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        raise_all([] if is_hub_id(self.hub_id) else [f"hub_id: {self.hub_id!r} is not the name of a model on the hub, owner/name"])
        return self


class FetchModel(ToolOptions):
    """Fetch a model from the hub, with its size, licence and free disk said before, and its progress while it comes. Stopped, it goes on
    where it was."""

    name: ClassVar[str] = "fetch_model"
    work: ClassVar[str] = "sd_scripts.library.tools.fetching:fetch"
    script: ClassVar[str] = "networks/fetch_model.py"
    label: ClassVar[str] = "Fetch model"
    secret: ClassVar[str] = "HF_TOKEN"

    fetch: FetchSection
    report: ReportOptions = ReportOptions()


FILE_TOOLS: tuple[type[ToolOptions], ...] = (MergeLora, ExtractLora, ResizeLora, ConvertLora, VerifyLora, EditMetadata, FetchModel)
"""Those for files of any family."""
"""The tools by name, in the order of the page."""
