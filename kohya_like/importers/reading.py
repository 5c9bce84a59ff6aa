"""Recognises what kind of file somebody dropped on the page, and hands it to the importer for it."""

from __future__ import annotations

from sd_scripts.schema.errors import OptionError

from .report import Imported


def read(name: str, data: bytes) -> Imported:
    """The settings in a file: kohya_ss GUI JSON or TOML, an sd-scripts configuration, our own TOML, or a LoRA .safetensors.

    name is the file's name, for messages and where the content alone does not say what it is. Raises OptionError with a sentence for a
    file that is none of these, or is damaged.
    """
    raise OptionError(f"{name} is not recognised")
