"""Adapters (LoRA and relatives) on a model: attach and train them, write and read their files, merge and apply them."""

from .applying import AppliedAdapters, apply_adapters
from .attaching import attach
from .files import export, read
from .maths import KINDS, AdapterLayer, Kind
from .merge import apply, merge_into
from .names import names_for, names_of
from .network import Network, NormReport

__all__ = [
    "KINDS",
    "AdapterLayer",
    "AppliedAdapters",
    "Kind",
    "Network",
    "NormReport",
    "apply",
    "apply_adapters",
    "attach",
    "export",
    "merge_into",
    "names_for",
    "names_of",
    "read",
]
