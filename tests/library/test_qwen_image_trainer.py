"""The interface of qwen-image-finetune's class: its configuration trains, predicts and moves adapter files with this engine."""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import QwenImageEditPipeline
from PIL import Image
from safetensors import safe_open
from torch.utils.data import DataLoader

from sd_scripts.families.qwen_edit.batches import images_of, without_end
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.trainer import QwenImageEditTrainer, load_config_from_yaml
from sd_scripts.library.memory.quantize import is_quantized
from sd_scripts.library.render.predict import Predictor, Request
from sd_scripts.programs.qwen_image_finetune import configuration
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError

QWEN = QwenEdit()
DRAW = np.random.default_rng(random.getrandbits(64))


def image(width: int = 64, height: int = 64) -> Image.Image:
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
            image().save(folder / name / f"p{number}.png")
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


# One test for each row of the table of calls and attributes that the design document of that class names.


def batches(count: int = 2, size: int = 64) -> list[dict[str, Any]]:
    """What that project's loader gives: images (B, 3, H, W) uint8 and texts."""
    draw = np.random.default_rng(1)
    return [
        {
            "image": torch.from_numpy(draw.integers(0, 256, (2, 3, size, size), dtype=np.uint8)),
            "control": torch.from_numpy(draw.integers(0, 256, (2, 3, size, size), dtype=np.uint8)),
            "prompt": ["make it red", "turn the whole image blue"],
        }
        for _ in range(count)
    ]


