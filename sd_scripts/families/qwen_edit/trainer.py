"""The interface of qwen-image-finetune's trainer class over this engine, for scripts that were written for it.

Every method is a few lines: training on the images of a configuration is `Session`, images are made by `Predictor`, files are
`adapters`. Options are ours; a configuration of that project is read as sd_scripts/programs/qwen_image_finetune says. Batches of a
loader that is not ours are trained on here, with our objective, states and files.

Shapes: B samples, N image tokens of 16 x 16 pixels, h w latent sides, L text rows, D text width.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline
from PIL import Image
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from sd_scripts.dataset.plan import cache_folder
from sd_scripts.families.common.images import as_images, evaluating
from sd_scripts.families.common.packing import unpacked
from sd_scripts.families.qwen_edit.predict_options import PredictModelOptions, QwenPredictSection
from sd_scripts.library.adapters.applying import AppliedAdapters, apply_adapters
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.devices import CPU, best_device, device_of
from sd_scripts.library.core.protocols import Batch, Parts
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.data.cache import Cache
from sd_scripts.library.memory.arranging import arrange
from sd_scripts.library.memory.quantize import is_quantized, quantize_network
from sd_scripts.library.render.predict import Predictor, Progress, Request, devices_for
from sd_scripts.library.render.predicting.memory import give_back
from sd_scripts.library.train.checkpoint import Checkpointer, State
from sd_scripts.library.train.conditioned import Conditioned
from sd_scripts.library.train.describing import base_facts
from sd_scripts.library.train.environment import DTYPES, make_accelerator, with_precision
from sd_scripts.library.train.metadata import build
from sd_scripts.library.train.optim import learning_rate_at, make_optimizer
from sd_scripts.library.train.process import Process
from sd_scripts.library.train.session import fill_caches, train
from sd_scripts.programs.qwen_image_finetune import configuration
from sd_scripts.runs.events import RunFinished, RunStopped
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.predict import LoadingSection

from . import loader_run
from .batches import CACHED, Entries, Grid, ImageLike, grids_of, images_of, stacked
from .encoding import BATCHES, Encoder, Sample
from .model import FAMILY, QwenEdit
from .options import QwenImageNetwork
from .predict_options import QwenImagePredict

ImagesLike: TypeAlias = ImageLike | Sequence[ImageLike]
FILE = "pytorch_lora_weights.safetensors"
"""Name of an adapter file in a folder that save_lora is given."""
FLOAT8 = "qfloat8"
"""What `quantize = True` means where the configuration names no kind: that program's quantisation."""


def load_config_from_yaml(path: str | Path) -> configuration.Config:
    """A YAML file of qwen-image-finetune as a configuration whose sections are attributes, with that program's values for what it leaves
    out. Raises OptionError with everything that is refused or wrong."""
    return _checked(configuration.config_of(configuration.read(Path(path))))


