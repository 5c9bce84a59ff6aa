"""Find and check tokenizers. transformers silently makes an empty one where files are missing; here that is a sentence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from transformers import CLIPTokenizer

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer of a family: its folder in the diffusers layout, its class, and where its vocabulary is published."""

    folder: str
    pad_token: str | None
    """Padding where only the vocabulary is at hand; None takes the class's own."""
    cls: type[Any] = CLIPTokenizer
    vocabulary: tuple[str, ...] = ("vocab.json", "merges.txt")
    """Files that are enough to make one, besides tokenizer.json."""
    published: tuple[tuple[str, str], ...] = (
        ("openai/clip-vit-large-patch14", ""),
        ("stabilityai/stable-diffusion-xl-base-1.0", "tokenizer/"),
    )
    """Hub id and folder of the vocabulary; the first is fetched where none is cached."""
    words: str = "CLIP's"
    size: str = "1.4 MB"
    vocab_size: str = "vocab_size"
    """Entry of its encoder's configuration that says how many tokens are known there."""


def is_there(folder: Path, spec: TokenizerSpec) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return (folder / "tokenizer.json").is_file() or all((folder / name).is_file() for name in spec.vocabulary)


def read(spec: TokenizerSpec, folder: Path, encoder: Mapping[str, Any], option: str, label: str, pad_token: str | None = None) -> Any:
    """The tokenizer in a folder, for an encoder of this configuration. OptionError when it is missing, empty or of another encoder."""
    if not is_there(folder, spec):
        raise OptionError(f"{option}: {label} has no tokenizer.json, and no {' with '.join(spec.vocabulary)}. Download the model again")
    try:
        tokenizer = spec.cls.from_pretrained(str(folder), local_files_only=True, **({} if pad_token is None else {"pad_token": pad_token}))
        num_tokens, longest = len(tokenizer), int(tokenizer.model_max_length)
    except Exception as err:
        # transformers and tokenizers end with whatever a damaged file runs into, bare Exceptions of Rust among them.
        where = _not_json(folder) or f"one of its files ({type(err).__name__}: {str(err)[:200]})"
        raise OptionError(f"{option}: {label} cannot be read: {where} is damaged. Download it again") from err
    encoder = encoder.get("text_config", encoder)
    size = encoder[spec.vocab_size]
    # A few more embeddings than tokens occur (tables padded for speed); fewer would be read out of range.
    if not 0.9 * size <= num_tokens <= size:
        raise OptionError(f"{option}: {label} has {num_tokens} tokens, but its text encoder knows {size}; the two do not belong together")
    # T5's positions are relative: it names no largest number of them.
    tokenizer.model_max_length = min(longest, encoder.get("max_position_embeddings", longest))
    return tokenizer


def _not_json(folder: Path) -> str:
    """The name of a file in the folder that ought to be JSON and is not; empty when all are."""
    for file in sorted(folder.glob("*.json")):
        try:
            json_of(file.read_bytes())
        except ValueError:
            return file.name
    return ""


def find_for_file(
    file: Path, configs: Path, specs: Sequence[TokenizerSpec], encoders: Sequence[Mapping[str, Any]], option: str
) -> list[Any]:
    """The tokenizers of a model in a single file, which holds none: beside it, beside its configuration, in the hub cache, on the hub.

    Raises OptionError that says what to put where.
    """
    found = []
    for spec, encoder in zip(specs, encoders, strict=True):
        own = next((root / spec.folder for root in (file.parent, configs) if is_there(root / spec.folder, spec)), None)
        if own is not None:
            # What lies beside a file without its model's configuration may be another model's, with another padding.
            pad_token = None if configs == file.parent else spec.pad_token
            found.append(read(spec, own, encoder, option, f"{spec.folder} beside {file.name}", pad_token))
            continue
        # Tokenizers of one class have the same vocabulary, so the folder of another, or the bare vocabulary, serves too.
        others = [other.folder for other in specs if other.cls is spec.cls]
        folder = next((root / other for root in (file.parent, configs) for other in others if is_there(root / other, spec)), None)
        folder = folder or _on_the_hub(spec)
        if folder is None:
            hub_id, inside = spec.published[0]
            raise OptionError(
                f"{option}: {file.name} holds no tokenizer, and none was found. Put {spec.words} {' and '.join(spec.vocabulary)} "
                f"(from {'/'.join(filter(None, (hub_id, inside.rstrip('/'))))} on the hub, {spec.size}) into a folder named {spec.folder} "
                f"beside the file, {file.parent.name}/{spec.folder}"
            )
        found.append(read(spec, folder, encoder, option, f"the tokenizer for {file.name}", spec.pad_token))
    return found


def _on_the_hub(spec: TokenizerSpec) -> Path | None:
    """The folder of a vocabulary in the hub cache, fetched into it where there is a network; None without."""
    for hub_id, inside in spec.published:
        paths = [huggingface_hub.try_to_load_from_cache(hub_id, inside + name) for name in spec.vocabulary]
        if all(isinstance(path, str) for path in paths):
            return Path(str(paths[0])).parent
    if huggingface_hub.constants.is_offline_mode():
        return None
    hub_id, inside = spec.published[0]
    logger.info("fetching %s vocabulary (%s) from the hub, %s", spec.words, spec.size, hub_id)
    try:
        # A snapshot asks the hub once before it fetches; single files would be tried for half a minute where there is no network.
        folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=[inside + name for name in spec.vocabulary]))
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as err:
        logger.info("the hub cannot be reached: %s", err)
        return None
    return folder / inside if is_there(folder / inside, spec) else None
