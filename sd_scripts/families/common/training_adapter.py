"""An adapter that is on the network while it is trained, and off in previews and saved files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import adapter
from sd_scripts.schema.model import FewStepModelOptions


def checks(options: object) -> list[Callable[[], object]]:
    """What is looked at before weights are read, see transformer_loading.gather."""
    if not isinstance(options, FewStepModelOptions) or options.training_adapter is None:
        return []
    file = options.training_adapter
    return [lambda: adapter(file, "training_adapter")]


def equipped(parts: Parts, options: object) -> Parts:
    """The parts with the training adapter that the options name on the transformer; see protocols.ModelFamily."""
    if isinstance(options, FewStepModelOptions) and options.training_adapter is not None:
        from sd_scripts.library.adapters.applying import put_on_for_training

        file = Path(options.training_adapter).expanduser()
        parts.training_adapter = put_on_for_training(parts, file, options.training_adapter_multiplier)
    return parts
