"""Hundreds of wrong configurations: each is told in sentences, with exit code 2, and nothing is started."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.library.train.launch import main
from sd_scripts.schema.flat import FlatField, asleep, fields, nearest

KNOWN = fields(SdxlNetwork)
AWAKE = [field for field in KNOWN.values() if not asleep(SdxlNetwork, {field.name: "x"})]
NUMBERS = [field for field in AWAKE if field.type in (int, float) and not field.choices]
BOUNDED = [field for field in NUMBERS if field.bounds]
CHOICES = [field for field in AWAKE if field.choices]
WORDS = st.text(string.ascii_lowercase, min_size=4, max_size=12)

# Pairs of options that contradict each other, each with a word that the sentence must contain.
CONTRADICTIONS: list[tuple[list[str], str]] = [
    (["--train_text_encoder", "--cache_text_encoder_outputs"], "cache_text_encoder_outputs"),
    (["--no_train_unet"], "train_unet"),
    (["--min_timestep=800", "--max_timestep=200"], "min_timestep"),
    (["--noise_offset=0.1", "--multires_noise_iterations=6"], "multires_noise_iterations"),
    (["--color_aug", "--cache_latents"], "color_aug"),
    (["--target_modules=["], "target_modules"),
    (["--text_encoder_lr=1e30", "--train_text_encoder"], "text_encoder_lr"),
    (["--output_dir=pyproject.toml/runs"], "output_dir"),
    (["--cache_dir=pyproject.toml"], "cache_dir"),
    (["--train_data_dir=" + "a" * 5000], "train_data_dir"),
    (["--train_data_dir=~nobody-of-that-name/x"], "train_data_dir"),
    (["--min_bucket_reso=1024", "--max_bucket_reso=512"], "max_bucket_reso"),
    (["--optimizer_type=os.system"], "allow_custom_modules"),
    (["--lr_scheduler_type=builtins.eval"], "allow_custom_modules"),
    (["--optimizer_args=weight_decay"], "optimizer_args"),
    (["--optimizer_args=weight_decay=__import__('os')"], "optimizer_args"),
    (["--base_weights=a.safetensors", "--base_weights_multiplier=1,2"], "base_weights_multiplier"),
    (["--block_dims=1,2,3", "--block_alphas=1,2"], "block_alphas"),
    (["--prediction_type=flow", "--zero_terminal_snr"], "zero_terminal_snr"),
    (["--resume=no/such/folder"], "resume"),
    (["--in_json=no_such_file.json"], "in_json"),
    (["--reg_data_dir=no_such_folder"], "reg_data_dir"),
    (["--sample_prompts=a cat --zz 3"], "--zz"),
    (["--sample_prompts=a cat --w huge"], "--w"),
    (["--save_every_n_epochs=1", "--save_n_epoch_ratio=2"], "save_n_epoch_ratio"),
    (["--output_name=a/b"], "output_name"),
    (["--network_args=conv_dim"], "network_args"),
    (["--network_args=nonsense=1"], "nonsense"),
    (["--dataset_config=nothing.toml"], "dataset_config"),
    (["--config_file=missing.toml"], "missing.toml"),
    (["--compile", "--multi_gpu", "--distributed_strategy=fsdp2"], "distributed_strategy to ddp"),
]


def out_of_range(field: FlatField, far: float) -> tuple[list[str], str]:
    """Not 0, which means "not given" where nothing is allowed: sample_every_n_steps is none then."""
    bounds = field.bounds
    low = bounds.get("ge", bounds.get("gt"))
    value = low - 1 - abs(far) if low is not None else bounds.get("le", bounds.get("lt", 0)) + 1 + abs(far)
    value = value if abs(value) >= 1 else -1
    return [f"--{field.name}={int(value) if field.type is int else value!r}"], field.name


FAULTS: st.SearchStrategy[tuple[list[str], str]] = st.one_of(
    st.sampled_from(CONTRADICTIONS),
    st.builds(out_of_range, st.sampled_from(BOUNDED), st.floats(0, 1e6)),
    st.builds(lambda field, word: ([f"--{field.name}={word}x"], field.name), st.sampled_from(NUMBERS), WORDS),
    st.builds(lambda field, word: ([f"--{field.name}={word}_q"], field.name), st.sampled_from(CHOICES), WORDS),
    st.builds(lambda word: ([f"--zq_{word}"], f"zq_{word}"), WORDS),
    st.builds(
        lambda name, word: ([f"--{name}={word}"], name), st.sampled_from(["resolution", "sample_size", "additional_resolutions"]), WORDS
    ),
    st.builds(
        lambda field, letter: ([f"--{letter}{field.name}=1"], f"{letter}{field.name}"),
        st.sampled_from(list(KNOWN.values())),
        st.sampled_from("qzx"),
    ),
    st.sampled_from(["face_crop_aug_range", "full_bf16", "wandb_api_key", "blocks_to_swap", "t5xxl"]).map(
        lambda name: ([f"--{name}"], name)
    ),
)


@pytest.fixture
def started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the script's main in this process, SDXL's LoRA unless another kind is named: exit code and what it said."""
    capsys.readouterr()

    def run(arguments: list[str], family: str = "sdxl", method: str = "network") -> tuple[int, str]:
        given_data = any(argument.startswith("--dataset_config") for argument in arguments)
        needed = [f"--output_dir={tmp_path / 'runs'}"]
        needed += [] if method == "scratch" else ["--pretrained_model_name_or_path=toy"]
        needed += [] if given_data else ["--train_data_dir=toy:star"]
        with pytest.raises(SystemExit) as ended:
            main(family, method, [*needed, *arguments])
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(faults=st.lists(FAULTS, min_size=1, max_size=4))
def test_a_wrong_configuration_gives_sentences_and_starts_nothing(
    faults: list[tuple[list[str], str]], started: Callable[[list[str]], tuple[int, str]], tmp_path: Path
) -> None:
    code, said = started([argument for arguments, _ in faults for argument in arguments])
    assert code == 2
    assert "Traceback" not in said
    assert "nothing was started" in said
    lines = [line for line in said.splitlines() if line.startswith("  - ")]
    assert lines and all(len(line) > 20 for line in lines)
    assert not (tmp_path / "runs").exists()
    # Options given twice hide one another, so only a single fault must be named for certain.
    if len(faults) == 1:
        assert faults[0][1] in said


