"""run_meta.json: with what a run was trained, enough to repeat it and to tell whether another start continues it."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.files import write_atomically

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy", "pillow")
_SECRET = re.compile(r"(?i)(key|token|password|secret)s?$")
ROOT = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """Installed versions of the libraries that take part."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def git_revision() -> str | None:
    """Commit of this repository, with `+` when files differ from it; None where there is no git."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if status.strip() else "")


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line in which the value of every option that is named like a secret is replaced."""
    shown, hide = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        # max_token_length and keep_tokens are no secrets: only names that end in the word are.
        secret = name.startswith("--") and _SECRET.search(name) is not None and not name.endswith("keep_tokens")
        shown.append("***" if hide else f"{name}=***" if secret and equals else argument)
        hide = secret and not equals
    return shown


def devices() -> list[dict[str, Any]]:
    """Name and memory of each GPU that is visible; empty on a CPU."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": item.name, "memory_gib": round(item.total_memory / 2**30, 2)} for item in properties]


def write_meta(
    run: RunDirectory,
    *,
    fingerprint: str,
    settings: dict[str, Any],
    model_files: dict[str, str],
    dataset: dict[str, Any],
    seed: int,
    processes: int,
    ranks: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes run_meta.json for this start; `dataset` holds dataset_hash and counts, model_files a hash of each, ranks who takes part."""
    meta = {
        "fingerprint": fingerprint,
        "settings": settings,
        "model_files": model_files,
        **dataset,
        "seed": seed,
        "processes": processes,
        "ranks": list(ranks),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "cuda": torch.version.cuda,
        "devices": devices(),
        "git": git_revision(),
        "command": without_secrets([Path(sys.executable).name, *sys.argv]),
    }
    write_atomically(run.meta, json.dumps(meta, indent=1, ensure_ascii=False, default=list) + "\n")