class QwenImageEditTrainer:
    """One configuration and what is loaded of it. Networks are loaded by `load_model`, or when they are first needed."""

    _pack_latents = staticmethod(QwenImageEditPipeline._pack_latents)
    _unpack_latents = staticmethod(QwenImageEditPipeline._unpack_latents)

    def __init__(self, config: object) -> None:
        """config: what load_config_from_yaml gives; a mapping, or an object with attributes, of such sections; the path of a YAML file of
        qwen-image-finetune or of a TOML file of ours; options of ours, as a mapping or built.

        Raises OptionError with everything that is refused or wrong.
        """
        self.config = _config(config)
        self.accelerator: Accelerator | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LambdaLR | None = None
        self.scheduler: FlowMatchEulerDiscreteScheduler | None = None
        self.global_step = 0
        options, _ = _options(self.config)
        self.quantize = options.model.transformer_quantization != "none"
        """Whether the transformer is held in 8 bits from the next load_model, set_lora or setup_predict on."""
        self.use_cache = options.dataset.cache_latents
        self.cache_dir = str(cache_folder(options.dataset, options.output.output_dir))
        self.network: AdapterNetwork | None = None
        self.predictor: Predictor | None = None
        self.run: Path | None = None
        """Folder of the last run."""
        self.lora: list[tuple[Path, float]] = []
        """Adapter files and their strengths."""
        self._parts: Parts | None = None
        self._applied: AppliedAdapters | None = None
        self._merged = self._arranged = False
        self._num_samples = 0
        """Samples that were trained on; they number what is drawn for each."""
        self._scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._checkpointer: Checkpointer | None = None
        self._last_encoder: Encoder | None = None

    # What is configured and loaded.

    @property
    def options(self) -> QwenImageNetwork:
        """Our options, of the configuration and the attributes as they are now."""
        options, _ = _options(self.config)
        named = options.model.transformer_quantization
        kind = (named if named != "none" else FLOAT8) if self.quantize else "none"
        kept = self.use_cache and options.dataset.cache_text_encoder_outputs
        dataset = {"cache_dir": str(self.cache_dir), "cache_latents": self.use_cache, "cache_text_encoder_outputs": kept}
        changes = {
            "model": options.model.model_copy(update={"transformer_quantization": kind}),
            "dataset": options.dataset.model_copy(update=dataset),
        }
        return options.model_copy(update=changes)

    @property
    def predict_devices(self) -> dict[str, str]:
        """Devices of prediction by option."""
        return _options(self.config)[1]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Precision of the networks: that of train.mixed_precision."""
        return DTYPES[with_precision(self.options, self._device).training.mixed_precision]

    @weight_dtype.setter
    def weight_dtype(self, dtype: torch.dtype) -> None:
        named = {DTYPES[name]: name for name in DTYPES}
        if dtype not in named or isinstance(self.config, QwenImageNetwork):
            raise OptionError(f"weight_dtype: {dtype} cannot be set here; give the configuration train.mixed_precision = bf16, fp16 or no")
        self.config.train.mixed_precision = named[dtype]

    @property
    def cache_exist(self) -> bool:
        """Whether cache_dir holds any entry; which ones a batch has is found out for each sample."""
        return next(Path(self.cache_dir).rglob("*.safetensors"), None) is not None

    @property
    def vae(self) -> Any:
        return self._loaded and self._loaded.vae

    @property
    def qwen_vl(self) -> Any:
        """The text encoder."""
        return self._loaded and self._loaded.text_encoders["te1"]

    @property
    def transformer(self) -> Any:
        return self._loaded and self._loaded.backbone

    @property
    def tokenizer(self) -> Any:
        return self._loaded and self._loaded.tokenizers["te1"]

    @property
    def processor(self) -> Any:
        return self._loaded and self._loaded.processor

    @property
    def _loaded(self) -> Parts | None:
        """What is loaded, for predicting or for training."""
        return self.predictor.parts if self.predictor is not None else self._parts

    @property
    def family(self) -> QwenEdit:
        return QwenEdit()

    def load_model(self) -> Parts:
        """All networks, frozen, in host RAM; a second call gives the same ones."""
        if self._loaded is None:
            self._parts = self.family.load(self.options.model, CPU, self.weight_dtype)
            self.scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._parts.scheduler_config)
        assert self._loaded is not None
        return self._loaded

    def free(self) -> None:
        """Lets go of everything that is loaded."""
        if self.predictor is not None:
            self.predictor.free()
            self.predictor = None
        self._parts = self._last_encoder = self._applied = self.network = self.optimizer = self.lr_scheduler = self.scheduler = None
        self._merged = self._arranged = False
        give_back()

    @property
    def _device(self) -> torch.device:
        """Where training computes."""
        if self.accelerator is not None:
            return self.accelerator.device
        return best_device()

    # Training

    def setup_accelerator(self) -> Accelerator:
        """Devices and processes of training."""
        self.accelerator = self.accelerator or make_accelerator(self.options)
        return self.accelerator

    def quantize_model(self, model: Any = None, device: torch.device | str | None = None) -> Any:
        """Holds a transformer in 8 bits and gives it back on device; None takes the loaded one, where it is. Before set_lora.

        The option transformer_quantization, or quantize = True before load_model, does it while loading, in less memory.
        """
        model = self.load_model().backbone if model is None else model
        home = _named(device, next(model.parameters()).device)
        if not is_quantized(model):
            if self.network is not None and model is self.transformer:
                raise OptionError("quantize: there is an adapter on the transformer already; turn it on before set_lora")
            named = _options(self.config)[0].model.transformer_quantization
            quantize_network(model.to(CPU), named if named != "none" else FLOAT8)
        self.quantize = self.quantize or model is self.transformer
        return model.to(home)

    def set_lora(self) -> AdapterNetwork:
        """Puts a new adapter of the options on the loaded model, in place of one that is there; fit does it where there is none."""
        device = self.setup_accelerator().device
        self._take_off()
        parts, options = self.load_model(), self.options
        if self.network is not None:
            self.network.detach()
            self.network = None
        if self.quantize:
            self.quantize_model(parts.backbone)
        targets = self.family.adapter_targets(parts, options.network.wants_convolutions)
        self.network = attach(parts, options.network, targets, options.training.seed)
        if not self._arranged:
            arrange(parts, options, device)
            self._arranged = True
        self.optimizer = self.lr_scheduler = None
        return self.network

    def configure_optimizers(self) -> None:
        """Sets optimizer and lr_scheduler for the adapter of set_lora."""
        network, options = self.network or self.set_lora(), self.options
        self.optimizer = make_optimizer(options.optimizer, network.parameter_groups(options.network, options.optimizer.learning_rate))
        self.lr_scheduler = LambdaLR(self.optimizer, learning_rate_at(options.optimizer, options.training.max_train_steps))

    def fit(self, train_dataloader: Iterable[Mapping[str, Any]] | None = None) -> Path:
        """Trains; the saved adapter file. Raises OptionError and TrainingError.

        Without an argument on the images of the configuration, with the engine's caches and previews and on any number of processes;
        what is loaded here is let go first. With one on its batches, see training_step, again and again until max_train_steps; a start
        goes on from the newest state, past the batches that were trained on.
        """
        if train_dataloader is not None:
            return loader_run.fit(self, train_dataloader)
        self.free()
        with self._process() as (process, asked):
            ending = train(process, asked)
            process.last_word((RunFinished if ending.finished else RunStopped)(text=ending.text))
            self.run, self.global_step = ending.run.path, ending.step
        self.lora = [(self.run / f"{self.options.output.output_name}{self.options.output.ending}", 1.0)]
        return self.lora[0][0]

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch, with a gradient for the adapter. What it holds decides how: prompt_embed, prompt_embeds_mask, pixel_latent
        and control_latent are taken as they are; else image, control (control_1, control_2) and prompt are encoded."""
        return self._training_step_cached(batch) if all(name in batch for name in CACHED) else self._training_step_compute(batch)

    def _training_step_cached(self, batch: Mapping[str, Any]) -> Tensor:
        parts = self.load_model()
        grids = grids_of(batch, lambda size: [self._encoder.target_size(size), self.family.control_size(parts, size)])
        rows, columns = grids[0]
        mask = batch.get("prompt_embeds_mask")
        mask = torch.ones(batch["prompt_embed"].shape[:2], dtype=torch.int64) if mask is None else mask
        latents = batch["pixel_latent"], batch["control_latent"]
        return self._compute_loss(*latents, batch["prompt_embed"], mask, 16 * rows, 16 * columns, [(1, *grid) for grid in grids])

    def _training_step_compute(self, batch: Mapping[str, Any]) -> Tensor:
        rate, seed = self.options.dataset.caption_dropout_rate, self.options.training.seed
        samples = []
        cache = Cache(Path(self.cache_dir) / BATCHES) if self.use_cache else None
        for number, sample in enumerate(self._encoder.samples_of(batch), start=self._num_samples):
            entries = self._encoder.kept(sample, cache) or self._encoded(sample, self._device, self._device)
            if rate and float(torch.rand((), generator=rng_for(seed, number, "caption dropout"))) < rate:
                entries = {**entries, **{name: entries[f"empty_{name}"] for name in ("prompt_embed", "prompt_embeds_mask")}}
            samples.append(entries)
        return self._training_step_cached(stacked(samples))

    def _compute_loss(
        self,
        pixel_latents: Tensor,
        control_latents: Tensor,
        prompt_embeds: Tensor,
        prompt_embeds_mask: Tensor,
        height: int,
        width: int,
        img_shapes: Sequence[tuple[int, int, int]] | None = None,
    ) -> Tensor:
        """The mean loss of encoded samples: latents as tokens (B, N, 64), texts (B, L, D) and which rows of them count (B, L).

        height and width of the target in pixels. img_shapes, target first, is for control images of other sizes.
        """
        network, parts, options = self.network or self.set_lora(), self.load_model(), self.options
        device, rows, columns = self._device, height // 16, width // 16
        grids = (
            [(rows, columns)] * (1 + control_latents.shape[1] // max(1, rows * columns))
            if img_shapes is None
            else [one[1:] for one in img_shapes]
        )
        x0, *controls = _unpacked(torch.cat([pixel_latents.to(device), control_latents.to(device)], dim=1), grids)
        texts = [
            text[mask.bool()].to(device) for text, mask in zip(prompt_embeds, prompt_embeds_mask.to(prompt_embeds.device), strict=True)
        ]
        conditions = [
            {"text": text, **{f"control_{index}": control[row] for index, control in enumerate(controls)}} for row, text in enumerate(texts)
        ]
        numbers = torch.arange(self._num_samples, self._num_samples + len(x0))
        self._num_samples += len(x0)
        batch = Batch(x0, conditions, numbers, torch.ones(len(x0), device=device), [""] * len(x0))
        objective = FAMILY.objective(options.objective, parts.path, parts.kind, parts.scheduler_config)
        precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(with_precision(options, device).training.mixed_precision)
        with torch.autocast(device.type, dtype=precision) if precision is not None else nullcontext():
            losses = objective(Conditioned(self.family, parts, network, conditions, dict), batch, options.training.seed)
        return losses.loss.mean()

    # States

    def save_checkpoint(self, epoch: int, global_step: int) -> Path:
        """Saves a state that fit goes on from, and the adapter file of the step, in the folder of the run; the state's folder."""
        network, optimizer = self.network or self.set_lora(), self.optimizer
        if optimizer is None:
            self.configure_optimizers()
            optimizer = self.optimizer
        assert optimizer is not None
        checkpointer = self._checkpointer or loader_run.open_run(self, None)
        state: State = {
            "weights": network.state(),
            "optimizer": optimizer.state_dict(),
            "loop": {"step": global_step, "epoch": epoch, "samples": self._num_samples, "scaler": self._scaler.state_dict()},
        }
        folder = checkpointer.save_state(global_step, state)
        path = checkpointer.export_path(global_step)
        self.save_lora(path)
        checkpointer.exported(global_step, path)
        return folder

    # Caches

    def cache_embeddings(self, train_dataloader: Iterable[Mapping[str, Any]] | None = None) -> str:
        """Encodes all images and instructions into cache_dir, those of the configuration or of these batches; a summary for people."""
        if train_dataloader is None:
            self.free()
            with self._process(cache_only=True) as (process, asked):
                return fill_caches(process, asked)
        cache, counts = Cache(Path(self.cache_dir) / BATCHES), [0, 0]
        for batch in train_dataloader:
            for sample in self._encoder.samples_of(batch):
                key, counts[0] = self._encoder.key_of(sample), counts[0] + 1
                if not cache.has(key):
                    cache.put(key, self._encoded(sample, *self._encoder_devices()))
                    counts[1] += 1
        return f"{counts[0]} samples, {counts[1]} of them encoded now, in {cache.folder}"

    def cache_step(
        self, batch: Mapping[str, Any], vae_device: torch.device | str | None = None, text_device: torch.device | str | None = None
    ) -> Entries:
        """The entries of a batch with image, control and prompt: pixel_latent and control_latent (B, N, 64), prompt_embed (B, L, D) and
        prompt_embeds_mask (B, L), the same of the empty prompt with empty_ before the name, and img_shapes (B, 1 + controls, 3).

        Of a single sample, one image and one text, they have no first axis. Devices are those of the cache section where they are None.
        """
        entries = [self._encoded(sample, *self._encoder_devices(vae_device, text_device)) for sample in self._encoder.samples_of(batch)]
        return entries[0] if isinstance(batch["prompt"], str) else stacked(entries)

    def _encoder_devices(self, vae: Any = None, text: Any = None) -> tuple[torch.device, torch.device]:
        model = self.options.model
        return _named(vae or model.vae_device, self._device), _named(text or model.text_encoder_device, self._device)

    @property
    def _encoder(self) -> Encoder:
        """What encodes samples with what is loaded."""
        parts = self.load_model()
        if self._last_encoder is None or self._last_encoder.parts is not parts:
            self._last_encoder = Encoder(self.family, parts)
        return self._last_encoder

    def _encoded(self, sample: Sample, vae: torch.device, text: torch.device) -> Entries:
        """The entries of a sample, in host RAM."""
        return self._encoder.encoded(sample, vae, text)

    def _encode_empty_prompt(self, image: ImagesLike, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Text rows of the empty instruction on control images, and their mask."""
        return self.encode_prompt_image_embedding("", image, device)

    # Single steps

    @torch.no_grad()
    def encode_image_embedding(self, image: ImagesLike, device: torch.device | str | None = None) -> Tensor:
        """Normalised latents (B, 16, 1, h, w), float32, of images at the size that the model gives control images; those of a batch
        have one size. The VAE goes to device; None leaves it where it is."""
        parts = self.load_model()
        parts.vae.to(_named(device, next(parts.vae.parameters()).device))
        with evaluating(parts):
            pixels = [self.family.control_pixels(parts, one) for one in images_of(image)]
            if len({one.shape for one in pixels}) > 1:
                raise OptionError("the images have different aspect ratios, so they are no batch; give them one by one")
            return self.family.encode_images(parts, torch.stack(pixels))[:, :, None]

    @torch.no_grad()
    def encode_prompt_image_embedding(
        self, prompt: str | Sequence[str], image: ImagesLike, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Text rows (B, L, D) of instructions on control images, and which of them are no padding, (B, L) int64.

        A text may have several control images; of several texts each has one. The text encoder goes to device; None leaves it there.
        """
        images, parts = images_of(image), self.load_model()
        home = _named(device, next(parts.text_encoders["te1"].parameters()).device)
        if isinstance(prompt, str):
            found = self._encoder.rows(images, [prompt], home)
        elif len(images) in (1, len(prompt)):
            each = images * len(prompt) if len(images) == 1 else images
            found = [self._encoder.rows([one], [text], home)[0] for text, one in zip(prompt, each, strict=True)]
        else:
            raise OptionError(f"{len(prompt)} prompts and {len(images)} images: give one image for each, or one for all")
        masks = [torch.ones(len(rows), dtype=torch.int64, device=rows.device) for rows in found]
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(found, batch_first=True), pad(masks, batch_first=True)

    @torch.no_grad()
    def decode_vae_latent(self, latents: Tensor, height: int | None = None, width: int | None = None) -> np.ndarray:
        """The image of normalised latents, (H, W, 3) uint8, with a further axis in front for several.

        latents: (B, 16, 1, h, w), as encode_image_embedding and _unpack_latents give them, (B, 1, 16, h, w) or (B, 16, h, w); or tokens
        (B, N, 64) with height and width in pixels.
        """
        parts = self.load_model()
        if latents.ndim == 3:
            if height is None or width is None:
                text = "decode_vae_latent: tokens do not say their size; give height and width, or what _unpack_latents makes of them"
                raise OptionError(text)
            latents = unpacked(latents, height // 8, width // 8)
        elif latents.ndim == 5:
            latents = latents[:, :, 0] if latents.shape[2] == 1 else latents[:, 0]
        with evaluating(parts):
            made = np.stack([np.asarray(one) for one in as_images(self.family.decode(parts, latents.float()))])
        return made[0] if len(made) == 1 else made

    # Predicting

    def setup_predict(self) -> Predictor:
        """The model on the devices of prediction; a second call gives the same one. One that is loaded with a trained or merged adapter
        is taken over, anything else is let go and loaded anew; quantize may have changed in between."""
        devices = dict(self.predict_devices)
        loading = LoadingSection(transformer_device=devices.pop("transformer_device", None))
        model = PredictModelOptions.model_validate({**self.options.model.model_dump(), **devices})
        options = QwenImagePredict(model=model, loading=loading, predict=QwenPredictSection(serve=True))
        kept = self.network is not None or self._merged
        if not kept and not self.lora and (weights := self.options.network.network_weights):
            # model.lora.pretrained_weight, which an adapter that is trained has begun with.
            self.lora = [(_adapter_in(Path(weights)), 1.0)]
        if self.predictor is not None and not kept and is_quantized(self.predictor.parts.backbone) != self.quantize:
            self.free()
        if self.predictor is None and kept:
            assert self._parts is not None
            self._take_off()
            if self.quantize:
                self.quantize_model(self._parts.backbone)
            self.predictor = Predictor(self.family, self._parts, devices_for(options))
        elif self.predictor is None:
            self.free()
            self.predictor = Predictor.load(options)
            self.scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.predictor.parts.scheduler_config)
        return self.predictor

    def predict(
        self,
        prompt_image: ImagesLike,
        prompt: str | Sequence[str],
        negative_prompt: str | None = "",
        num_inference_steps: int = 20,
        true_cfg_scale: float = 4.0,
        *,
        size: tuple[int, int] | None = None,
        seed: int | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> np.ndarray:
        """The edited image, (H, W, 3) uint8; of several prompts, all edits of the same control images, (B, H, W, 3).

        The adapters of set_lora, fit and load_lora count. Guidance is on with true_cfg_scale above 1, an empty negative prompt is one;
        None turns it off. size is (width, height).
        """
        predictor, images = self.setup_predict(), tuple(images_of(prompt_image))
        files, weights = tuple(str(file) for file, _ in self.lora), tuple(weight for _, weight in self.lora)
        made: list[Image.Image] = []
        for text in [prompt] if isinstance(prompt, str) else prompt:
            request = Request(text, images, negative_prompt, num_inference_steps, true_cfg_scale, seed, size, 1, files, weights)
            made += predictor.predict(request, on_step)
        return np.asarray(made[0]) if isinstance(prompt, str) else np.stack([np.asarray(one) for one in made])

    # Adapter files

    def save_lora(self, path: str | Path) -> Path:
        """Writes the adapter that is trained, or the one of fit or load_lora, to a .safetensors file, or into a folder as
        pytorch_lora_weights.safetensors; the file. Raises OptionError when there is none."""
        path = Path(path)
        file = path if path.suffix == ".safetensors" else path / FILE
        if self.network is not None:
            self._export(file, self.options.output.save_precision)
        elif len(self.lora) == 1 and self.lora[0][1] == 1.0:
            with written_aside(file) as aside:
                shutil.copyfile(self.lora[0][0], aside)
        else:
            there = (
                f"{len(self.lora)} files with strengths are loaded; merge_lora puts them into the model"
                if self.lora
                else "set_lora makes one"
            )
            raise OptionError(f"save_lora: no adapter is trained here that could be saved; {there}")
        return file

    def _export(self, file: Path, precision: Any) -> None:
        assert self.network is not None
        parts, options = self.load_model(), self.options
        texts = build(options, base_facts(self.family, parts), step=self.global_step, epoch=0)
        export(self.network, parts, file, save_model_as=options.output.save_model_as, precision=precision, metadata=texts)

    def load_lora(self, path: str | Path, weight: float = 1.0) -> None:
        """Uses an adapter file, or the one in a folder, beside those that are used already, in predict; on the model of load_model it
        counts at once."""
        self.lora.append((_adapter_in(Path(path)), weight))
        try:
            if self.predictor is not None:
                self.predictor.adapters.put_on([str(file) for file, _ in self.lora], [strength for _, strength in self.lora])
            elif self._parts is not None:
                self._take_off()
                self._applied = apply_adapters(self._parts, self.lora)
        except ValueError:
            self.lora.pop()
            raise

    def merge_lora(self) -> int:
        """Adds the adapter that is trained, and the files of load_lora and fit, to the weights of the loaded model, for good; the number of
        layers changed."""
        parts, changed = self.load_model(), 0
        if is_quantized(parts.backbone):
            raise OptionError("merge_lora: the transformer is held in 8 bits; turn quantize off and load it anew, then merge")
        self._take_off()
        if self.predictor is not None:
            self.predictor.adapters.take_off()
            self.predictor.kept.clear()
        with TemporaryDirectory() as folder:
            files = list(self.lora)
            if self.network is not None:
                trained = Path(folder) / FILE
                self._export(trained, "float")
                self.network.detach()
                self.network = self.optimizer = self.lr_scheduler = None
                files.append((trained, 1.0))
            changed = sum(merge_into(parts, path, weight) for path, weight in files)
        self.lora, self._merged = [], self._merged or bool(files)
        if self.predictor is not None:
            self._parts = parts
        return changed

    def _take_off(self) -> None:
        if self._applied is not None:
            self._applied.remove()
            self._applied = None

    @contextmanager
    def _process(self, cache_only: bool = False) -> Iterator[tuple[Process, command_line.Invocation]]:
        """This process of a start on the images of the configuration, and what is asked of it."""
        options = self.options
        if options.dataset.train_data_dir == configuration.NO_IMAGES:
            text = "train_data_dir is missing: the configuration names no images; give data.init_args.dataset_path, or a dataloader"
            raise OptionError(Problem("train_data_dir", text))
        stop = StopRequest()
        asked = command_line.Invocation(options, None, False, cache_only, frozenset())
        process = Process.begin(asked, stop)
        try:
            with stop.listening():
                yield process, asked
        finally:
            process.close()


def _config(given: object) -> configuration.Config | QwenImageNetwork:
    """What a trainer is configured by. Raises OptionError with everything that is refused or wrong."""
    if isinstance(given, QwenImageNetwork):
        return given
    if isinstance(given, str | Path):
        is_yaml = Path(given).suffix.lower() in (".yaml", ".yml")
        given = configuration.read(Path(given)) if is_yaml else toml_files.read_toml(Path(given))
    config = configuration.config_of(given)
    if any(isinstance(config.get(name), Mapping) for name in configuration.SECTIONS):
        return _checked(config)
    return flat.build(QwenImageNetwork, {"train_data_dir": configuration.NO_IMAGES, **config})


def _checked(config: configuration.Config) -> configuration.Config:
    configuration.complete(config, configuration.run_of(config, QwenImageNetwork)[0])
    return config


def _options(config: configuration.Config | QwenImageNetwork) -> tuple[QwenImageNetwork, dict[str, str]]:
    """Options of a run, and devices of prediction by option."""
    return (config, {}) if isinstance(config, QwenImageNetwork) else configuration.run_of(config, QwenImageNetwork)


def _named(device: torch.device | str | None, default: torch.device) -> torch.device:
    return device_of("device", None if device is None else str(device), default)


def _unpacked(tokens: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """The latents (B, 16, h, w) of images whose tokens (B, N, 64) stand one after the other. Raises OptionError when N is not theirs."""
    counts = [rows * columns for rows, columns in grids]
    if sum(counts) != tokens.shape[1]:
        sizes = ", ".join(f"{16 * columns} x {16 * rows}" for rows, columns in grids)
        raise OptionError(f"{tokens.shape[1]} image tokens are not those of {sizes} pixels, which are {sum(counts)}")
    parts = tokens.float().split(counts, dim=1)
    return [unpacked(part, 2 * rows, 2 * columns) for part, (rows, columns) in zip(parts, grids, strict=True)]


def _adapter_in(path: Path) -> Path:
    """The adapter file that a path names: itself, or the one in a folder. Raises OptionError."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.safetensors"))
    chosen = path / FILE if path / FILE in files else files[0] if len(files) == 1 else None
    if chosen is None:
        raise OptionError(f"load_lora: {path.name} holds {len(files)} .safetensors files and no {FILE}; name the file")
    return chosen