NEW_MODELS: list[tuple[list[str], str]] = [
    (["--attention_levels=1,4"], "attention_levels: there is no 4"),
    (["--attention_levels=2,2"], "attention_levels names a level twice"),
    (["--attention_head_dim=48"], "attention_head_dim: level 3 has 256 channels"),
    (["--base_channels=20"], "base_channels"),
    (["--channel_multipliers="], "channel_multipliers"),
    (["--text_heads=3"], "text_heads: text_width 256 is not a multiple of 3"),
    (["--vocab_size=200"], "vocab_size"),
    (["--beta_start=0.1"], "beta_start (0.1) must be below beta_end"),
    (["--zero_terminal_snr", "--prediction_type=epsilon"], "zero_terminal_snr ends in pure noise"),
    (["--pretrained_model_name_or_path=a.safetensors", "--tokenizer=b.json"], "tokenizer: the model in"),
    (["--prediction_type=flow"], "prediction_type"),
    (["--network_dim=4"], "network_dim"),
    (["--num_class_images=3", "--class_prompt=a star"], "num_class_images: a new model can make no images yet"),
    (["--sample_prompts=a cat --ss pndm"], "'pndm' is not one of"),
]


@pytest.mark.parametrize(("arguments", "named"), NEW_MODELS, ids=lambda item: " ".join(item) if isinstance(item, list) else "")
def test_a_new_model_that_cannot_be_is_told_in_sentences(
    arguments: list[str], named: str, started: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = started(arguments, "ddpm", "scratch")
    assert code == 2 and "Traceback (" not in said and named in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--resolution=72", "--bucket_reso_steps=8"], "sides that are multiples of 16, but there are"),
        (["--tokenizer=nothing.json"], "tokenizer: there is no file nothing.json"),
        (["--pretrained_model_name_or_path=nothing.safetensors"], "there is no file or folder nothing.safetensors"),
        (["--vae=nothing"], "vae: there is no file or folder nothing"),
    ],
)
def test_what_a_new_model_lacks_is_told_before_a_step(arguments: list[str], named: str, started: Callable[..., tuple[int, str]]) -> None:
    code, said = started([*arguments, "--base_channels=32", "--channel_multipliers=1,1,1,1,1", "--attention_levels=3"], "ddpm", "scratch")
    assert code == 2 and "Traceback (" not in said and named in said


@pytest.mark.parametrize(
    ("arguments", "family", "method", "named"),
    [
        (["--train_data_dir=images"], "flux", "network", "give reg_data_dir, or num_class_images"),
        (["--train_text_encoder", "--no_cache_text_encoder_outputs"], "flux", "network", "text encoders train_text_encoder changes"),
        ([], "flux", "full", "which only an adapter run has"),
        ([], "zimage", "full", "which only an adapter run has"),
        (["--train_data_dir=pairs"], "qwen_edit", "network", "give reg_data_dir, or num_class_images"),
    ],
)
def test_what_the_prior_of_the_base_model_needs_is_told(
    arguments: list[str], family: str, method: str, named: str, started: Callable[..., tuple[int, str]]
) -> None:
    code, said = started([*arguments, "--base_prior_weight=1"], family, method)
    assert code == 2 and "Traceback (" not in said and named in said


def test_a_misspelt_option_is_answered_with_the_nearest_one(started: Callable[[list[str]], tuple[int, str]]) -> None:
    assert nearest("learning_rte", list(KNOWN)) == " Did you mean learning_rate?"
    assert "Did you mean learning_rate?" in started(["--learning_rte=1"])[1]


def test_a_broken_toml_file_is_told_with_its_line(started: Callable[[list[str]], tuple[int, str]], tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[network]\nnetwork_dim = \n")
    code, said = started([f"--config_file={file}"])
    assert code == 2 and "line 2" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "named"), [("learning_rate = [1]", "learning_rate"), ("[x]\nnetwork_dim = 3\n[y]\nnetwork_dim = 4", "network_dim")]
)
def test_wrong_values_of_a_file_are_told_with_their_names(
    started: Callable[[list[str]], tuple[int, str]], tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    code, said = started([f"--config_file={file}"])
    assert code == 2 and named in said and "Traceback" not in said