ENTRIES = ("pixel_latent", "control_latent", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embed", "empty_prompt_embeds_mask")


def test_a_configuration_is_a_file_a_mapping_or_an_object_and_its_sections_are_attributes(config: Path) -> None:
    loaded = load_config_from_yaml(config)
    assert loaded.model.lora.r == 4 and loaded["train"]["max_train_steps"] == 2 and loaded.optimizer.init_args["betas"] == [0.9, 0.99]
    assert loaded.cache.cache_dir == f"{loaded.logging.output_dir}/cache" and loaded.predict.devices["vae"] == "cpu"
    # What the file leaves to that program has its value.
    assert (loaded.train.max_grad_norm, loaded.train.gradient_checkpointing, loaded.cache.text_encoder_device) == (1.0, True, None)
    given = yaml.safe_load(config.read_text())
    as_objects = SimpleNamespace(**{name: SimpleNamespace(**section) for name, section in given.items()})
    wanted = QwenImageEditTrainer(config).options
    for other in (loaded, given, as_objects, wanted, str(config)):
        assert QwenImageEditTrainer(other).options == wanted
    loaded.train.max_train_steps = 7
    assert QwenImageEditTrainer(loaded).options.training.max_train_steps == 7
    ours = {"pretrained_model_name_or_path": "toy", "train_data_dir": "x", "network_dim": 7}
    assert QwenImageEditTrainer(ours).options.network.network_dim == 7
    with pytest.raises(OptionError, match="a float is no configuration"):
        QwenImageEditTrainer(1.5)
    with pytest.raises(AttributeError, match="no lora_rank"):
        _ = loaded.model.lora_rank


def test_all_attributes_are_there_and_load_model_fills_them(config: Path) -> None:
    trainer = QwenImageEditTrainer(load_config_from_yaml(config))
    empty = ("accelerator", "optimizer", "lr_scheduler", "vae", "qwen_vl", "transformer", "tokenizer", "processor", "scheduler")
    assert {name: getattr(trainer, name) for name in empty} == dict.fromkeys(empty)
    assert trainer.config.model.lora.r == 4
    assert (trainer.global_step, trainer.use_cache, trainer.cache_exist, trainer.quantize) == (0, True, False, False)
    assert trainer.cache_dir == trainer.config.cache.cache_dir and trainer.weight_dtype is torch.float32
    trainer.weight_dtype = torch.bfloat16
    assert trainer.options.training.mixed_precision == "bf16" and trainer.weight_dtype is torch.bfloat16
    trainer.load_model()
    kinds = ("AutoencoderKLQwenImage", "Qwen2_5_VL", "QwenImageTransformer2DModel", "Qwen2Tokenizer", "", "FlowMatchEulerDiscreteScheduler")
    for name, kind in zip(empty[3:], kinds, strict=True):
        assert type(getattr(trainer, name)).__name__.startswith(kind) and getattr(trainer, name) is not None, name


def test_set_up_in_order_makes_an_accelerator_an_adapter_an_optimizer_and_a_schedule(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    trainer.load_model()
    trainer.setup_accelerator()
    trainer.set_lora()
    trainer.configure_optimizers()
    assert trainer.accelerator is not None and trainer.optimizer is not None and trainer.lr_scheduler is not None
    trained = [name for name, weight in trainer.transformer.named_parameters() if weight.requires_grad]
    assert trained and all("lora" in name for name in trained) and trainer.transformer.is_gradient_checkpointing
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.99) and trainer.lr_scheduler.get_last_lr() == [1e-3]
    # A second adapter takes the place of the first.
    first = trainer.network
    assert trainer.set_lora() is not first and trained == [
        name for name, one in trainer.transformer.named_parameters() if one.requires_grad
    ]


class Dying(QwenImageEditTrainer):
    """Its process is killed in the second step."""

    def training_step(self, batch: Mapping[str, Any]) -> torch.Tensor:
        if self.global_step == 1:
            raise KeyboardInterrupt
        return super().training_step(batch)


def test_fit_takes_any_batches_and_goes_on_from_its_state(config: Path, tmp_path: Path) -> None:
    """Two steps at once, and one after the other by two processes, give the same adapter to the last bit."""
    (batch,) = batches(1)
    cached = QwenImageEditTrainer(config).cache_step(batch, "cpu", "cpu")
    given = load_config_from_yaml(config)
    given.train.checkpointing_steps = 1

    def trainer_of(name: str, kind: type[QwenImageEditTrainer] = QwenImageEditTrainer) -> QwenImageEditTrainer:
        given.logging.output_dir = str(tmp_path / name)
        return kind(copy.deepcopy(given))

    whole = trainer_of("whole")
    file = whole.fit(train_dataloader=[cached, batch])
    assert file.name == "red.safetensors" and whole.global_step == 2 and whole.run == file.parent
    with pytest.raises(KeyboardInterrupt):
        trainer_of("parted", Dying).fit([cached, batch])
    parted = trainer_of("parted")
    # Batches of a DataLoader, encoded without their sizes: square images.
    first = {name: cached[name] for name in ENTRIES[:4]}
    again = parted.fit(DataLoader([first, batch], batch_size=None))  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "parted").glob("*-red")] == [again.parent.name], "the second start goes on in the same folder"
    assert file.read_bytes() == again.read_bytes() and state_of(whole) and all(map(torch.equal, state_of(whole), state_of(parted)))
    kinds = [event["kind"] for event in RunDirectory(again.parent).events()[0]]
    assert kinds.count("started") == 2 and kinds.count("failed") == 1 and kinds.count("step") == 2 and kinds[-1] == "finished"
    # What is trained is what predicts, and what is saved for others.
    control = image()
    with_it = whole.predict(control, "make it red", num_inference_steps=1, seed=1)
    saved = whole.save_lora(tmp_path / "folder")
    with safe_open(saved, "pt") as opened:
        assert saved.name == "pytorch_lora_weights.safetensors" and json.loads(opened.metadata()["kohya_like.config"])["network_dim"] == 4
    other = QwenImageEditTrainer(config)
    other.load_lora(saved.parent)
    assert np.abs(other.predict(control, "make it red", num_inference_steps=1, seed=1).astype(int) - with_it).max() <= 1
    # A run that is over already gives what it has trained.
    over = trainer_of("whole")
    assert over.fit([cached, batch]) == file and over.global_step == 2
    assert np.abs(over.predict(control, "make it red", num_inference_steps=1, seed=1).astype(int) - with_it).max() <= 1
    for wrong in ([], iter([cached])):
        with pytest.raises(OptionError, match="no batch"):
            list(islice(without_end(wrong), 2))


