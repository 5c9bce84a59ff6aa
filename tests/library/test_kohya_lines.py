"""Command lines as the documentation of kohya's scripts has them, run unedited, with the toy in the place of models.

Each is written anew from the options and values that such lines combine.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_scripts.families import RUNS
from sd_scripts.library.train.launch import main
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError

_SAFE = "--save_model_as=safetensors"
_ADAPTER = "--network_module=networks.lora --network_dim=4 --network_alpha=1"
_USUAL = "--optimizer_type=AdamW8bit --lr_scheduler=constant --mixed_precision=bf16 --gradient_checkpointing --cache_latents"
_LYCORIS = "--network_module lycoris.kohya --network_dim 4 --network_alpha 2 --network_args"
_LINES = [
    # train_network.py, sdxl_train_network.py, flux_train_network.py
    ("sd network", f"--dataset_config={{set}} {_SAFE} {_ADAPTER} --learning_rate=1e-4 {_USUAL} --sdpa --save_every_n_epochs=1"),
    ("sd network", f"--train_data_dir={{folder}} {_SAFE} {_ADAPTER} --xformers --prior_loss_weight=1.0 --use_8bit_adam --clip_skip=2"),
    ("sd network", f'--train_data_dir {{folder}} {_LYCORIS} "algo=locon" "conv_dim=4" "conv_alpha=1" --optimizer_type adamw8bit --lowram'),
    ("sd network", f'--train_data_dir {{folder}} {_LYCORIS} "preset=full" "algo=loha" --optimizer_type lion --max_token_length 225'),
    ("sd network", f"--train_data_dir {{folder}} {_ADAPTER} --network_train_unet_only --highvram --noise_offset 0.1 --xformers"),
    (
        "sdxl network",
        f"--dataset_config={{set}} {_SAFE} {_ADAPTER} --text_encoder_lr1=1e-5 --text_encoder_lr2=1e-5 --unet_lr=1e-4 {_USUAL}",
    ),
    ("sdxl network", f"--dataset_config={{set}} {_ADAPTER} --cache_text_encoder_outputs --network_train_unet_only --no_half_vae --sdpa"),
    (
        "sdxl network",
        f"--dataset_config={{set}} {_ADAPTER} --logging_dir=logs --persistent_data_loader_workers --max_data_loader_n_workers 2",
    ),
    (
        "flux network",
        f"--dataset_config={{set}} {_SAFE} --network_module=networks.lora_flux {_USUAL} --sdpa --fp8_base --guidance_scale=1.0",
    ),
    ("flux network", f"--dataset_config={{set}} --network_module=networks.lora_flux --blocks_to_swap=2 --split_attn {_USUAL} --highvram"),
    # train_db.py, fine_tune.py, sdxl_train.py, flux_train.py
    ("sd full", f"--dataset_config={{set}} {_SAFE} --prior_loss_weight=1.0 --max_train_steps=16 --xformers --cache_latents {_USUAL}"),
    ("sd full", "--train_data_dir={folder} --use_8bit_adam --xformers --enable_bucket --color_aug --flip_aug --save_state --seed 42"),
    (
        "sd full",
        f"--dataset_config={{set}} {_SAFE} --shuffle_caption --train_batch_size=1 --use_8bit_adam --xformers --save_every_n_epochs=4",
    ),
    (
        "sdxl full",
        "--dataset_config {set} --train_text_encoder --learning_rate 1e-5 --learning_rate_te1 5e-6 --learning_rate_te2 2e-6 --sdpa",
    ),
    (
        "flux full",
        f"--dataset_config {{set}} --optimizer_type adafactor --fused_backward_pass --max_grad_norm 0.0 --full_bf16 {_SAFE} --sdpa",
    ),
]
_SMALL = "--resolution 64 --min_bucket_reso 32 --bucket_reso_steps 16 --dry_run"


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "images" / "2_thing"
    folder.mkdir(parents=True)
    for number in range(2):
        Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("black", encoding="utf-8")
    set_file = tmp_path / "set.toml"
    set_file.write_text(f'[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "{folder.as_posix()}"\n', encoding="utf-8")
    return {"folder": folder.parent, "set": set_file}


def _argv(line: str, data: dict[str, Path]) -> list[str]:
    return ["--pretrained_model_name_or_path=toy", *shlex.split(line.format(**{name: path.as_posix() for name, path in data.items()}))]


def test_lines_of_kohyas_documentation_say_here_what_they_say_there(data: dict[str, Path]) -> None:
    wrong, found = [], {}
    for number, (kind, line) in enumerate(_LINES):
        family, method = kind.split()
        try:
            found[number] = command_line.parse_cli(RUNS[family, method], _argv(line, data))
        except OptionError as err:
            wrong.append(f"{kind} {line}: {err}")
    assert not wrong, "\n".join(wrong)
    values = {number: flat.flatten(asked.options) for number, asked in found.items()}
    wanted = {
        0: {"network_type": "lora", "train_text_encoder": True, "optimizer_type": "AdamW8bit", "save_model_as": "kohya"},
        1: {"optimizer_type": "AdamW8bit", "clip_skip": 2},
        2: {"network_type": "lora", "conv_dim": 4, "conv_alpha": 1.0, "optimizer_type": "AdamW8bit"},
        3: {"network_type": "loha", "conv_dim": 4, "conv_alpha": 2.0, "optimizer_type": "Lion"},
        4: {"train_text_encoder": False},
        5: {"text_encoder_lr": (1e-5, 1e-5), "train_text_encoder": True, "cache_text_encoder_outputs": False},
        6: {"vae_dtype": "float", "train_text_encoder": False},
        8: {"transformer_quantization": "fp8"},
        11: {"color_aug": True, "cache_latents": False, "optimizer_type": "AdamW8bit"},
        13: {"text_encoder_lr": (5e-6, 2e-6), "cache_text_encoder_outputs": False},
        14: {"optimizer_type": "Adafactor", "fused_backward_pass": True},
    }
    for number, expected in wanted.items():
        assert {name: values[number][name] for name in expected} == expected, _LINES[number]
    untold = [
        line for number, (_, line) in enumerate(_LINES) if "--xformers" in line and "--xformers: not needed" not in str(found[number].notes)
    ]
    assert not untold


def test_a_file_in_the_same_words_is_taken_too(tmp_path: Path) -> None:
    file = tmp_path / "kohya.toml"
    file.write_text(
        'pretrained_model_name_or_path = "toy"\ntrain_data_dir = "toy:star"\n[network_arguments]\nnetwork_module = "lycoris.kohya"\n'
        'network_args = ["algo=locon", "conv_dim=2"]\nxformers = true\noptimizer_type = "adamw"\ntext_encoder_lr = 5e-5\n',
        encoding="utf-8",
    )
    asked = command_line.parse_cli(RUNS["sd", "network"], [f"--config_file={file}", "--network_dim=8"])
    values = flat.flatten(asked.options)
    assert (values["network_type"], values["conv_dim"], values["network_dim"], values["optimizer_type"]) == ("lora", 2, 8, "AdamW")
    assert values["text_encoder_lr"] == (5e-5,) and values["train_text_encoder"] and any("xformers" in note for note in asked.notes)


def test_what_another_default_or_meaning_makes_of_a_line_is_told() -> None:
    limits = ["--enable_bucket", "--bucket_no_upscale", "--max_bucket_reso=1024"]
    first = command_line.parse_cli(RUNS["sd", "network"], ["--pretrained_model_name_or_path=toy", "--train_data_dir=toy:star", *limits])
    assert not any("max_bucket_reso" in note for note in first.notes), "this program's own line has nothing to be told"
    kohyas = ["--pretrained_model_name_or_path=toy", "--train_data_dir=toy:star", "--network_module=networks.lora"]
    asked = command_line.parse_cli(RUNS["sd", "network"], [*kohyas, *limits, "--network_args", "conv_dim=8"])
    assert any(note.startswith("--max_bucket_reso: it holds here; there it has no effect") for note in asked.notes)
    assert "conv_alpha = none (1.0 there)" in str(asked.notes) and "lr_decay_steps" not in str(asked.notes)
    decay = command_line.parse_cli(RUNS["sd", "network"], [*kohyas, "--lr_scheduler=warmup_stable_decay"])
    assert "lr_decay_steps = 0.1 (0 there)" in str(decay.notes) and "conv_alpha" not in str(decay.notes)
    lycoris = [*kohyas[:2], "--network_module=lycoris.kohya", "--network_alpha=3", "--network_args", "algo=locon", "conv_dim=8"]
    assert flat.flatten(command_line.parse_cli(RUNS["sd", "network"], lycoris).options)["conv_alpha"] == 3
    flow = [*kohyas[:2], "--network_module=networks.lora_flux", "--max_timestep=500"]
    assert any(note.startswith("--max_timestep: it counts here") for note in command_line.parse_cli(RUNS["flux", "network"], flow).notes)


def test_a_line_for_a_newer_script_of_kohyas_says_what_it_says_there(data: dict[str, Path]) -> None:
    line = (
        "--dataset_config={set} --qwen3={set} --vae={set} --network_module=networks.lora_anima --network_dim=8 --timestep_sampling=sigmoid"
    )
    more = "--discrete_flow_shift=1.0 --vae_chunk_size=64 --vae_disable_cache --save_model_as=safetensors --optimizer_type=AdamW8bit"
    asked = command_line.parse_cli(RUNS["anima", "network"], _argv(f"{line} {more}", data))
    values = flat.flatten(asked.options)
    assert (values["text_encoder"], values["network_type"], values["network_dim"]) == (str(data["set"]), "lora", 8)
    assert [name for name in ("qwen3", "vae_chunk_size", "vae_disable_cache") if f"--{name}: " not in str(asked.notes)] == []
    with pytest.raises(OptionError, match=r"chroma is a family of its own here, with chroma_train_network\.py"):
        command_line.parse_cli(RUNS["flux", "network"], _argv("--train_data_dir={folder} --model_type chroma", data))


def test_what_would_train_something_else_is_refused(data: dict[str, Path]) -> None:
    wrong = []
    for line, said in (
        ("--network_module=networks.dylora", "--network_module"),
        ("--network_module=networks.lora_sd3", "--network_module"),
        ('--network_module=lycoris.kohya --network_args "algo=ia3"', "ia3"),
        ("--model_type=chroma", "--model_type"),
        ("--stop_text_encoder_training=100", "--stop_text_encoder_training"),
        ("--dataset_class=my.module", "--dataset_class"),
        ('--network_module=lycoris.kohya --network_args "algo=lokr" "dora_wd=True"', "dora_wd"),
    ):
        try:
            command_line.parse_cli(RUNS["sd", "network"], _argv(f"--train_data_dir={{folder}} {line}", data))
            wrong.append(f"{line} was accepted")
        except OptionError as err:
            wrong += [] if said in str(err) else [f"{line}: {err}"]
    assert not wrong, "\n".join(wrong)
    # What another trainer's option chooses is never dropped as not needed.
    with pytest.raises(OptionError, match="loss_mode"):
        command_line.parse_cli(RUNS["zimage", "network"], _argv("--train_data_dir={folder} --loss_mode=frequency", data))


@pytest.mark.parametrize("number", range(len(_LINES)))
def test_such_a_line_dry_runs_and_its_words_are_told(
    number: int, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    kind, line = _LINES[number]
    with pytest.raises(SystemExit) as ended:
        main(*kind.split(), [*_argv(line, data), f"--output_dir={tmp_path / 'out'}", *shlex.split(_SMALL)])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "Nothing was started" in said.out
    if number == 2:
        assert "algo=locon: taken as network_type = lora" in caplog.text and "AdamW8bit" in caplog.text
