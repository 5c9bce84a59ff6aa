"""From what a person wrote (a path, a hub id, `toy`) to files on this disk. Knows files and the hub, not models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sd_scripts.toy
from sd_scripts.runs.downloads import fetched
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import PIPELINE_FILES
from sd_scripts.schema.model import built_in, is_hub_id, not_there

HUB_PATTERNS = (*PIPELINE_FILES, "*/config.json", "scheduler/*.json", "*tokenizer*/*", "processor/*processor_config.json")


@dataclass(frozen=True)
class Source:
    """A model on this disk."""

    path: Path
    """An existing file or folder."""
    label: str
    """What to call it in messages and metadata: file name, folder name or hub id; never a whole path."""

    @property
    def is_file(self) -> bool:
        """Whether it is a single file."""
        return self.path.is_file()


def toy_of(family: str) -> Path:
    """Where the built-in model of a family is, if this copy has one."""
    return Path(sd_scripts.toy.__file__).parent / "bases" / family


def find(
    option: str, value: str, family: str, revision: str | None = None, variant: str | None = None, folders: Sequence[str] = ()
) -> Source:
    """The model that `value` of this option names, fetched from the hub when it is a hub id.

    folders are the sub-folders whose weights are needed. Raises OptionError with a sentence for what is not there.
    """
    if (name := built_in(value, family)) is not None:
        path = toy_of(name)
        if not path.is_dir():
            raise OptionError(f"{option}: the built-in model {value} is not in this copy; get sd_scripts/toy/bases/{name} from git")
        return Source(path, value)
    path = Path(value).expanduser()
    if path.exists():
        if revision is not None:
            raise OptionError(
                f"revision: {revision} is a branch, tag or commit of a hub model, but {option} is {value} on this disk; remove it"
            )
        # Not resolved: in the hub cache a file is a link to one without a name.
        path = Path(os.path.abspath(path))
        return Source(path, path.name)
    if is_hub_id(value):
        return Source(_fetched(option, value, revision, variant, folders), value)
    raise OptionError(not_there(option, value, toy_of(family).is_dir()))


def _fetched(option: str, hub_id: str, revision: str | None, variant: str | None, folders: Sequence[str]) -> Path:
    """The folder in the hub cache with the model's configuration, tokenizers and safetensors weights."""
    ending = f".{variant}.safetensors" if variant else ".safetensors"
    # Weights may be split: diffusion_pytorch_model-00001-of-00002.safetensors, with .fp16 before the dash or before the ending.
    weights = [pattern for folder in folders for pattern in (f"{folder}/*{ending}", f"{folder}/*.index*.json")]
    if variant:
        weights += [f"{folder}/*.{variant}-*.safetensors" for folder in folders]
    # Without a variant, files such as model.fp16.safetensors would double the download.
    ignored = [] if variant else ["*/*.fp16*", "*/*.bf16*", "*/*.fp32*", "*/*.non_ema*"]
    top = ["config.json", f"diffusion_pytorch_model{ending}"] if tuple(folders) == ("vae",) else []
    return fetched(option, hub_id, [*HUB_PATTERNS, *weights, *top], ignored, revision)
