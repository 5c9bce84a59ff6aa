"""An adapter that is on the network while it is trained, and off in previews and saved files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import adapter


def checks(options: Any) -> list[Callable[[], object]]:
    """What is looked at before weights are read, see transformer_loading.gather."""
    return [lambda: adapter(options.training_adapter, "training_adapter")] if options.undoes_distillation else []


def equipped(parts: Parts, options: Any) -> Parts:
    """The parts with the training adapter that the options name on the transformer; see protocols.ModelFamily."""
    if options.undoes_distillation:
        from sd_scripts.library.adapters.applying import put_on_for_training

        file = Path(options.training_adapter).expanduser()
        parts.training_adapter = put_on_for_training(parts, file, options.training_adapter_multiplier)
    return parts
