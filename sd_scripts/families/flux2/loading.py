"""Load FLUX.2 Klein from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3; write it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sd_scripts.families.common import flux2_loading as flux2
from sd_scripts.families.common.flux2_signs import KLEIN
from sd_scripts.families.common.qwen3 import QWEN3_PART, template_problems
from sd_scripts.families.common.square_vae import SQUARE_VAE
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec

from .facts import FACTS
from .options import KleinModelOptions

_KLEIN_4B, _KLEIN_9B = (Path(__file__).parent / "configs" / version for version in ("klein_4b", "klein_9b"))


def _problems(base: Base, given: Sequence[str], options: KleinModelOptions, dtype: Dtypes) -> list[str]:
    problems = flux2.problems(base, given, "Klein 4B reads with Qwen3-4B, Klein 9B with Qwen3-8B")
    if base.networks["backbone"].module.config.guidance_embeds:
        problems.append(
            f"{BASE}: {base.source.label} embeds a guidance scale, so it is FLUX.2 dev; choose its own family, or a Klein model"
        )
    return problems + template_problems(base.tokenizers.get("te1"), "text_encoder" if "te1" in given else BASE, FACTS.label)


SPEC = FamilySpec(
    name="flux2",
    label=FACTS.label,
    files=(KLEIN,),
    pipelines=("Flux2Klein",),
    configs=_KLEIN_4B,
    parts={"backbone": flux2.TRANSFORMER_PART, "vae": SQUARE_VAE, "te1": QWEN3_PART},
)
LOADER = Loader(
    spec=SPEC,
    options=KleinModelOptions,
    version=Version("flux_2_klein", "FLUX.2-klein", "https://github.com/black-forest-labs/flux2", is_v2=False),
    config_of=flux2.transformer_config,
    untold=flux2.UNTOLD,
    problems=_problems,
    settings=flux2.settings,
    versions={"9b": _KLEIN_9B},
    kept=("is_distilled",),
)
