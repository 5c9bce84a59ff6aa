"""What runs on FLUX.1 have of their own in each section, and their kinds."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sd_scripts.families.common.clip_t5_options import ClipT5ModelOptions, ClipT5ObjectiveOptions, FluxAdapterOutputOptions
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.fields import NotNegative, Rate, Show, Verdict, raise_all
from sd_scripts.schema.memory import FullMemoryOptions
from sd_scripts.schema.model import file_name
from sd_scripts.schema.network import OF_TEXT, Indices, RankOrNone, TextNetworkOptions, TransformerFullOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import FlowSampleOptions


class FluxModelOptions(ClipT5ModelOptions):
    """The FLUX.1 base model: dev, schnell or one made from them."""

    apply_t5_attn_mask: bool = False
    """Hide the padding after a short caption from T5 and from the transformer. FLUX was trained without this; files made with it want it
    when images are made, too."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        values = {"model_type": "flux", "apply_t5_attn_mask": self.apply_t5_attn_mask, "guidance_scale": self.guidance_scale}
        return values | ({"vae_name": file_name(self.ae)} if self.ae else {})


class FluxDatasetOptions(DatasetOptions):
    """Images, captions, buckets and caches."""

    cache_text_encoder_outputs: bool = True
    """Encode every caption once; the text encoders then leave the GPU. Must be off when both are trained; CLIP-L may be trained while
    T5's outputs stay cached."""


class FluxNetworkOptions(TextNetworkOptions):
    """The adapter on a FLUX transformer."""

    backbone: ClassVar[str] = "the transformer"

    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), OF_TEXT] = ()
    """Learning rate of the text encoders' adapters, one number for both or one for each (CLIP-L, T5); 0 leaves an encoder as it is; empty
    takes learning_rate."""
    train_t5xxl: Annotated[bool, Show(needs="train_text_encoder")] = False
    """With train_text_encoder, attach the adapter to T5-XXL as well as to CLIP-L."""
    split_qkv: bool = False
    """Give query, key and value (and the MLP of single blocks) adapters of their own. Off, they share one down matrix, as in kohya's files;
    on, a file with kohya's names holds them side by side and its ranks are three (four) times as large."""
    train_blocks: Literal["all", "double", "single"] = "all"
    """Which transformer blocks get an adapter."""
    train_double_block_indices: Annotated[Indices, Show(needs="train_blocks=all|double")] = "all"
    """Numbers of the double blocks that get an adapter: all, none, or such as 0-3,5."""
    train_single_block_indices: Annotated[Indices, Show(needs="train_blocks=all|single")] = "all"
    """Numbers of the single blocks that get an adapter: all, none, or such as 0-3,5."""
    img_attn_dim: RankOrNone | None = None
    """Rank for the image's attention in double blocks; 0 leaves it out, None takes network_dim."""
    txt_attn_dim: RankOrNone | None = None
    """Rank for the text's attention in double blocks; 0 leaves it out, None takes network_dim."""
    img_mlp_dim: RankOrNone | None = None
    """Rank for the image's MLP in double blocks; 0 leaves it out, None takes network_dim."""
    txt_mlp_dim: RankOrNone | None = None
    """Rank for the text's MLP in double blocks; 0 leaves it out, None takes network_dim."""
    img_mod_dim: RankOrNone | None = None
    """Rank for the image's modulation in double blocks; 0 leaves it out, None takes network_dim."""
    txt_mod_dim: RankOrNone | None = None
    """Rank for the text's modulation in double blocks; 0 leaves it out, None takes network_dim."""
    single_dim: RankOrNone | None = None
    """Rank for attention and MLP in single blocks; 0 leaves them out, None takes network_dim."""
    single_mod_dim: RankOrNone | None = None
    """Rank for the modulation in single blocks; 0 leaves it out, None takes network_dim."""
    in_dims: Annotated[tuple[RankOrNone, ...], Field(max_length=5)] = ()
    """Ranks for the five input layers: image, time, vector, guidance, text; 0 leaves one out. Empty means none of them."""

    @property
    def frozen_encoders(self) -> tuple[str, ...]:
        """T5, unless it is trained, too."""
        return () if self.train_t5xxl else ("te3",)

    @property
    def shares_downs(self) -> bool:
        """See NetworkOptions."""
        return not self.split_qkv

    @model_validator(mode="after")
    def _flux_agrees(self) -> Self:
        if self.in_dims and len(self.in_dims) != 5:
            raise_all([f"in_dims has {len(self.in_dims)} numbers; give five (image, time, vector, guidance, text), or none"])
        return self


class FluxFullOptions(TransformerFullOptions):
    """The weights of a FLUX transformer; its text encoders stay as they are."""


class FluxSampleOptions(FlowSampleOptions):
    """Previews of a FLUX model."""

    own_flags: ClassVar[tuple[str, ...]] = ("g",)

    sample_prompts: Annotated[str, Show(basic=True, kind="text")] = ""
    """Prompts, one a line, or the path of a .txt, .toml or .json file. kohya's flags work: --w --h --d (seed) --l (CFG) --s (steps) --n
    (negative) --g (embedded guidance). Empty makes no previews."""
    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Denoising steps of a preview without --s; schnell needs 4."""
    sample_cfg_scale: NotNegative = 1.0
    """True guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time."""
    sample_guidance_scale: NotNegative = 3.5
    """Guidance that dev's embedding is told in a preview without --g; no effect on schnell."""

    @property
    def embedded_guidance(self) -> float:
        return self.sample_guidance_scale


class _FluxRun(RunOptions):
    family: ClassVar[str] = "flux"
    verdicts: ClassVar[Mapping[str, Verdict]] = {
        "block_lr": ("not supported", "rates of blocks are for UNets; an adapter has network_reg_lrs"),
        "clip_skip": ("not supported", "FLUX always reads the last layer of its text encoders. Remove it"),
        "max_token_length": ("not needed", "FLUX has t5xxl_max_token_length"),
    }

    model: FluxModelOptions
    dataset: FluxDatasetOptions
    objective: ClipT5ObjectiveOptions = ClipT5ObjectiveOptions()
    samples: FluxSampleOptions = FluxSampleOptions()


class FluxNetwork(_FluxRun):
    """LoRA and its relatives on FLUX.1."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "flux_train_network.py"
    label: ClassVar[str] = "FLUX LoRA"

    network: FluxNetworkOptions = FluxNetworkOptions()
    output: FluxAdapterOutputOptions = FluxAdapterOutputOptions()


class FluxFull(_FluxRun):
    """DreamBooth and fine-tuning of FLUX.1."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "flux_train.py"
    label: ClassVar[str] = "FLUX DreamBooth and fine-tuning"
    verdicts: ClassVar[Mapping[str, Verdict]] = {
        **_FluxRun.verdicts,
        **dict.fromkeys(
            ("learning_rate_te", "learning_rate_te1", "learning_rate_te2", "train_text_encoder", "stop_text_encoder_training"),
            ("not needed", "FLUX's text encoders are not trained together with the whole transformer; an adapter can train them"),
        ),
    }

    network: FluxFullOptions = FluxFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    memory: FullMemoryOptions = FullMemoryOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (
    FluxNetwork,
    FluxFull,
)
