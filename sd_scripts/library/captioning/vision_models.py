"""Models of transformers that look at images and write: Florence-2, which knows tasks, BLIP-2 and its like, which go on with a text, and
those that follow instructions in a chat, as most later ones. Weights come from safetensors; no code of a model's own is ever run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from sd_scripts.library.core.devices import best_device, precision_for
from sd_scripts.schema.captioning import DESCRIBE, TASK, CaptionSection
from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.outside import json_of

HERE = {"local_files_only": True, "trust_remote_code": False}
_WITH_FILMS = {"self", "image_processor", "tokenizer", "video_processor", "chat_template", "kwargs"}
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)


class VisionModel:
    """One model with its processor, on its device."""

    def __init__(self, folder: Path, options: CaptionSection) -> None:
        self.about = folder.name
        self._options = options
        self._device = best_device(options.device)
        self._dtype = precision_for("auto", self._device)
        config = _config_of(folder)
        self._model = loaded(AutoModelForImageTextToText, "caption_model", folder, self._dtype).to(self._device)
        self._processor = _processor_of(folder, config)
        self._processor.tokenizer.padding_side = "left"
        if self._processor.tokenizer.pad_token is None:
            self._processor.tokenizer.pad_token = self._processor.tokenizer.eos_token
        self._is_tasked = config.model_type == "florence2"
        self._prompt = self._prompt_of(options.instruction)

    def _prompt_of(self, instruction: str | None) -> str:
        if self._is_tasked:
            return instruction or TASK
        if not getattr(self._processor, "chat_template", None):
            return instruction or ""
        content = [{"type": "image"}, {"type": "text", "text": instruction or DESCRIBE}]
        return self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)

    @torch.inference_mode()
    def captions(self, images: Sequence[Image.Image]) -> list[str]:
        texts = [self._prompt] * len(images)
        given = self._processor(images=list(images), text=texts, padding=True, return_tensors="pt")
        given = given.to(self._device)
        for name, value in given.items():
            if value.is_floating_point():
                given[name] = value.to(self._dtype)
        made = self._model.generate(**given, max_new_tokens=self._options.max_new_tokens, do_sample=False)
        if not self._model.config.is_encoder_decoder:
            made = made[:, given["input_ids"].shape[1] :]
        said = self._processor.tokenizer.batch_decode(made, skip_special_tokens=True)
        return [_THOUGHTS.sub("", text).strip() for text in said]


def loaded(model_class: Any, option: str, folder: Path, dtype: torch.dtype) -> Any:
    """A model whose weights have all come from its folder. Raises OptionError: what is left at random would answer, and wrongly."""
    try:
        model, told = model_class.from_pretrained(folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **HERE)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as err:
        raise _problem(f"{folder.name} cannot be loaded: {first_line(err)}", option) from err
    missing = sorted(told["missing_keys"]) + sorted(str(key) for key in told.get("mismatched_keys", ()))
    if missing:
        raise _problem(
            f"{folder.name} does not have {len(missing)} of the weights that transformers' {type(model).__name__} needs, such as "
            f"{missing[0]}; take the model in transformers' own layout (of Florence-2 those of florence-community)",
            option,
        )
    return model.eval()


def _config_of(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, **HERE)
    except (OSError, ValueError, KeyError) as err:
        raise _problem(f"{folder.name} has no config.json that transformers knows ({first_line(err)})") from err


def _processor_of(folder: Path, config: Any) -> Any:
    try:
        whole = PROCESSOR_MAPPING.get(type(config), None)
        if whole is not None and set(inspect.signature(whole.__init__).parameters) == _WITH_FILMS:
            return _without_films(whole, folder)
        return AutoProcessor.from_pretrained(folder, **HERE)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as err:
        raise _problem(f"the processor of {folder.name} cannot be loaded: {first_line(err)}") from err


def _without_films(whole: Any, folder: Path) -> Any:
    """A processor without its part for films, which needs torchvision; what it makes of texts and images is the same."""

    class Still(whole):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    tokenizer = AutoTokenizer.from_pretrained(folder, **HERE)
    images = AutoImageProcessor.from_pretrained(folder, **HERE)
    return Still(images, tokenizer, _template_of(folder) or tokenizer.chat_template)


def _template_of(folder: Path) -> str | None:
    """The chat template that stands beside the tokenizer, by either of the names that transformers has had for its file."""
    file, former = folder / "chat_template.jinja", folder / "chat_template.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    said = json_of(former.read_bytes()) if former.is_file() else {}
    return str(said["chat_template"]) if isinstance(said, dict) and "chat_template" in said else None


def _problem(text: str, option: str = "caption_model") -> OptionError:
    return OptionError(Problem(option, f"{option}: {text}"))
