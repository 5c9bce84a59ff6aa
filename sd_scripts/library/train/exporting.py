"""Writes what users take away from a run, and uploads it: the adapter, or the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.full import WholeNetwork
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.library.parallel.peers import Peers
from sd_scripts.library.parallel.sharding import gathered
from sd_scripts.runs import hub
from sd_scripts.runs.events import Uploaded
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.runs import RunOptions

from .checkpoint import room_for
from .describing import base_facts
from .metadata import DatasetFacts, build

log = logging.getLogger("sd_scripts")

SAVED = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Exporter:
    """Writes the trained network as it is at a step."""

    options: RunOptions
    family: ModelFamily
    parts: Parts
    network: AdapterNetwork | WholeNetwork
    facts: DatasetFacts
    epoch_of: Callable[[int], int]
    run: RunDirectory
    peers: Peers
    warn: Callable[[str], None]
    """Takes sentences for the log, from any thread."""
    whole_backbone: Callable[[Iterable[tuple[str, Tensor]]], nn.Module] | None = None
    """Makes a whole network of the weights of one that is sharded and trained."""
    _uploads: hub.Uploads | None = field(default=None, init=False)

    def __call__(self, path: Path, step: int) -> None:
        """Writes the file or folder `path`; a network that is sharded is gathered for it, which all processes must do together."""
        output, parts = self.options.output, self.parts
        if self.whole_backbone is not None:
            weights = [(name, gathered(tensor, keep=self.peers.is_first)) for name, tensor in parts.backbone.state_dict().items()]
            if self.peers.is_first:
                parts = replace(parts, backbone=self.whole_backbone(weights))
        if not self.peers.is_first:
            return
        texts = build(self.options, base_facts(self.family, parts), step=step, epoch=self.epoch_of(step), dataset=self.facts)
        with room_for(f"{path.name}", path.parent):
            if self.options.method == "network":
                assert isinstance(self.network, AdapterNetwork)
                export(self.network, parts, path, save_model_as=output.save_model_as, precision=output.save_precision, metadata=texts)
            else:
                self.family.save(parts, path, output.save_model_as, SAVED[output.save_precision], texts)
        if output.huggingface_repo_id is not None:
            if self._uploads is None:
                self._uploads = hub.Uploads(output, self.warn, self._uploaded)
            self._uploads.put(path)

    def _uploaded(self, address: str) -> None:
        log.info("uploaded %s", address)
        self.run.log(Uploaded(text=address))

    def finish_uploads(self) -> None:
        """Waits for what is still being uploaded."""
        if self._uploads is not None:
            if self._uploads.left:
                log.info("waiting for %d uploads", self._uploads.left)
            self._uploads.finish()
            self._uploads = None
