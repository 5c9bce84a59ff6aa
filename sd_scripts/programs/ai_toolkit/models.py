"""ai-toolkit's names of models, and its keys that hold them."""

from __future__ import annotations

from collections.abc import Mapping

from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import switch

from ..table import DIFFUSERS_LINE, NamedModel, Table, kind_of_run, only, unneeded, version_of

PROGRAM = "ai-toolkit"
SCHEDULERS = ("ddpm", "flowmatch")
"""What models on a noise schedule are trained with, and what those with flow matching."""
TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
"""What a process is called that trains a LoRA or a model."""
_EDIT = {"model_version": "edit"}
_MODULATED = {"lora_targets": "all_with_modulation"}
_LATENT = 8
"""The side in pixels of what it counts as a token where it does not find the network's patches."""

MODELS: Mapping[str, NamedModel] = {
    "sd1": NamedModel("sd", "Stable Diffusion 1.5"),
    "sd15": NamedModel("sd", "Stable Diffusion 1.5"),
    "sd2": NamedModel("sd", "Stable Diffusion 2"),
    "sdxl": NamedModel("sdxl", "SDXL"),
    "flux": NamedModel("flux", "FLUX.1"),
    "flex1": NamedModel("flux", "Flex.1, a FLUX.1 made smaller"),
    "chroma": NamedModel("chroma", "Chroma", by_size=DIFFUSERS_LINE, token=_LATENT),
    "krea2": NamedModel("krea2", "Krea 2", token=_LATENT, beyond="the blocks that join the texts' layers"),
    "anima": NamedModel("anima", "Anima"),
    "zimage": NamedModel("zimage", "Z-Image", layers={"lora_targets": "all", "exclude_modules": ["refiner"]}),
    "qwen_image": NamedModel("qwen_edit", "Qwen-Image", {"model_version": "image"}, layers=_MODULATED),
    "qwen_image_edit": NamedModel("qwen_edit", "Qwen-Image-Edit", _EDIT, layers=_MODULATED),
    "qwen_image_edit_plus": NamedModel("qwen_edit", "Qwen-Image-Edit-2509 or 2511", {"model_version": "edit-2509"}, layers=_MODULATED),
    "flux_kontext": NamedModel("kontext", "FLUX.1 Kontext"),
    "flux2": NamedModel("flux2_dev", "FLUX.2 dev", by_size=DIFFUSERS_LINE),
    "flux2_klein_4b": NamedModel("flux2", "FLUX.2 Klein 4B", by_size=DIFFUSERS_LINE),
    "flux2_klein_9b": NamedModel("flux2", "FLUX.2 Klein 9B", by_size=DIFFUSERS_LINE),
    **{
        name: NamedModel("", label)
        for name, label in {
            "sd3": "Stable Diffusion 3",
            "pixart": "PixArt",
            "pixart_sigma": "PixArt Sigma",
            "auraflow": "AuraFlow",
            "lumina2": "Lumina 2",
            "vega": "Segmind Vega",
            "ssd": "SSD-1B",
            "flex2": "Flex.2",
            "chroma_radiance": "Chroma Radiance",
            "zeta_chroma": "Zeta Chroma",
            "zimage_l2p": "Z-Image in pixels",
            "hidream": "HiDream-I1",
            "hidream_e1": "HiDream-E1",
            "hidream_o1": "HiDream-O1",
            "omnigen2": "OmniGen2",
            "wan21": "Wan 2.1, a model of videos",
            "wan21_i2v": "Wan 2.1, a model of videos",
            "wan22_14b": "Wan 2.2, a model of videos",
            "wan22_14b_i2v": "Wan 2.2, a model of videos",
            "wan22_5b": "Wan 2.2, a model of videos",
            "ltx2": "LTX-2, a model of videos",
            "ltx2.3": "LTX-2, a model of videos",
            "ltx2.5": "LTX-2, a model of videos",
            "cogview4": "CogView4",
            "f-lite": "F-Lite",
            "krea2:o_edit": "Krea 2 with control images",
            "krea2:o_edit_turbo": "Krea 2 with control images",
            "ideogram4": "Ideogram 4",
            "ernie_image": "ERNIE-Image",
            "nucleus_image": "Nucleus Image",
            "prx_pixel": "PRX in pixels",
            "boogu_image": "Boogu",
            "boogu_image_edit": "Boogu",
            "mageflow": "MageFlow",
            "mageflow_edit": "MageFlow",
            "minimax_h3": "MiniMax-H3, a model of videos",
            "minimax_h3_ref2va": "MiniMax-H3, a model of videos",
            "ace_step": "ACE-Step, a model of sounds",
        }.items()
    },
}

TAGS = {"qwen_image_edit_plus:2511": {"model_version": "edit-2511"}}
"""What a tag after the name of a model says."""
SWITCHES = {
    "is_v2": "sd2",
    "is_v3": "sd3",
    "is_xl": "sdxl",
    **{f"is_{name}": name for name in ("pixart", "pixart_sigma", "auraflow", "flux", "lumina2", "ssd", "vega")},
}
"""Switches that named the model before `arch` did."""
PREVIEW_GUIDANCE = {"zimage": 1.0}
"""What the guidance of a family's previews is more here than in its pipeline, which that program uses."""
SHIFTS = ("shift", "flux_shift", "lumina2_shift")
"""Kinds of times that are shifted as a sampler's are."""
TABLE: Table = {
    **dict.fromkeys(("model.arch", *(f"model.{name}" for name in SWITCHES)), unneeded("the kind of run says it")),
    "model.use_flux_cfg": only(False, "give guidance_scale and sample_cfg_scale"),
}


def said_by(process: Mapping[str, object]) -> str:
    """The name of the model that a job is for, with its tag."""
    named = process.get("model")
    named = named if isinstance(named, Mapping) else {}
    said = str(named.get("arch") or next((one for key, one in SWITCHES.items() if switch(named.get(key))), "sd1"))
    more = named.get("model_kwargs")
    edits = isinstance(more, Mapping) and switch(more.get("edit"))
    return f"{said.partition(':')[0]}:o_edit" if edits else said


def run_for(file: str, said: str, method: str) -> tuple[type[RunOptions], NamedModel]:
    """The kind of run for a name. Raises OptionError for what is not trained here."""
    return kind_of_run(PROGRAM, file, MODELS, said if said in MODELS else said.partition(":")[0], method)


def name_of(family: str, values: Mapping[str, object]) -> str | None:
    """That program's name for a model of a family with these options; None where it has none."""
    tagged = {name: NamedModel(MODELS[name.partition(":")[0]].family, name, options) for name, options in TAGS.items()}
    plain = {name: model for name, model in MODELS.items() if name not in ("sd1", "flex1", "sd2")}
    said = {**tagged, **plain}
    found = next((name for name, model in said.items() if model.family == family and model.options.items() <= values.items()), None)
    return "sd2" if found == "sd15" and version_of(family, str(values["pretrained_model_name_or_path"])) else found
