"""How much memory drawing will take, before anything is loaded: while prompts are read, while an image is drawn, while it is decoded.

Measured on the meta device as the forecast of a run is (see `weighing`), with the model's own networks at the size that is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from sd_scripts import families
from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common.images import TILE
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.devices import CPU, precision_for
from sd_scripts.library.core.protocols import ModelFamily, Parts, Preview
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.memory.swapping import check_number
from sd_scripts.library.render.predict import Devices, listed, read_images
from sd_scripts.library.render.predicting.adapters import adapter_file
from sd_scripts.library.train.editing import control_size
from sd_scripts.schema.model import ModelOptions
from sd_scripts.schema.predict import PredictOptions

from .accounting import bytes_of
from .estimate import Swapped, encoder_bytes, named, packed_blocks
from .structure import EVERYTHING, Structure, settle, structure_of
from .values import GIB, PROCESS, WORKSPACE, Forecast, Phase, Questions, Size, about_host, phase
from .weighing import Scales, weight_of

ON_A_GPU = torch.device("cuda", 0)
"""Where drawing is counted that names no device, whatever this machine has: as the forecast of a run."""


@dataclass(frozen=True)
class AskedImage:
    """What of a request its memory depends on."""

    size: Size
    """(width, height) of the largest image."""
    cfg_scale: float
    controls: tuple[Size, ...]
    """(width, height) of its control images, as the VAE is given them."""


@dataclass(frozen=True)
class WeighedNetwork:
    """What the denoising network weighs under some options, in bytes."""

    on_device: int
    at_home: int
    """Swapped blocks, in host RAM."""
    slots: int
    made_anew: int
    """Of a weight that is held in few bits, while it computes."""
    num_blocks: int


class DrawingForecaster:
    """Forecasts of drawing under different options; what was measured once is not measured again."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        """say is told what is being measured."""
        self._say = say
        self._scales: dict[str, tuple[Scales, str]] = {}
        self._found: dict[tuple[str, ...], int] = {}

    def __call__(self, options: PredictOptions) -> Forecast:
        """The forecast of drawing with these options. Raises OptionError for a model that cannot be read, or too many blocks."""
        devices, family = devices_asked(options), families.family(options.family)
        card, dtype = card_of(devices), precision_of(options, devices.transformer)
        key, scales, published = self._measured(options, family, dtype)
        network = _network(options, scales.parts)
        check_number(options.loading.blocks_to_swap, network.num_blocks)
        asked = largest(family, scales.parts, options)
        encoders = {name: encoder_bytes(options.loads, options.family, scales, name) for name in scales.encoders}
        weights = {
            "backbone": {"base model": network.on_device, "swap slots": network.slots, "adapter": _adapters(options, dtype)},
            "vae": {"VAE": scales.vae},
            "text": {"text encoders": sum(encoders.values())},
        }
        there = {"backbone": devices.transformer == card, "vae": devices.vae == card, "text": devices.text_encoder == card}
        stages = self._stages(options, key, scales, asked, network)
        if options.loading.offload:
            # One after the other comes; slots stay.
            alone = {**weights, "text": {"text encoders": max(encoders.values(), default=0)}}
            slots = {"swap slots": network.slots if there["backbone"] else 0}
            held = {name: {**slots, **alone[name]} for name in alone}
        else:
            together = {part: size for name, parts in weights.items() if there[name] for part, size in parts.items()}
            held = dict.fromkeys(weights, together)
        phases = [
            phase(name, about, {**held[part], **more, "cuBLAS": WORKSPACE if card.type == "cuda" else 0})
            for part, name, about, more in stages
            if there[part]
        ]
        all_weights = sum(sum(parts.values()) for parts in weights.values()) + network.at_home - network.slots
        host = self._host(
            options, devices, card, all_weights, [more["activations"] for part, _, _, more in stages if not there[part]], phases
        )
        notes = _notes(devices, card, network, host)
        return Forecast(tuple(phases), published, notes, host, psutil.virtual_memory().total)

    def num_blocks(self, options: PredictOptions) -> int:
        """Blocks that the network has."""
        family, dtype = families.family(options.family), precision_of(options, devices_asked(options).transformer)
        return _network(options, self._measured(options, family, dtype)[1].parts).num_blocks

    def _measured(self, options: PredictOptions, family: ModelFamily, dtype: torch.dtype) -> tuple[str, Scales, str]:
        """A key of the model, scales for it, and what published model it was made from."""
        model = options.loads
        plain = {"transformer_quantization": "none", "text_encoder_quantization": "none"}
        model = model.model_copy(update={name: value for name, value in plain.items() if hasattr(model, name)})
        key = json.dumps([options.family, model.model_dump(mode="json"), str(dtype)])
        if key not in self._scales:
            self._say("the model without its weights")
            found = _structure(family, model, dtype)
            self._scales[key] = Scales(family, found.parts, Questions((), options.predict.prompt)), found.published
        return key, *self._scales[key]

    def _once(self, key: tuple[str, ...], saying: str, measure: Callable[[], int]) -> int:
        if key not in self._found:
            self._say(saying)
            self._found[key] = measure()
        return self._found[key]

    def _stages(
        self, options: PredictOptions, key: str, scales: Scales, asked: AskedImage, network: WeighedNetwork
    ) -> list[tuple[str, str, str, dict[str, int]]]:
        """What comes one after the other: the part of the model that computes, the phase's name, what is counted, and its parts besides
        weights."""
        found = []
        if scales.encoders:
            reading = self._once(("read", key), "the text encoders", lambda: scales.reading(1))
            found.append(("text", "reading", "one prompt at a time", {"activations": reading}))
        if asked.controls:
            control = max(asked.controls, key=_area)
            encoding = self._once(("encode", key, str(control)), "the VAE while it encodes", lambda: scales.encoding(control, 1))
            found.append(("vae", "encoding", f"control images up to {named(control)}", {"activations": encoding}))
        about = named(asked.size) + (f", {len(asked.controls)} control images" if asked.controls else "")
        drawing = self._once(
            ("draw", key, str(asked)), f"a step of {about}", lambda: scales.drawing(asked.size, 1, asked.cfg_scale, asked.controls)
        )
        found.append(("backbone", "drawing", about, {"activations": drawing, "weights made anew": network.made_anew}))
        tiled = options.loading.vae_tiling
        width, height = asked.size
        piece = (min(width, TILE), min(height, TILE)) if tiled else asked.size
        decoding = self._once(("decode", key, str(piece)), "the VAE while it decodes", lambda: scales.decoding(piece, 1))
        # Rows of tiles and the image that they become, three float32 a pixel each.
        decoding += 2 * 3 * 4 * width * height if tiled else 0
        found.append(("vae", "decoding", named(asked.size) + (" in tiles" if tiled else ""), {"activations": decoding}))
        return found

    def _host(
        self,
        options: PredictOptions,
        devices: Devices,
        card: torch.device,
        weights: int,
        activations: Sequence[int],
        phases: Sequence[Phase],
    ) -> int:
        """Host RAM: what is computed or waits there, and all networks where they are read there first."""
        if card == CPU:
            return PROCESS + max(one.total for one in phases)
        one_device = len(set(devices.names().values())) == 1
        read_there = options.loading.offload or options.loading.blocks_to_swap or not one_device
        return PROCESS + (weights if read_there else 0) + max(activations, default=0)


def _structure(family: ModelFamily, model: ModelOptions, dtype: torch.dtype) -> Structure:
    if families.maker_of(family) is None:
        return structure_of(family, model, dict.fromkeys(EVERYTHING, dtype))
    # What a run made describes itself, whatever it lies in.
    parts = family.load(model, CPU, torch.float32, EVERYTHING)
    settle(parts, {**dict.fromkeys(parts.modules(), dtype), "vae": torch.float32})
    return Structure(parts)


def devices_asked(options: PredictOptions) -> Devices:
    """Where each network is to work, on this machine or another one."""
    model, loading = options.model, options.loading
    transformer = _device(loading.transformer_device, ON_A_GPU)
    vae, encoder = (_device(getattr(model, name, None), transformer) for name in ("vae_device", "text_encoder_device"))
    return Devices(transformer, vae, encoder)


def _device(name: str | None, default: torch.device) -> torch.device:
    if name is None:
        return default
    device = torch.device(name)
    return device if device.type != "cuda" else torch.device("cuda", device.index or 0)


def card_of(devices: Devices) -> torch.device:
    """The device that is forecast: the transformer's, or the first other one that is no CPU, or the CPU where all compute there."""
    return next((one for one in (devices.transformer, devices.vae, devices.text_encoder) if one != CPU), CPU)


