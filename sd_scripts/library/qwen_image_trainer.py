"""The interface of qwen-image-finetune's trainer class over this engine, for scripts that were written for it.

Every method is a few lines: training is `Session`, pictures are `Predictor`, files are `networks`. Options are ours; a configuration of
that project is read as schema/qwen_yaml.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from sd_scripts.library.devices import device_of
from sd_scripts.library.environment import CPU, DTYPES, make_accelerator, with_precision
from sd_scripts.library.families.packing import packed, unpacked
from sd_scripts.library.families.pictures import as_pictures, evaluating
from sd_scripts.library.families.qwen_edit import QwenEdit
from sd_scripts.library.networks import AppliedAdapters, Network, apply_adapters, attach, export, merge_into
from sd_scripts.library.optim import learning_rate_at, make_optimizer
from sd_scripts.library.predict import Predictor, Progress, Request, read_pictures
from sd_scripts.library.predicting.memory import give_back
from sd_scripts.library.protocols import Parts
from sd_scripts.library.quantize import quantize_network
from sd_scripts.library.schedules import Factor
from sd_scripts.library.session import Session
from sd_scripts.library.stopping import StopRequest
from sd_scripts.schema import flat, qwen_yaml
from sd_scripts.schema.predict import LoadingSection, PredictModelOptions, PredictSection, QwenImagePredict
from sd_scripts.schema.runs import QwenImageNetwork

Pictures = Image.Image | str | Path | Sequence[Image.Image | str | Path]


class QwenImageEditTrainer:
    """One configuration and what is loaded of it. Networks are loaded by `load_model`, or when they are first needed."""

    def __init__(self, config: str | Path | Mapping[str, Any] | QwenImageNetwork) -> None:
        """config: the path of a YAML file of qwen-image-finetune, or of a TOML file of ours; a mapping of either; or options.

        Raises OptionError with everything that is wrong.
        """
        self.options, self.predict_devices = options_of(config)
        self.family = QwenEdit()
        self.network: Network | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.learning_rate_at: Factor | None = None
        self.accelerator: Accelerator | None = None
        self.predictor: Predictor | None = None
        self.run: Path | None = None
        """Folder of the last run."""
        self.lora: list[tuple[Path, float]] = []
        """Adapter files and their strengths."""
        self._parts: Parts | None = None
        self._applied: AppliedAdapters | None = None

    # Training

    def load_model(self) -> Parts:
        """All networks, frozen, in main memory; a second call gives the same ones."""
        if self._parts is None:
            precision = with_precision(self.options, self._device()).training.mixed_precision
            self._parts = self.family.load(self.options.model, CPU, DTYPES[precision])
        return self._parts

    def setup_accelerator(self) -> Accelerator:
        """Devices and processes of training."""
        self.accelerator = self.accelerator or make_accelerator(self.options)
        return self.accelerator

    def quantize_model(self, kind: str = "qint8") -> None:
        """Holds the loaded transformer in few bits: qint8, qfloat8, fp8 or nf4; before set_lora. The option transformer_quantization does
        it while loading, in less memory."""
        quantize_network(self.load_model().backbone, kind)

    def set_lora(self) -> Network:
        """Puts a new adapter of the options on the loaded model, for training loops of one's own; fit does it by itself."""
        parts, network = self.load_model(), self.options.network
        self.network = attach(parts, network, self.family.adapter_targets(parts, network.wants_convolutions), self.options.training.seed)
        return self.network

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, Factor]:
        """The optimizer of the adapter of set_lora, and the factor on its learning rates by step."""
        network, options = self.network or self.set_lora(), self.options.optimizer
        self.optimizer = make_optimizer(options, network.parameter_groups(self.options.network, options.learning_rate))
        self.learning_rate_at = learning_rate_at(options, self.options.training.max_train_steps)
        return self.optimizer, self.learning_rate_at

    def fit(self) -> Path:
        """Trains with the engine and its caches, as the training script does; the saved adapter file.

        What is loaded here is let go first. Raises OptionError and TrainingError.
        """
        self.free()
        with self._session() as session:
            finished = session.run()
            session.last_word("finished" if finished else "stopped", text=session.closing)
            assert session.run_dir is not None
            self.run = session.run_dir.path
        self.lora = [(self.run / f"{self.options.output.output_name}{self.options.output.ending}", 1.0)]
        return self.lora[0][0]

    def cache_embeddings(self) -> str:
        """Encodes all pictures and instructions into the cache on disk; a summary for people."""
        self.free()
        with self._session(cache_only=True) as session:
            return session.fill_caches()

    # Predicting

    def setup_predict(self) -> Predictor:
        """Loads the model on the devices of prediction; a second call gives the same one. What was loaded for training is let go."""
        if self.predictor is None:
            self._let_go_of_parts()
            devices = dict(self.predict_devices)
            loading = LoadingSection(transformer_device=devices.pop("transformer_device", None))
            model = PredictModelOptions.model_validate({**self.options.model.model_dump(), **devices})
            self.predictor = Predictor.load(QwenImagePredict(model=model, loading=loading, predict=PredictSection(serve=True)))
        return self.predictor

    def predict(
        self,
        prompt_image: Pictures,
        prompt: str | Sequence[str],
        negative_prompt: str | None = None,
        num_inference_steps: int = 20,
        true_cfg_scale: float = 4.0,
        *,
        size: tuple[int, int] | None = None,
        seed: int | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> list[Image.Image]:
        """A picture for each prompt, all edits of the same control picture or pictures, with the adapters of fit and load_lora.

        Guidance is on with a negative prompt and true_cfg_scale above 1; an empty negative prompt is one. size is (width, height).
        """
        predictor = self.setup_predict()
        pictures = tuple(_listed(prompt_image))
        files, weights = tuple(str(file) for file, _ in self.lora), tuple(weight for _, weight in self.lora)
        made: list[Image.Image] = []
        for text in [prompt] if isinstance(prompt, str) else prompt:
            request = Request(text, pictures, negative_prompt, num_inference_steps, true_cfg_scale, seed, size, 1, files, weights)
            made += predictor.predict(request, on_step)
        return made

    # Single steps

    @torch.no_grad()
    def encode_image_embedding(self, image: Image.Image) -> Tensor:
        """The picture tokens (1, N, 64) of a control picture, at the size that the model gives it."""
        parts = self._any_parts()
        with evaluating(parts):
            return packed(self.family.encode_pictures(parts, self.family.control_pixels(parts, image.convert("RGB"))[None]))

    @torch.no_grad()
    def encode_prompt_image_embedding(self, prompt: str, image: Pictures) -> tuple[Tensor, Tensor]:
        """Text rows (1, L, D) of an instruction on control pictures, and their mask (1, L) int64 of ones: nothing is padded."""
        parts = self._any_parts()
        with evaluating(parts):
            pixels = [self.family.control_pixels(parts, one) for one in map(_opened, _listed(image))]
            prefix, (suffix,) = self.family.encode_instructions(parts, pixels, [prompt])
        rows = torch.cat([prefix, suffix])[None]
        return rows, torch.ones(rows.shape[:2], dtype=torch.int64, device=rows.device)

    @torch.no_grad()
    def decode_vae_latent(self, latents: Tensor, height: int, width: int) -> list[Image.Image]:
        """The pictures of picture tokens (B, N, 64); height and width in pixels."""
        parts = self._any_parts()
        with evaluating(parts):
            return as_pictures(self.family.decode(parts, unpacked(latents.float(), height // 8, width // 8)))

    # Adapter files

    def save_lora(self, path: str | Path) -> Path:
        """Writes the adapter of set_lora in the layout and precision of the options."""
        network, output = self.network or self.set_lora(), self.options.output
        export(network, self.load_model(), Path(path), save_model_as=output.save_model_as, precision=output.save_precision)
        return Path(path)

    def load_lora(self, path: str | Path, weight: float = 1.0) -> None:
        """Uses an adapter file, beside those that are used already, in predict; on the model of load_model it counts at once."""
        self.lora.append((Path(path), weight))
        if self._parts is not None:
            try:
                self._apply()
            except ValueError:
                self.lora.pop()
                raise

    def merge_lora(self) -> int:
        """Adds the files of load_lora and fit to the weights of the loaded model, for good; the number of layers changed."""
        parts = self.load_model()
        self._take_off()
        counts = [merge_into(parts, path, weight) for path, weight in self.lora]
        self.lora = []
        return sum(counts)

    def free(self) -> None:
        """Lets go of everything that is loaded."""
        if self.predictor is not None:
            self.predictor.free()
            self.predictor = None
        self._let_go_of_parts()

    def _any_parts(self) -> Parts:
        """What is loaded, for predicting or for training."""
        return self.predictor.parts if self.predictor is not None else self.load_model()

    def _apply(self) -> None:
        self._take_off()
        self._applied = apply_adapters(self.load_model(), self.lora)

    def _take_off(self) -> None:
        if self._applied is not None:
            self._applied.remove()
            self._applied = None

    def _let_go_of_parts(self) -> None:
        self._parts = self._applied = self.network = self.optimizer = None
        give_back()

    def _device(self) -> torch.device:
        best = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
        return device_of("transformer_device", self.predict_devices.get("transformer_device"), best)

    @contextmanager
    def _session(self, cache_only: bool = False) -> Iterator[Session]:
        stop = StopRequest()
        session = Session(flat.Invocation(self.options, None, False, cache_only, frozenset()), stop)
        try:
            with stop.listening():
                yield session
        finally:
            session.close()


def options_of(config: str | Path | Mapping[str, Any] | QwenImageNetwork) -> tuple[QwenImageNetwork, dict[str, str]]:
    """Options of a run, and devices of prediction by option. Raises OptionError with everything that is wrong."""
    if isinstance(config, QwenImageNetwork):
        return config, {}
    if isinstance(config, Mapping):
        given = config
    elif Path(config).suffix.lower() in (".yaml", ".yml"):
        given = qwen_yaml.read(Path(config))
    else:
        given = flat.read_toml(Path(config))
    if not qwen_yaml.looks_like(given):
        return flat.build(QwenImageNetwork, given), {}
    found = qwen_yaml.translate(given)
    devices = {name: str(device) for name, device in found.predict.items()}
    return flat.build(QwenImageNetwork, found.values), devices


def _listed(pictures: Pictures) -> list[Image.Image | str | Path]:
    return [pictures] if isinstance(pictures, Image.Image | str | Path) else list(pictures)


def _opened(picture: Image.Image | str | Path) -> Image.Image:
    return read_pictures([picture])[0]
