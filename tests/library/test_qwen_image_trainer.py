"""The interface of qwen-image-finetune's class: its configuration trains, predicts and moves adapter files with this engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts.library.families.qwen_edit import QwenEdit
from sd_scripts.library.predict import Predictor, Request
from sd_scripts.library.quantize import is_quantized
from sd_scripts.library.qwen_image_trainer import QwenImageEditTrainer, options_of
from sd_scripts.schema.errors import OptionError

QWEN = QwenEdit()
DRAW = np.random.default_rng()


def picture(width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(DRAW.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    QWEN.save(QWEN.tiny(), folder, "diffusers", None, {})
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("target", "control"):
        (folder / name).mkdir()
        for number in range(4):
            picture().save(folder / name / f"p{number}.png")
    for number in range(4):
        (folder / "target" / f"p{number}.txt").write_text("make it red")
    return folder


@pytest.fixture
def config(base: Path, pairs: Path, tmp_path: Path) -> Path:
    """A configuration as that project has them."""
    path = tmp_path / "config.yaml"
    path.write_text(f"""
model:
  pretrained_model_name_or_path: {base}
  lora: {{r: 4, lora_alpha: 2, target_modules: [to_k, to_q, to_v, to_out.0], init_lora_weights: gaussian}}
data:
  class_path: src.data.dataset.ImageDataset
  init_args: {{dataset_path: {pairs}, image_size: [64, 64], cache_drop_rate: 0.1}}
  batch_size: 2
  num_workers: 1
optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 1e-3, betas: [0.9, 0.99]}}}}
train: {{gradient_accumulation_steps: 1, max_train_steps: 2, mixed_precision: "no", checkpointing_steps: 5}}
cache: {{use_cache: true, cache_dir: "${{logging.output_dir}}/cache", vae_encoder_device: cpu}}
predict: {{devices: {{vae: cpu, text_encoder: cpu, transformer: cpu}}}}
logging: {{output_dir: {tmp_path / "output"}, tracker_project_name: red}}
""")
    return path


def test_its_configuration_trains_and_the_result_edits_pictures(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    assert trainer.predict_devices == {"vae_device": "cpu", "text_encoder_device": "cpu", "transformer_device": "cpu"}
    assert "pictures 8 entries" in trainer.cache_embeddings()
    file = trainer.fit()
    assert file.name == "red.safetensors" and file.is_file() and trainer.run == file.parent
    control = picture()
    (found,) = trainer.predict(control, "make it red", " ", num_inference_steps=2, seed=1)
    request = Request("make it red", (control,), " ", 2, 4.0, 1, lora=(str(file),))
    (wanted,) = Predictor(QWEN, QWEN.load(trainer.options.model, torch.device("cpu"), torch.float32)).predict(request)
    assert np.array_equal(np.asarray(found), np.asarray(wanted))
    assert len(trainer.predict([control], ["a", "b"], num_inference_steps=1, size=(96, 64))) == 2
    trainer.free()


def test_single_steps_are_those_of_the_model(config: Path) -> None:
    trainer, control = QwenImageEditTrainer(config), picture(80, 48)
    parts = trainer.load_model()
    assert trainer.load_model() is parts
    tokens = trainer.encode_image_embedding(control)
    assert tokens.shape == (1, 5 * 3, 64)
    (back,) = trainer.decode_vae_latent(tokens, 48, 80)
    assert back.size == (80, 48)
    rows, mask = trainer.encode_prompt_image_embedding("make it red", [control])
    prefix, (suffix,) = QWEN.encode_instructions(parts, [QWEN.control_pixels(parts, control)], ["make it red"])
    assert torch.equal(rows[0], torch.cat([prefix, suffix])) and mask.shape == rows.shape[:2] and bool(mask.all())


def test_adapters_are_made_saved_loaded_and_merged(config: Path, tmp_path: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    network = trainer.set_lora()
    optimizer, factor = trainer.configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == 1e-3 and factor(1) == 1.0
    network.load({name: 0.3 * torch.randn_like(value) for name, value in network.state().items()})
    file = trainer.save_lora(tmp_path / "mine.safetensors")
    network.detach()
    plain = picture_of(trainer)
    trainer.load_lora(file, 0.5)
    applied = picture_of(trainer)
    assert np.abs(applied - plain).max() > 0
    assert trainer.merge_lora() == len(network.plans) and trainer.lora == []
    assert np.abs(picture_of(trainer) - applied).max() <= 2
    with pytest.raises(OptionError):
        trainer.load_lora(config)
    assert trainer.lora == []


def picture_of(trainer: QwenImageEditTrainer) -> np.ndarray:
    """A picture of the model that is loaded for training, as it is."""
    control = Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8))
    (found,) = Predictor(QWEN, trainer.load_model()).predict(Request("x", (control,), None, 2, seed=3))
    return np.asarray(found).astype(int)


def test_the_transformer_is_held_in_8_bits_when_asked(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    trainer.quantize_model()
    assert is_quantized(trainer.load_model().backbone) and not is_quantized(trainer.load_model().text_encoders["te1"])
    assert trainer.set_lora().parameters()


def test_our_own_options_are_a_configuration_too(config: Path, tmp_path: Path) -> None:
    options = QwenImageEditTrainer(config).options
    assert QwenImageEditTrainer(options).options == options
    ours = {"pretrained_model_name_or_path": "toy", "train_data_dir": "x", "network_dim": 7}
    assert options_of(ours)[0].network.network_dim == 7


def test_what_is_wrong_with_a_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.yaml cannot be read"):
        QwenImageEditTrainer(tmp_path / "gone.yaml")
    with pytest.raises(OptionError) as err:
        QwenImageEditTrainer({"model": {"rank": 0}, "train": {"max_train_steps": "many"}, "optimizer": {"init_args": {"lr": -1}}})
    for part in ("network_dim", "max_train_steps", "learning_rate", "train_data_dir is missing"):
        assert part in str(err.value), part
