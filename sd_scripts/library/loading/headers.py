"""The header of a file of weights in any form that is read here."""

from __future__ import annotations

from pathlib import Path

from sd_scripts.runs.model_headers import Header, is_gguf, read_safetensors


def read_header(path: Path, option: str) -> Header:
    """See read_safetensors; of a GGUF file, what stands in its place. Raises OptionError."""
    if is_gguf(path):
        from .few_bits import GgufFile

        return GgufFile(path, option).header()
    return read_safetensors(path, option)
