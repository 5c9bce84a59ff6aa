"""The trained adapter of one model: made by peft, drawn from the run's seed, read and written by layer name.

Files are not its business, see `files` and `merge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Parts, StateDict
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import AdapterOptions

from .fusing import MAGNITUDE
from .inject import adapter_tensors, adapters_on
from .layer_names import Names, split_rest
from .layers import LayerPlan, examples
from .maths import AdapterLayer, Kind
from .rates import Rates

ADAPTER = "default"
"""peft's name of the trained adapter; `merge.apply` uses others."""


@contextmanager
def _same_training(layers: Iterable[BaseTunerLayer]) -> Iterator[None]:
    """peft's switches also decide what is trained; after the block everything is trained, or not, as before it."""
    flags = [(tensor, tensor.requires_grad) for layer in layers for tensor in layer.parameters()]
    try:
        yield
    finally:
        for tensor, requires_grad in flags:
            tensor.requires_grad_(requires_grad)


class AdapterNetwork:
    """One adapter on one model. Made by `attach` or `merge.apply`."""

    def __init__(self, parts: Parts, kind: Kind, plans: list[LayerPlan], names: Names, adapter: str = ADAPTER) -> None:
        self.kind = kind
        self.plans = plans
        self.names = names
        self._adapter = adapter
        everything = parts.modules()
        self.modules: dict[str, nn.Module] = {module: everything[module] for module in dict.fromkeys(plan.module for plan in plans)}
        """The networks that carry the adapter, by name; they are what train() and eval() are for."""
        self._layers: dict[str, BaseTunerLayer] = {plan.name: self.modules[plan.module].get_submodule(plan.layer) for plan in plans}
        self._scales = {name: self.scale(name) for name in self._layers}
        self._hooks: list[RemovableHandle] = []
        self._max_norm: float | None = None
        self._tensors: dict[str, dict[str, str]] = {}
        """Of each layer, its tensors by peft's name, and their names in the state; a shared one has that of its first layer."""
        self._carriers: dict[str, list[str]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        owners: dict[int, str] = {}
        for name, layer in self._layers.items():
            for rest, tensor in adapter_tensors(layer, adapter):
                key = owners.setdefault(id(tensor), f"{name}.{rest}")
                self._tensors.setdefault(name, {})[rest] = key
                self._carriers.setdefault(key, []).append(name)
                self._parameters[key] = tensor

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All adapter tensors by `<module>.<layer>.<rest>`, frozen ones too; one that layers share stands once, under the first of them."""
        return dict(self._parameters)

    def parameters(self) -> list[nn.Parameter]:
        """The tensors that are trained, float32, in a fixed order."""
        return [tensor for tensor in self._parameters.values() if tensor.requires_grad]

    def parameter_groups(self, options: AdapterOptions, learning_rate: float) -> list[dict[str, Any]]:
        """Groups for the optimizer: {"params", "lr", "name"}; every trained tensor stands in exactly one.

        A group for each module, each rate that blocks or names give (see `rates`), and the up matrices when LoRA+ gives them a rate of
        their own. A tensor that layers share has the rate of the first of them.
        """
        rates = Rates(options, self.names, learning_rate)
        groups: dict[str, dict[str, Any]] = {}
        for key, tensor in self._parameters.items():
            if not tensor.requires_grad:
                continue
            name, rest = split_rest(key)
            rate, label = rates.of(name)
            if rest.startswith("lora_B") and (ratio := rates.up_ratio(name)) is not None:
                module, *rule = label.split("_", 1)
                rate, label = rate * ratio, "_".join([f"{module}_up", *rule])
            groups.setdefault(label, {"params": [], "lr": rate, "name": label})["params"].append(tensor)
        return list(groups.values())

    def learns(self, key: str, rates: Rates) -> bool:
        """Whether a rate above 0 reaches this tensor through one of the layers that have it."""
        return any(rates.of(name)[0] != 0 for name in self._carriers[key])

    def state(self) -> StateDict:
        """All adapter values, float32, detached copies on the device they are on, by `<module>.<layer>.<rest>`."""
        return {key: tensor.detach().float().clone() for key, tensor in self._parameters.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes values as `state` gives them. Raises TrainingError for names or shapes that are not this network's."""
        missing = sorted(self._parameters.keys() - state.keys())
        extra = sorted(state.keys() - self._parameters.keys())
        if missing or extra:
            raise TrainingError(
                "the saved adapter is not of this network: "
                + "; ".join(
                    text for names, text in ((missing, f"missing {examples(missing)}"), (extra, f"unknown {examples(extra)}")) if names
                )
                + ". The network options must be those of the run that saved it"
            )
        wrong = [
            f"{key} {tuple(state[key].shape)} instead of {tuple(tensor.shape)}"
            for key, tensor in self._parameters.items()
            if state[key].shape != tensor.shape
        ]
        if wrong:
            raise TrainingError(
                f"the saved adapter has other sizes: {examples(wrong)}. The network options must be those of the run that saved it"
            )
        with torch.no_grad():
            for key, tensor in self._parameters.items():
                tensor.copy_(state[key])

    def adapters(self, state: Mapping[str, Tensor] | None = None) -> dict[str, AdapterLayer]:
        """The adapter of each layer as `maths` reads it, from the live values or from a state of this network."""
        values = self.state() if state is None else state
        found: dict[str, AdapterLayer] = {}
        for name, keys in self._tensors.items():
            tensors = {rest: values[key].flatten() if rest == MAGNITUDE else values[key] for rest, key in keys.items()}
            found[name] = AdapterLayer(self.kind, tensors, self.scale(name))
        return found

    def base_layer(self, name: str) -> nn.Module:
        """The plain layer under the adapter of `<module>.<layer>`."""
        return self._layers[name].get_base_layer()

    def scale(self, name: str) -> float:
        """The factor that this layer's product is multiplied by in the forward pass, as peft uses it; 1 for oft."""
        return 1.0 if self.kind == "oft" else float(self._layers[name].scaling[self._adapter])

    def set_adapters(self, adapters: Mapping[str, AdapterLayer]) -> None:
        """Takes the adapters of a file; layers that it does not hold stay as they are. Raises OptionError for what does not fit."""
        state, taken = self.state(), dict[str, Tensor]()
        problems = [f"{name} has no adapter in this network" for name in adapters if name not in self._layers]
        for name, adapter in adapters.items():
            if name not in self._layers:
                continue
            if adapter.kind != self.kind:
                problems.append(f"{name} is {adapter.kind}, not {self.kind}")
                continue
            adapter = adapter.rescaled(self.scale(name))
            own = self._tensors[name]
            if own.keys() != adapter.tensors.keys():
                problems.append(f"{name} has {', '.join(sorted(adapter.tensors))} instead of {', '.join(sorted(own))}")
                continue
            for rest, tensor in adapter.tensors.items():
                key = own[rest]
                fitted = _fitted(tensor, state[key])
                if rest == MAGNITUDE and tensor.dim() > 1:
                    problems.append(f"{name} has dora lengths for each input channel, which can be merged but not trained on")
                elif fitted is None:
                    problems.append(f"{name}.{rest} is {tuple(tensor.shape)} instead of {tuple(state[key].shape)}")
                elif key in taken and not torch.equal(taken[key], fitted):
                    problems.append(f"{name} does not share its down matrix with {split_rest(key)[0]} in the file; set split_qkv = true")
                else:
                    taken[key] = fitted
        if problems:
            raise OptionError(
                f"the adapter file does not fit the network: {examples(problems)}. "
                "Use the network options it was trained with, or dim_from_weights"
            )
        self.load({**state, **taken})

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is what it was without this adapter; other adapters stay. Values and what is trained do not change."""
        active = {name: list(layer.active_adapters) for name, layer in self._layers.items()}
        with _same_training(self._layers.values()):
            for name, layer in self._layers.items():
                layer.set_adapter([other for other in active[name] if other != self._adapter])
        try:
            yield
        finally:
            with _same_training(self._layers.values()):
                for name, layer in self._layers.items():
                    layer.set_adapter(active[name])

    def train(self, mode: bool = True) -> None:
        """train() or eval() of every network that carries the adapter."""
        for module in self.modules.values():
            module.train(mode)

    @torch.no_grad()
    def after_step(self) -> None:
        """scale_weight_norms: shrinks both matrices of every layer whose update has a Frobenius norm above the limit, if there is one."""
        if self._max_norm is None:
            return
        units = self._norm_units()
        device = units[0][0].device
        # The norm of a product from the small Gram matrices: ||BA||^2 = sum(B^T B * A A^T). Layers that share A are one matrix to kohya.
        squared = []
        for a, ups, scale in units:
            gram = a.flatten(1) @ a.flatten(1).T
            outer = sum(b.flatten(1).T @ b.flatten(1) for b in ups)
            squared.append((outer * gram).sum().clamp(min=0).to(device) * scale**2)
        norms = torch.stack(squared).sqrt()
        # All on the device, and 1 where nothing is to be done: asking each layer in turn would wait for the device hundreds of times.
        shrink = (self._max_norm / norms.clamp(min=self._max_norm)).sqrt()
        for (a, ups, _), factor in zip(units, shrink):
            for tensor in (a, *ups):
                tensor.mul_(factor.to(tensor.device))

    def _norm_units(self) -> list[tuple[Tensor, list[Tensor], float]]:
        """Each down matrix, the up matrices that it stands before, and the factor on their products."""
        units: dict[str, tuple[Tensor, list[Tensor], float]] = {}
        for name, keys in self._tensors.items():
            down = keys["lora_A.weight"]
            unit = units.setdefault(down, (self._parameters[down], [], abs(self.scale(name))))
            unit[1].append(self._parameters[keys["lora_B.weight"]])
        return list(units.values())

    def limit_norms(self, max_norm: float | None) -> None:
        """The limit for `after_step`; None turns it off."""
        self._max_norm = max_norm

    def freeze(self) -> None:
        """Nothing of this adapter is trained any more."""
        for tensor in self._parameters.values():
            tensor.requires_grad_(False)

    def set_strength(self, strength: float) -> None:
        """What the adapter adds to each layer's output is multiplied by this from now on, 1 being as trained; 0 costs no time.

        For dora the whole difference counts, as in merging: peft's own scaling would turn the direction and keep the length. Raises
        ValueError for oft, which adds nothing and can only be on or off, with another strength than 0 or 1.
        """
        if self.kind == "oft" and strength not in (0, 1):
            raise ValueError(f"an oft adapter has no strength other than 0 or 1, not {strength:g}")
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        with _same_training(self._layers.values()):
            for name, layer in self._layers.items():
                active = {*layer.active_adapters, self._adapter} if strength else {*layer.active_adapters} - {self._adapter}
                layer.set_adapter([other for other in adapters_on(layer) if other in active])
                if strength and self.kind == "dora":
                    self._strengthen_difference(layer, strength)
                elif strength and self.kind != "oft":
                    layer.scaling[self._adapter] = self._scales[name] * strength

    def _strengthen_difference(self, layer: BaseTunerLayer, strength: float) -> None:
        """Multiplies all that a dora layer adds, its change of length included."""
        magnitude = layer.lora_magnitude_vector[self._adapter]
        self._hooks.append(magnitude.register_forward_hook(lambda _module, _inputs, added: added * strength))
        if adapters_on(layer)[0] != self._adapter:
            # peft would stretch what the adapters before this one added as well; without their sum it asks the base layer itself.
            self._hooks.append(magnitude.register_forward_pre_hook(_without_base_result, with_kwargs=True))

    def hold_in(self, dtype: torch.dtype) -> None:
        """Keeps the adapter's values in this precision, for adapters that are not trained."""
        for tensor in self._parameters.values():
            tensor.data = tensor.data.to(dtype)

    def detach(self) -> None:
        """Takes the adapter off the model; the model is then what it was before."""
        for plan in self.plans:
            layer = self._layers[plan.name]
            if len(adapters_on(layer)) > 1:
                with _same_training([layer]):
                    layer.set_adapter([name for name in layer.active_adapters if name != self._adapter])
                    layer.delete_adapter(self._adapter)
                continue
            model = self.modules[plan.module]
            path, _, leaf = plan.layer.rpartition(".")
            setattr(model.get_submodule(path), leaf, layer.get_base_layer())
        for model in self.modules.values():
            model.peft_config.pop(self._adapter, None)
            if not model.peft_config:
                del model.peft_config


def _without_base_result(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return inputs, {**named, "base_result": None}


def _fitted(tensor: Tensor, like: Tensor) -> Tensor | None:
    """The tensor in the wanted shape, where they differ by sides of length 1 only (1x1 convolutions and linear layers)."""
    squeezed = [side for side in tensor.shape if side != 1]
    if squeezed != [side for side in like.shape if side != 1]:
        return None
    return tensor.detach().float().reshape(like.shape).to(like.device)
