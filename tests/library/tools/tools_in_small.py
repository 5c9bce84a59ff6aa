"""Small models on disk and adapters for them, as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sd_scripts.families.flux.model import Flux
from sd_scripts.families.flux.options import FluxModelOptions, FluxNetworkOptions
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions, QwenImageNetworkOptions
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sd.options import SdModelOptions
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.families.zimage.options import ZImageModelOptions, ZImageNetworkOptions
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.network import NetworkOptions, UNetNetworkOptions
from tests.library.networks.adapters_in_small import attached, family_of, shaken

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Small:
    """A model as a diffusers folder, with its file in the original layout inside."""

    name: str
    folder: Path
    file: Path

    def load(self, path: Path) -> Parts:
        """The model in a file or folder, float32, read by its family."""
        more = {"ae": str(self.folder), "clip_l": str(self.folder), "t5xxl": str(self.folder)} if path.is_file() else {}
        if self.name == "flux":
            return Flux().load(FluxModelOptions(pretrained_model_name_or_path=str(path), **more), CPU, torch.float32)
        if self.name == "qwen_edit":
            more = {"vae": str(self.folder), "text_encoder": str(self.folder), "model_version": "edit-2509"} if path.is_file() else {}
            return QwenEdit().load(QwenImageModelOptions(pretrained_model_name_or_path=str(path), **more), CPU, torch.float32)
        if self.name == "zimage":
            more = {"vae": str(self.folder), "text_encoder": str(self.folder)} if path.is_file() else {}
            return ZImage().load(ZImageModelOptions(pretrained_model_name_or_path=str(path), **more), CPU, torch.float32)
        if self.name == "sdxl":
            return Sdxl().load(SdxlModelOptions(pretrained_model_name_or_path=str(path)), CPU, torch.float32)
        return Sd().load(SdModelOptions(pretrained_model_name_or_path=str(path)), CPU, torch.float32)


def tiny(name: str) -> Parts:
    """A family's tiny model: sd1, sd2, sdxl, flux, qwen_edit, zimage."""
    return {
        "qwen_edit": QwenEdit().tiny,
        "zimage": ZImage().tiny,
        "flux": Flux().tiny,
        "sdxl": Sdxl().tiny,
        "sd1": lambda: Sd().tiny(False),
        "sd2": lambda: Sd().tiny(True),
    }[name]()


def on_disk(name: str, parts: Parts, folder: Path, dtype: torch.dtype = torch.float32, stem: str = "base") -> Small:
    """The model in both layouts."""
    family_of(parts).save(parts, folder / stem, "diffusers", dtype, {})
    file = folder / stem / f"{stem}.safetensors"
    family_of(parts).save(parts, file, "safetensors", dtype, {"modelspec.title": "base"})
    return Small(name, folder / stem, file)


def adapter(
    parts: Parts,
    path: Path,
    kind: str = "lora",
    layout: str = "kohya",
    *,
    text: bool = True,
    seed: int = 1,
    precision: str = "float",
    **changes,
) -> Path:
    """A file with random values for the model; the model itself stays as it is."""
    family = family_of(parts).name
    options = {"network_type": kind, "network_dim": 4, "network_alpha": 2.0, **changes}
    if family not in ("qwen_edit", "zimage"):
        options["train_text_encoder"] = text
    options |= {"train_t5xxl": True} if family == "flux" and text else {}
    sections: dict[str, type[NetworkOptions]] = {
        "flux": FluxNetworkOptions,
        "qwen_edit": QwenImageNetworkOptions,
        "zimage": ZImageNetworkOptions,
    }
    network = shaken(attached(parts, sections.get(family, UNetNetworkOptions)(**options)), seed)
    export(network, parts, path, save_model_as=layout, precision=precision)
    network.detach()
    return path


def weights(parts: Parts) -> dict[str, Tensor]:
    """Every layer's weight by `<module>.<layer>`."""
    return {name: layer.weight.detach() for name, layer in layers_of(parts).items()}


def largest_difference(a: Parts, b: Parts) -> float:
    """Of the weights of two models, relative to the largest weight."""
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max() / left[name].abs().max()) for name in left)
