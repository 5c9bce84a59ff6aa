"""Find and check CLIP tokenizers. transformers silently makes an empty one where files are missing; here that is a sentence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from transformers import CLIPTokenizer

from sd_scripts.schema.errors import OptionError

logger = logging.getLogger(__name__)

HUB_ID = "openai/clip-vit-large-patch14"
"""Where CLIP's vocabulary (1.4 MB, MIT licence) is published; both encoders of SDXL use it."""
_CACHED = ((HUB_ID, ""), ("stabilityai/stable-diffusion-xl-base-1.0", "tokenizer/"))
_VOCABULARY = ("vocab.json", "merges.txt")
PADDING = {"tokenizer": "<|endoftext|>", "tokenizer_2": "!"}
"""Padding of SDXL's tokenizers, where only the vocabulary is at hand."""


def is_there(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return (folder / "tokenizer.json").is_file() or all((folder / name).is_file() for name in _VOCABULARY)


def read(folder: Path, encoder: Mapping[str, Any], option: str, label: str, pad_token: str | None = None) -> CLIPTokenizer:
    """The tokenizer in a folder, for an encoder of this configuration. OptionError when it is missing, empty or of another encoder."""
    if not is_there(folder):
        raise OptionError(f"{option}: {label} has no tokenizer.json, and no vocab.json with merges.txt. Download the model again")
    tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True, **({} if pad_token is None else {"pad_token": pad_token}))
    size = encoder["vocab_size"]
    # A few more embeddings than tokens occur (tables padded for speed); fewer would be read out of range.
    if not 0.9 * size <= len(tokenizer) <= size:
        raise OptionError(
            f"{option}: {label} has {len(tokenizer)} tokens, but its text encoder knows {size}; the two do not belong together"
        )
    tokenizer.model_max_length = min(tokenizer.model_max_length, encoder["max_position_embeddings"])
    return tokenizer


def find_for_file(file: Path, shipped: Path, encoders: Sequence[Mapping[str, Any]], option: str) -> list[CLIPTokenizer]:
    """Both tokenizers of a model in a single file, which holds none: beside the file, with the program, in the hub cache, on the hub.

    Raises OptionError that says what to put where.
    """
    found = []
    for name, encoder in zip(PADDING, encoders, strict=True):
        own = next((root / name for root in (file.parent, shipped) if is_there(root / name)), None)
        if own is not None:
            found.append(read(own, encoder, option, f"{name} beside {file.name}"))
            continue
        # Both have the same vocabulary, so either folder, or the bare vocabulary, serves for the other.
        folder = (
            next((root / other for root in (file.parent, shipped) for other in PADDING if is_there(root / other)), None) or _on_the_hub()
        )
        if folder is None:
            raise OptionError(
                f"{option}: {file.name} holds no tokenizer, and none was found. Put CLIP's vocab.json and merges.txt "
                f"(from {HUB_ID} on the hub, 1.4 MB) into a folder named tokenizer beside the file, "
                f"{file.parent.name}/tokenizer"
            )
        found.append(read(folder, encoder, option, f"the tokenizer for {file.name}", PADDING[name]))
    return found


def _on_the_hub() -> Path | None:
    """The folder of CLIP's vocabulary in the hub cache, fetched into it where there is a network; None without."""
    for hub_id, inside in _CACHED:
        paths = [huggingface_hub.try_to_load_from_cache(hub_id, inside + name) for name in _VOCABULARY]
        if all(isinstance(path, str) for path in paths):
            return Path(str(paths[0])).parent
    if huggingface_hub.constants.is_offline_mode():
        return None
    logger.info("fetching CLIP's vocabulary (1.4 MB) from the hub, %s", HUB_ID)
    try:
        # A snapshot asks the hub once before it fetches; single files would be tried for half a minute where there is no network.
        folder = Path(huggingface_hub.snapshot_download(HUB_ID, allow_patterns=list(_VOCABULARY)))
    except (HfHubHTTPError, OSError) as err:
        logger.info("the hub cannot be reached: %s", err)
        return None
    return folder if is_there(folder) else None