def precision_of(options: PredictOptions, device: torch.device) -> torch.dtype:
    """Of transformer and text encoders; on a GPU that is not here auto is bf16."""
    if options.loading.precision == "auto" and device.type == "cuda" and not torch.cuda.is_available():
        return torch.bfloat16
    return precision_for(options.loading.precision, device)


def largest(family: ModelFamily, parts: Parts, options: PredictOptions) -> AskedImage:
    """The image of a request that takes most memory. Raises OptionError for control images that cannot be read, and a wrong prompt list."""
    asked = options.predict
    controls = read_images(getattr(asked, "images", ()))
    width, height = family.usual_size(parts)
    if asked.size is not None:
        width, height = asked.size
    elif controls:
        width, height = area_size(controls[-1].size, width * height)
    plain = Preview(asked.prompt, "", width, height, 0, asked.steps, asked.guided_scale, controls=tuple(controls))
    prompts = getattr(asked, "prompt_list", "")
    found = listed(family, plain, prompts) if prompts else [plain]
    sized = control_size(family, options.loads)

    def asked_of(one: Preview) -> AskedImage:
        sizes = (control.size for control in one.controls)
        return AskedImage((one.width, one.height), one.cfg_scale, tuple(sized(size) if sized is not None else size for size in sizes))

    return max(map(asked_of, found), key=lambda one: sum(map(_area, (one.size, *one.controls))) * (2 if one.cfg_scale > 1 else 1))