def state_of(trainer: QwenImageEditTrainer) -> list[torch.Tensor]:
    assert trainer.network is not None
    return list(trainer.network.state().values())


@pytest.mark.long
def test_fit_without_batches_trains_on_the_configuration(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    assert "images 8 entries" in trainer.cache_embeddings() and trainer.cache_exist
    file = trainer.fit()
    assert file.name == "red.safetensors" and file.is_file() and trainer.run == file.parent and trainer.global_step == 2
    control = image()
    found = trainer.predict(control, "make it red", " ", num_inference_steps=2, seed=1)
    request = Request("make it red", (control,), " ", 2, 4.0, 1, lora=(str(file),))
    (wanted,) = Predictor(QWEN, QWEN.load(trainer.options.model, torch.device("cpu"), torch.float32)).predict(request)
    assert np.array_equal(found, np.asarray(wanted))
    assert trainer.save_lora(file.with_name("copy.safetensors")).read_bytes() == file.read_bytes()
    assert QwenImageEditTrainer(config).fit() == file, "nothing is left to do"


def test_a_step_has_a_loss_and_what_a_batch_holds_decides_how_it_is_found(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    trainer.config.data.init_args.cache_drop_rate = 0.0
    (batch,) = batches(1)
    entries = trainer.cache_step(batch, "cpu", "cpu")
    losses: list[torch.Tensor] = []
    for given, step in ((batch, trainer.training_step), (batch, trainer._training_step_compute), (entries, trainer.training_step)):
        trainer._num_samples = 0
        losses.append(step(given))
    losses[0].backward()
    assert len({float(loss.detach()) for loss in losses}) == 1 and any(one.grad is not None for one in trainer.network.parameters())  # type: ignore[union-attr]
    trainer._num_samples = 0
    four = {name: entries[name] for name in ENTRIES[:4]}
    assert torch.equal(trainer._training_step_cached(four), losses[0])
    trainer._num_samples = 0
    assert torch.equal(trainer._compute_loss(*(four[name] for name in ENTRIES[:4]), 64, 64), losses[0])
    assert 0.1 < losses[0].item() < 10 and not torch.equal(trainer.training_step(entries), losses[0]), "noise is drawn for every sample"
    problems = []
    for change, words in (
        ({"image": batch["image"][:1]}, "1 images"),
        ({"prompt": None}, "no prompt"),
        ({"image": batch["image"].float() * 3}, "0 to 1 is allowed"),
        ({"image": [image(96, 48), image(64, 64)]}, "different sizes"),
    ):
        wrong = {name: value for name, value in {**batch, **change}.items() if value is not None}
        with pytest.raises(OptionError) as err:
            trainer.training_step(wrong)
        problems += [words] if words not in str(err.value) else []
    with pytest.raises(OptionError, match="how many are in a row"):
        trainer.training_step({**four, "pixel_latent": four["pixel_latent"][:, :15], "control_latent": four["control_latent"][:, :15]})
    assert problems == []


def test_a_checkpoint_is_a_state_that_fit_goes_on_from(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    trainer.set_lora()
    trainer.configure_optimizers()
    trainer.network.load({name: value + 0.25 for name, value in trainer.network.state().items()})  # type: ignore[union-attr]
    folder = trainer.save_checkpoint(0, 2)
    assert folder.name == "000002" and folder.parent.parent == trainer.run
    other = QwenImageEditTrainer(config)
    other.fit(batches())
    assert other.global_step == 2 and other.run == trainer.run
    assert all(map(torch.equal, state_of(other), state_of(trainer)))
    # In a loop of one's own it saves what is there, and reads nothing of an older run.
    third = QwenImageEditTrainer(config)
    third.set_lora()
    before = state_of(third)
    assert third.save_checkpoint(epoch=0, global_step=1).parent.parent != trainer.run and all(map(torch.equal, state_of(third), before))


def test_entries_are_made_kept_and_used(config: Path) -> None:
    trainer, (batch,) = QwenImageEditTrainer(config), batches(1)
    entries = trainer.cache_step(batch, vae_device="cpu", text_device="cpu")
    assert set(ENTRIES) <= set(entries) and entries["pixel_latent"].shape == entries["control_latent"].shape == (2, 16, 64)
    assert entries["prompt_embeds_mask"].dtype == torch.int64 and entries["prompt_embed"].shape[:2] == entries["prompt_embeds_mask"].shape
    assert entries["prompt_embeds_mask"].sum(dim=1).tolist()[0] < entries["prompt_embed"].shape[1], "the shorter text is padded"
    one = trainer.cache_step({name: value[0] for name, value in batch.items()}, "cpu", "cpu")
    assert one["pixel_latent"].shape == (16, 64) and torch.equal(one["pixel_latent"], entries["pixel_latent"][0])
    empty, mask = trainer._encode_empty_prompt(batch["control"][:1], "cpu")
    assert torch.equal(empty[0], one["empty_prompt_embed"]) and torch.equal(mask[0], one["empty_prompt_embeds_mask"])
    assert not trainer.cache_exist and "2 of them encoded now" in trainer.cache_embeddings(train_dataloader=[batch]) and trainer.cache_exist
    assert "0 of them encoded now" in trainer.cache_embeddings([batch])
    kept = next(iter(Path(trainer.cache_dir).rglob("*.safetensors")))
    trainer._encoded = None  # type: ignore[method-assign,assignment]
    assert trainer.training_step(batch).item() > 0, "no encoder is asked"
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    del trainer._encoded
    assert QwenImageEditTrainer(config).training_step(batch).item() > 0, "a damaged entry is made again"


def test_images_are_predicted_from_arrays_as_arrays_on_the_devices_named_and_quantised_when_asked(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    assert trainer.predict_devices == {"vae_device": "cpu", "text_encoder_device": "cpu", "transformer_device": "cpu"}
    signature = inspect.signature(trainer.predict).parameters
    assert list(signature)[:5] == ["prompt_image", "prompt", "negative_prompt", "num_inference_steps", "true_cfg_scale"]
    assert [one.default for one in signature.values()][2:5] == ["", 20, 4.0]
    control = image()
    plain = trainer.setup_predict()
    found = trainer.predict(np.asarray(control), "make it red", "", 2, 2.0, seed=1)
    (wanted,) = plain.predict(Request("make it red", (control,), "", 2, 2.0, 1))
    assert isinstance(found, np.ndarray) and found.dtype == np.uint8 and np.array_equal(found, np.asarray(wanted))
    for other in (
        np.asarray(control).transpose(2, 0, 1),
        np.asarray(control) / np.float32(255),
        torch.from_numpy(np.array(control)),
        [control],
    ):
        assert np.array_equal(np.asarray(images_of(other)[0]), np.asarray(control))
    assert trainer.predict([control], ["a", "b"], num_inference_steps=1, size=(96, 64)).shape == (2, 64, 96, 3)
    trainer.quantize = True
    trainer.setup_predict()
    assert (
        is_quantized(trainer.transformer)
        and not is_quantized(trainer.qwen_vl)
        and trainer.predict(control, "a", num_inference_steps=1).any()
    )
    fresh = QwenImageEditTrainer(config)
    fresh.load_model()
    fresh.quantize = True
    fresh.setup_predict()
    assert is_quantized(fresh.transformer)
    devices = load_config_from_yaml(config)
    devices.predict.devices.transformer = "cuda:7"
    with pytest.raises(OptionError, match="cuda:7"):
        QwenImageEditTrainer(devices).setup_predict()


def test_single_encoders_and_the_decoder_take_and_give_what_the_document_says(config: Path) -> None:
    trainer, control = QwenImageEditTrainer(config), image(80, 48)
    parts = trainer.load_model()
    assert trainer.load_model() is parts
    latents = trainer.encode_image_embedding(control, torch.device("cpu"))
    assert latents.shape == (1, 16, 1, 6, 10)
    back = trainer.decode_vae_latent(latents)
    assert back.shape == (48, 80, 3) and back.dtype == np.uint8
    tokens = trainer._pack_latents(latents, 1, 16, 6, 10)
    for other in (latents[:, :, 0], latents.transpose(1, 2), trainer._unpack_latents(tokens, 48, 80, 8)):
        assert np.array_equal(trainer.decode_vae_latent(other), back)
    assert np.array_equal(trainer.decode_vae_latent(tokens, 48, 80), back)
    rows, mask = trainer.encode_prompt_image_embedding("make it red", control, "cpu")
    prefix, (suffix,) = QWEN.encode_instructions(parts, [QWEN.control_pixels(parts, control)], ["make it red"])
    assert torch.equal(rows[0], torch.cat([prefix, suffix])) and mask.shape == rows.shape[:2] and bool(mask.all())
    rows, mask = trainer.encode_prompt_image_embedding(["make it red", "a"], [control, control], "cpu")
    assert rows.shape[0] == 2 and mask.sum(dim=1).tolist() == [len(prefix) + len(suffix), int(mask[1].sum())] and not mask.all()
    with pytest.raises(OptionError, match="device: cuda:7"):
        trainer.encode_image_embedding(control, "cuda:7")
    with pytest.raises(OptionError, match="give height and width"):
        trainer.decode_vae_latent(tokens)


def test_adapters_are_made_saved_loaded_merged_and_quantised_under(config: Path, tmp_path: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    with pytest.raises(OptionError, match="no adapter is trained here"):
        trainer.save_lora(tmp_path / "none.safetensors")
    network = trainer.set_lora()
    network.load({name: 0.3 * torch.randn_like(value) for name, value in network.state().items()})
    file = trainer.save_lora(tmp_path / "mine.safetensors")
    network.detach()
    plain = image_of(trainer)
    trainer.network = None
    trainer.load_lora(file, 0.5)
    applied = image_of(trainer)
    assert np.abs(applied - plain).max() > 0
    assert trainer.merge_lora() == len(network.plans) and trainer.lora == []
    assert np.abs(image_of(trainer) - applied).max() <= 2
    # What is merged stays in the model that predicts.
    control = Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8))
    assert np.abs(trainer.predict(control, "x", None, 2, seed=3).astype(int) - applied).max() <= 2
    with pytest.raises(OptionError):
        trainer.load_lora(config)
    assert trainer.lora == []
    named = load_config_from_yaml(config)
    named.model.lora.pretrained_weight = str(file)
    assert QwenImageEditTrainer(named).setup_predict() and QwenImageEditTrainer({"model": {"rank": 3}}).options.network.network_dim == 3
    begun = QwenImageEditTrainer(named)
    assert np.abs(begun.predict(control, "x", None, 2, seed=3).astype(int) - applied).max() > 0 and begun.lora == [(file, 1.0)]
    # The adapter that is trained is merged as well.
    other = QwenImageEditTrainer(config)
    other.set_lora().load({name: 0.5**0.5 * value for name, value in network.state().items()})
    before = image_of(other)
    assert other.merge_lora() == len(network.plans) and other.network is None and np.abs(image_of(other) - before).max() <= 2
    quantised = QwenImageEditTrainer(config)
    model = quantised.load_model().backbone
    assert quantised.quantize_model(model, "cpu") is model and is_quantized(model) and not is_quantized(quantised.qwen_vl)
    assert quantised.set_lora().parameters()
    with pytest.raises(OptionError, match="8 bits"):
        quantised.merge_lora()


def test_latents_are_packed_as_the_pipeline_packs_them() -> None:
    latents = torch.randn(2, 16, 1, 6, 10)
    packed = QwenImageEditTrainer._pack_latents(latents, 2, 16, 6, 10)
    assert torch.equal(packed, QwenImageEditPipeline._pack_latents(latents, 2, 16, 6, 10)) and packed.shape == (2, 15, 64)
    assert torch.equal(QwenImageEditTrainer._unpack_latents(packed, 48, 80, 8), latents)


def test_all_keys_of_the_document_are_read(config: Path) -> None:
    given = yaml.safe_load(config.read_text())
    given["train"] |= {"gradient_checkpointing": False, "mixed_precision": "bf16", "max_grad_norm": 0.5}
    given["cache"] = {"vae_encoder_device": "cuda:1", "text_encoder_device": "cuda:2", "cache_dir": "c", "use_cache": False}
    given["predict"] = {"devices": {"vae": "cuda:5", "text_encoder": "cuda:6", "transformer": "cuda:7"}}
    options = QwenImageEditTrainer({**given, "resume_from_checkpoint": "latest"}).options
    assert (options.memory.gradient_checkpointing, options.training.mixed_precision, options.optimizer.max_grad_norm) == (
        False,
        "bf16",
        0.5,
    )
    assert (options.model.vae_device, options.model.text_encoder_device, options.dataset.cache_dir) == ("cuda:1", "cuda:2", "c")
    assert not options.dataset.cache_latents and options.distributed.resume == "auto"
    assert QwenImageEditTrainer({**given, "resume_from_checkpoint": "output/a-run"}).options.distributed.resume == "output/a-run"
    with pytest.raises(OptionError, match="network_weights"):
        QwenImageEditTrainer({**given, "resume_from_checkpoint": "out/checkpoint-0-500"})
    assert QwenImageEditTrainer(given).predict_devices["transformer_device"] == "cuda:7"


def image_of(trainer: QwenImageEditTrainer) -> np.ndarray:
    """An image of the model that is loaded for training, as it is."""
    control = Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8))
    (found,) = Predictor(QWEN, trainer.load_model()).predict(Request("x", (control,), None, 2, seed=3))
    return np.asarray(found).astype(int)


def test_a_configuration_with_keys_that_are_refused_is_refused_with_the_reasons(config: Path, tmp_path: Path) -> None:
    given = yaml.safe_load(config.read_text())
    hub = [{"repo_id": "owner/faces", "split": "train"}]
    problems = []
    for change, words, silent in (
        ({"trainer": "FluxKontext"}, ["FluxKontext is FLUX.1 Kontext LoRA, but this is Qwen-Image-Edit LoRA"], "train_data_dir"),
        ({"data": {"init_args": {"dataset_path": hub}}}, ["data sets of the hub are not read"], "train_data_dir is missing"),
        ({"model": {"pretrained_model_name_or_path": "x/edit-4bit"}, "mistake": 1}, ["quantised already", "mistake"], "train_data_dir"),
        (
            {"model": {"rank": 0}, "train": {"max_train_steps": "many"}, "trainer": "x"},
            ["network_dim", "max_train_steps", "trainer: x"],
            "#",
        ),
    ):
        for make in (QwenImageEditTrainer, lambda one: load_config_from_yaml(written(tmp_path, one))):
            with pytest.raises(OptionError) as err:
                make({**given, **change})
            problems += [word for word in words if word not in str(err.value)] + [f"not {silent}"] * (silent in str(err.value))
    assert problems == []
    with pytest.raises(OptionError, match=r"gone\.yaml cannot be read"):
        QwenImageEditTrainer(tmp_path / "gone.yaml")
    del given["data"]["init_args"]["dataset_path"]
    trainer = QwenImageEditTrainer(given)
    for ask in (trainer.fit, trainer.cache_embeddings):
        with pytest.raises(OptionError, match="names no images"):
            ask()
    # What that program itself reads is not refused: arguments of losses, of devices, and previews that are off.
    harmless = {
        "loss": {
            "class_path": "qflux.losses.AttentionMaskMseLoss",
            "init_args": {"foreground_weight": 2.0, "eps": 1e-12, "reduction": "mean"},
        }
    }
    harmless |= {
        "train": {**given["train"], "fit_device": {"vae": "cuda:1"}},
        "logging": {**given["logging"], "sampling": {"enable": False, "seed": 4}},
    }
    assert configuration.refusals(configuration.translate({**given, **harmless})) == []


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "given.yaml").write_text(yaml.safe_dump(values))
    return folder / "given.yaml"
