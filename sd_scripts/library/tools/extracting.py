"""Extract a LoRA file from two models: the best approximation of low rank of what tuning changed, layer by layer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.adapters.layers import examples
from sd_scripts.library.adapters.layouts import tensors_of
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.tools import ExtractSection

from .adapters import DTYPES, in_precision, network_texts, with_alpha
from .low_rank import Limit, clamped, decompose, squared_error, squared_norm
from .merging import divided, matrices
from .models import TOY, ModelOnDisk, built_in, open_model
from .report import Report, size_text, table
from .tensor_files import Spool


@dataclass
class Extracted:
    """What was extracted, by matrix, and what could not be. Energies are squared norms."""

    changes: dict[str, Change] = field(default_factory=dict)
    left_out: dict[str, float] = field(default_factory=dict)
    """Energy of differences that a LoRA does not express, or was not asked to."""
    encoders: dict[str, float] = field(default_factory=dict)
    """Largest difference of a weight in the text encoders that were left out."""
    same: int = 0

    @property
    def relative(self) -> float:
        """Norm of all errors by the norm of all differences of the layers in the file."""
        energy = sum(change.energy for change in self.changes.values())
        return math.sqrt(sum(change.error for change in self.changes.values()) / energy) if energy else 0.0

    @property
    def share_left_out(self) -> float:
        """Norm of the differences that were left out by the norm of all."""
        lost = sum(self.left_out.values())
        return math.sqrt(lost / (lost + sum(change.energy for change in self.changes.values()))) if lost else 0.0


@dataclass(frozen=True)
class Change:
    """One matrix: its rank in the file, the energy of the difference, and of what the file lacks of it."""

    rank: int
    energy: float
    error: float
    wide: bool

    @property
    def relative(self) -> float:
        """Norm of the error by the norm of the difference."""
        return math.sqrt(self.error / self.energy)


@torch.no_grad()
def extract(options: ExtractSection) -> Report:
    """Writes the LoRA file. Raises OptionError, and writes nothing, when the models do not belong together or do not differ."""
    base, tuned, target = _opened(options)
    names, found = base.layers.names, Extracted()
    modules = _modules(base, tuned, options, found)
    layers = [name for name in base.layers.modules if name.partition(".")[0] in modules]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in layers:
        whole = names.fused(name)
        groups.setdefault(whole.layers if whole is not None else (name,), []).append(name)
    texts: dict[str, str] = {}
    with Spool(target) as spool:
        for group in Bar(groups.values(), desc="extracting", unit="layer", delay=2, leave=False):
            for together in matrices(group, names, options.save_model_as):
                texts = _extract(base, tuned, together, options, found, spool) or texts
        if not spool.planned:
            raise OptionError(
                f"model_tuned: no layer of {tuned.label} differs from {base.label}, apart from {len(found.left_out)} that were left out; "
                "there is nothing to extract"
            )
        _other_differences(base, tuned, modules, layers, found)
        spool.finish(texts | _header(base, tuned, options, found))
    return _report(base, tuned, target, found)


def _opened(options: ExtractSection) -> tuple[ModelOnDisk, ModelOnDisk, Path]:
    problems: list[Problem] = []
    models: list[ModelOnDisk] = []
    for option, value in (("model_tuned", options.model_tuned), ("model_org", options.model_org)):
        with gathering(problems):
            is_toy = value == TOY and bool(models)
            models.append(open_model(built_in(models[0].layers.architecture, option) if is_toy else value, option))
    target = Path(options.save_to).expanduser()
    if target.suffix != ".safetensors":
        problems.append(Problem("save_to", f"save_to: {target.name} has to end with .safetensors"))
    refuse(problems)
    tuned, base = models
    if base.layers.architecture is not tuned.layers.architecture:
        labels = base.layers.architecture.label, tuned.layers.architecture.label
        raise OptionError(f"model_tuned: {tuned.label} is for {labels[1]}, but {base.label} for {labels[0]}; they must be of one family")
    theirs = tuned.layers.shapes
    wrong = [name for name, shape in base.layers.shapes.items() if name.startswith("backbone.") and theirs.get(name) != shape]
    if wrong:
        raise OptionError(f"model_tuned: layers of {tuned.label} have not the sizes of those of {base.label}: {examples(wrong, 3)}")
    return base, tuned, target


def _modules(base: ModelOnDisk, tuned: ModelOnDisk, options: ExtractSection, found: Extracted) -> list[str]:
    """The networks that are extracted: the backbone, and text encoders that differ enough."""
    modules = ["backbone"]
    for module in _networks(base)[1:]:
        if module not in _networks(tuned):
            continue
        layers = [name for name in base.layers.modules if name.partition(".")[0] == module]
        largest = 0.0
        for name in Bar(layers, desc=f"comparing {module}", unit="layer", delay=2, leave=False):
            if not _is_same(base, tuned, name):
                largest = max(largest, float(difference(base, tuned, [name]).abs().amax()))
        if options.extract_text_encoder and largest > options.min_diff:
            modules.append(module)
        else:
            found.encoders[module] = largest
    return modules


def _networks(model: ModelOnDisk) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in model.layers.modules))


def difference(base: ModelOnDisk, tuned: ModelOnDisk, layers: Sequence[str]) -> Tensor:
    """What tuning added to the weights of these layers, one below the other: (outputs, inputs x kernel), float32."""
    rows = []
    for name in layers:
        change = tuned.place(name).read()
        change -= base.place(name).read()
        rows.append(change.flatten(1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _is_same(base: ModelOnDisk, tuned: ModelOnDisk, layer: str) -> bool:
    """Whether both models have a layer in the same place of the same file, as models do that share files by links."""
    a, b = base.place(layer), tuned.place(layer)
    return a.slot.start == b.slot.start and a.stored == b.stored and a.slot.path.samefile(b.slot.path)


def _extract(
    base: ModelOnDisk, tuned: ModelOnDisk, layers: Sequence[str], options: ExtractSection, found: Extracted, spool: Spool
) -> dict[str, str]:
    """Adds the LoRA of these layers, which have a low rank together; header texts of its layout, none where nothing was added."""
    if all(_is_same(base, tuned, name) for name in layers):
        found.same += len(layers)
        return {}
    names, shape = base.layers.names, base.layers.shapes[layers[0]]
    label = names.to_diffusers(layers[0]) if len(layers) == 1 else names.to_comfyui(layers[0])
    matrix = difference(base, tuned, layers)
    energy = squared_norm(matrix)
    if not math.isfinite(energy):
        raise OptionError(f"model_tuned: {label} has values that are not finite numbers in one of the models. Nothing was written")
    wide = len(shape) == 4 and tuple(shape[2:]) != (1, 1)
    rank = options.conv_dim if wide else options.dim
    if energy == 0:
        found.same += len(layers)
        return {}
    if rank is None:
        found.left_out[label] = energy
        return {}
    limit = Limit(rank, options.dynamic_method, options.dynamic_param)
    seed = int.from_bytes(hashlib.sha256(f"{options.seed} {label}".encode()).digest()[:8], "big") >> 1
    parts = decompose(matrix, limit, torch.Generator().manual_seed(seed))
    up, down = clamped(*parts.factors(parts.rank(limit)), options.clamp_quantile)
    dtype = DTYPES[options.save_precision]
    error = squared_error(matrix, up.to(dtype).float(), down.to(dtype).float())
    found.changes[label] = Change(len(down), energy, error, wide)
    heights = [base.layers.shapes[name][0] for name in layers]
    members = {name: with_alpha(one, float(options.dim)) for name, one in divided(layers, heights, up, down, shape).items()}
    tensors, texts = tensors_of(members, names, options.save_model_as, torch.float32)
    spool.add(in_precision(tensors, dtype))
    return texts


def _other_differences(base: ModelOnDisk, tuned: ModelOnDisk, modules: Sequence[str], layers: Sequence[str], found: Extracted) -> None:
    """Counts changes of what no LoRA changes: norms, biases, embeddings."""
    weights = {f"{name}.weight" for name in layers}
    for name, place in Bar(base.places.items(), desc="comparing norms and biases", delay=2, leave=False):
        other = tuned.places.get(name)
        if name in weights or name.partition(".")[0] not in modules or other is None or other.slot.shape != place.slot.shape:
            continue
        energy = squared_norm(torch.atleast_1d(other.read() - place.read()))
        if energy:
            found.left_out[name] = energy


def _header(base: ModelOnDisk, tuned: ModelOnDisk, options: ExtractSection, found: Extracted) -> dict[str, str]:
    ranks = [change.rank for change in found.changes.values() if not change.wide]
    wide = [change.rank for change in found.changes.values() if change.wide]
    version = base.layers.architecture.version
    return network_texts(ranks or wide, [float(options.dim)], wide if ranks else ()) | {
        "ss_v2": str(version.is_v2),
        "ss_base_model_version": version.kohya,
        "ss_sd_model_name": base.label,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{version.modelspec}/lora",
        "modelspec.title": Path(options.save_to).stem,
        "modelspec.description": f"extracted from {tuned.label}, relative error {found.relative:.3g}",
    }


def _report(base: ModelOnDisk, tuned: ModelOnDisk, target: Path, found: Extracted) -> Report:
    ranks = [change.rank for change in found.changes.values()]
    lines = [
        f"extracted {len(ranks)} layers of {tuned.label} over {base.label} ({base.layers.architecture.label}): {target.name}, "
        f"{size_text(target.stat().st_size)}, ranks {min(ranks)} to {max(ranks)}",
        f"relative error {found.relative:.4f} (0 is the whole change, 1 none of it); {found.same} layers are the same in both models",
    ]
    worst = sorted(found.changes.items(), key=lambda item: -item[1].error)[:5]
    lines += ["largest errors (rank, relative error, share of the squared error):"]
    whole = sum(change.error for change in found.changes.values()) or 1.0
    lines += table([(name, f"{one.rank}", f"{one.relative:.4f}", f"{100 * one.error / whole:.0f} %") for name, one in worst])
    if found.left_out:
        largest = examples(sorted(found.left_out, key=lambda name: -found.left_out[name]), 3)
        lines.append(
            f"not in the file: changes of {len(found.left_out)} tensors ({largest}), {100 * found.share_left_out:.2g} % of the whole "
            "change; a LoRA has no norms, biases and embeddings, and convolutions only with conv_dim"
        )
    lines += [f"text encoder {name} left out: its largest difference is {largest:.3g}" for name, largest in found.encoders.items()]
    values = {
        "relative_error": found.relative,
        "left_out": {name: math.sqrt(energy) for name, energy in found.left_out.items()},
        "share_left_out": found.share_left_out,
        "text_encoders_left_out": found.encoders,
        "layers": {
            name: {"rank": one.rank, "norm": math.sqrt(one.energy), "relative_error": one.relative} for name, one in found.changes.items()
        },
    }
    return Report(lines, values)