def _network(options: PredictOptions, parts: Parts) -> WeighedNetwork:
    blocks = tuple(weight_of(block, set(), set(), 0) for block in blocks_of(parts.backbone).values())
    itemsize = next(parts.backbone.parameters()).dtype.itemsize
    quantization = str(getattr(options.loads, "transformer_quantization", "none"))
    spared, made_anew = packed_blocks(blocks, itemsize, quantization)
    swapped = Swapped.of(blocks, options.loading.blocks_to_swap)
    share = spared / max(1, sum(block.frozen for block in blocks))
    home, slots = int(swapped.frozen * (1 - share)), int(swapped.slots * (1 - share))
    return WeighedNetwork(bytes_of(parts.backbone.parameters()) - spared - home, home, slots, made_anew, len(blocks))


def _adapters(options: PredictOptions, dtype: torch.dtype) -> int:
    """Bytes of the LoRA files' values on the device. Raises OptionError for files that cannot be read."""
    numbers = 0
    for name in options.loading.lora:
        numbers += sum(map(math.prod, read_header(adapter_file(name).path, "lora").shapes.values()))
    return numbers * dtype.itemsize


def _notes(devices: Devices, card: torch.device, network: WeighedNetwork, host: int) -> tuple[str, ...]:
    found = [f"Drawing needs {host / GIB:.1f} GiB of host RAM.", *about_host(host, psutil.virtual_memory().total, network.at_home)]
    one, vae, text = devices.transformer, devices.vae, devices.text_encoder
    elsewhere = {
        f"The transformer computes on {one}, which is not counted on the card.": one,
        f"The VAE computes on {vae}, which is not counted on the card.": vae,
        f"The text encoder computes on {text}, which is not counted on the card.": text,
    }
    return (*found, *(sentence for sentence, device in elsewhere.items() if device != card))


def _area(size: Size) -> int:
    return size[0] * size[1]
