"""What a script says before it trains: help and refusals at once, dry runs, advice, and what is written down about a run."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts.families import RUNS
from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.library.memory.oom_advice import is_out_of_memory, oom_advice
from sd_scripts.library.train.launch import _stopped, check_early, main
from sd_scripts.library.train.run_meta import git_revision, versions, without_secrets, write_meta
from sd_scripts.runs import resume
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.command_line import Invocation
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build, fields
from sd_scripts.schema.runs import RunOptions

SCRIPT = SCRIPTS / "sdxl_train_network.py"


def options(**values: Any) -> Any:
    return build(SdxlNetwork, {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", **values}, from_cli=True)


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the script says; its last line names what takes long to import and was. How long it takes is measured in tests/bench."""
    code = (
        "import atexit, runpy, sys\n"
        "heavy = ('torch', 'numpy', 'diffusers', 'transformers', 'accelerate', 'gradio', 'PIL')\n"
        "atexit.register(lambda: print('heavy:', *[name for name in heavy if name in sys.modules]))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_help_answers_without_importing_anything_heavy() -> None:
    done = script("--help")
    assert done.returncode == 0 and "--network_dim" in done.stdout and "Rank of the adapter" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "heavy:"


def test_a_wrong_option_is_refused_with_every_problem_before_anything_heavy_is_imported() -> None:
    done = script("--train_data_dir", "/no/such", "--pretrained_model_name_or_path", "x", "--netwrok_dim", "3", "--max_train_steps", "0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "network_dim" in done.stderr and "max_train_steps" in done.stderr
    assert done.stdout.strip() == "heavy:"
    missing = script("--train_data_dir", "/no/such", "--pretrained_model_name_or_path", "x")
    assert missing.returncode == 2 and missing.stdout.strip() == "heavy:"
    assert "train_data_dir: there is no folder /no/such" in missing.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sample_prompts": "a --q 1"}, "no flag --q"),
        ({"optimizer_args": ["x"]}, "key=value"),
        ({"lr_scheduler": "piecewise_constant"}, "step_rules"),
        ({"log_with": "wandb"}, "wandb"),
        ({"resume": "/no/such/state"}, "is not a folder"),
        ({"train_data_dir": "/no/such"}, "there is no folder"),
        ({"optimizer_type": "AdamW8bit"}, "pip install bitsandbytes"),
    ],
)
def test_what_can_be_seen_early_is_seen_early(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_early(options(**values))
    assert words in str(caught.value)


def test_a_refused_configuration_is_the_last_word_of_a_run_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path, "lora", options())
    with pytest.raises(SystemExit) as end:
        main("sdxl", "network", ["--config_file", str(run.config), "--run_dir", str(run.path), "--optimizer_args", "x"])
    assert end.value.code == 2 and "key=value" in capsys.readouterr().err
    assert [event["kind"] for event in run.events()[0]] == ["failed"]


def test_a_start_that_is_stopped_while_it_imports_leaves_its_last_word_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torch")
    monkeypatch.setattr(logger, "level", logger.level)
    asked = Invocation(options(), tmp_path, dry_run=False, cache_only=False, given=frozenset())
    assert _stopped(None, asked) == 0
    (last,) = RunDirectory(tmp_path).events()[0]
    assert (last["kind"], last["text"]) == ("stopped", "stopped before the first step")


def test_a_dry_run_says_what_would_be_done_and_leaves_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        Image.fromarray(np.zeros((64, 64 + 32 * (number % 2), 3), np.uint8)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text("black")
    arguments = [
        "--pretrained_model_name_or_path",
        "toy",
        "--train_data_dir",
        str(images),
        "--resolution",
        "64",
        "--min_bucket_reso",
        "32",
    ]
    arguments += [
        "--bucket_reso_steps",
        "16",
        "--output_dir",
        str(tmp_path / "out"),
        "--train_batch_size",
        "3",
        "--max_train_epochs",
        "5",
        "--dry_run",
    ]
    with pytest.raises(SystemExit) as end:
        main("sdxl", "network", arguments)
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert "images: 6" in said and "steps: 10 of 3 samples" in said and "Nothing was started" in said
    assert list((tmp_path / "out").glob("2*")) == []
    with pytest.raises(SystemExit) as end:
        main("sdxl", "network", [*arguments, "--sample_prompts", "a cat --w 68"])
    assert end.value.code == 2 and "width (--w) 68 is not a multiple of 8; the nearest are 64 and 72" in capsys.readouterr().err


def test_harmless_options_do_not_change_the_fingerprint_and_others_do() -> None:
    def print_of(batch: int = 2, **values: Any) -> str:
        return resume.fingerprint(resume.training_settings(options(**values), batch))

    same = [{}, {"max_train_steps": 9}, {"output_name": "x"}, {"sample_steps": 3}, {"train_batch_size": 2}, {"cache_dir": "/tmp/x"}]
    assert len({print_of(**values) for values in same}) == 1
    others = [{"learning_rate": 1e-3}, {"network_dim": 5}, {"seed": 1}, {"shuffle_caption": True}, {"min_snr_gamma": 5.0}, {"batch": 4}]
    assert len({print_of(**values) for values in others} | {print_of()}) == len(others) + 1


def test_every_option_is_told_apart_from_those_that_do_not_exist() -> None:
    from sd_scripts.schema.flat import fields

    assert {name for run in RUNS.values() for name in fields(run)} >= resume.HARMLESS


def test_a_process_that_ended_gives_its_folder_free(tmp_path: Path) -> None:
    first, second = resume.RunLock(RunDirectory(tmp_path)), resume.RunLock(RunDirectory(tmp_path))
    first.take()
    with pytest.raises(OptionError, match="another process"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_the_memory_options_are_three_and_not_pulled_yet() -> None:
    plain = oom_advice(options(train_batch_size=4), on_gpu=True)
    assert len(plain) == 3 and plain[0].startswith("gradient_checkpointing") and "gradient_accumulation_steps = 4" in plain[1]
    spare = options(
        gradient_checkpointing=True,
        gradient_checkpointing_cpu_offload=True,
        blocks_to_swap=3,
        transformer_quantization="nf4",
        optimizer_type="SGD",
        resolution=[512, 512],
        mixed_precision="bf16",
    )
    assert oom_advice(spare, on_gpu=True) == [
        "a GPU with more memory, or a smaller base model; every option that spares memory is set already"
    ]
    assert oom_advice(options(vae_batch_size=8), on_gpu=True, work="cache")[0] == "vae_batch_size = 1 instead of 8"
    texts = {text for text in oom_advice(options(resolution=[1024, 1536]), True) if "resolution" in text}
    assert not texts or "768,1152" in texts.pop()


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.script)
def test_a_memory_option_of_any_kind_of_run_is_an_option_that_it_has(run: type[RunOptions]) -> None:
    base = {"pretrained_model_name_or_path": "toy", "train_data_dir": "images", "train_batch_size": 4}
    for given in ({}, {"gradient_checkpointing": True, "train_batch_size": 1}, {"gradient_checkpointing": True, "blocks_to_swap": 2}):
        values = {**base, **given}
        built = build(run, values)
        for work in ("train", "cache", "sample"):
            for text in oom_advice(built, on_gpu=True, work=work):
                name = text.split()[0]
                assert name in fields(run) or name == "a", text
                assert name not in given or name == "train_batch_size", text


@pytest.mark.parametrize("run", [run for (_, method), run in RUNS.items() if method == "full"], ids=lambda run: run.script)
def test_no_advice_is_refused_where_the_text_encoder_is_saved_too(run: type[RunOptions]) -> None:
    values = {"pretrained_model_name_or_path": "toy", "train_data_dir": "images", "save_model_as": "diffusers"}
    for text in oom_advice(build(run, values), on_gpu=True, work="cache"):
        build(run, values | pulled(text))


def pulled(text: str) -> dict[str, Any]:
    """The options that a sentence names with their values."""
    found: dict[str, Any] = {name: value.rstrip(",:") for name, value in re.findall(r"(\w+) = ([\w.,]+)", text)}
    found |= dict.fromkeys(re.findall(r"^(\w+) on\b", text), "true") | dict.fromkeys(re.findall(r"^(\w+) off\b", text), "false")
    return {name: [value] if name == "target_modules" else value for name, value in found.items()}


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.script)
def test_memory_options_can_be_pulled_one_after_the_other_until_none_is_left(run: type[RunOptions]) -> None:
    values: dict[str, Any] = {"pretrained_model_name_or_path": "toy", "train_data_dir": "images", "train_batch_size": 4}
    values |= {"mixed_precision": "bf16", "resolution": "1024,1024"}
    seen = []
    while (text := oom_advice(build(run, values), on_gpu=True)[0]) and pulled(text) and len(seen) < 30:
        seen.append(text)
        values |= pulled(text)
    assert len(seen) < 20 and len(set(seen)) == len(seen)
    assert {"gradient_checkpointing", "blocks_to_swap"} <= {text.split()[0] for text in seen}
    assert ("transformer_quantization" in {text.split()[0] for text in seen}) == (run.method == "network")
    if "full_bf16" in fields(run):
        # Not after micro-batches are summed, which the smaller batch needs.
        assert "full_bf16" in {text.split()[0] for text in seen}


def test_memory_that_is_not_there_is_known_as_such() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    # As torch says it of what is not taken through its own allocator; seen on a full H100.
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", 2))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_command_is_written_down_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "x.py",
        "--api_key",
        "open-sesame",
        "--hub_token=def",
        "--max_token_length",
        "75",
        "--keep_tokens",
        "1",
        "--password=ghi",
        "--a",
        "b",
    ]
    shown = without_secrets(command)
    assert shown == [
        "x.py",
        "--api_key",
        "***",
        "--hub_token=***",
        "--max_token_length",
        "75",
        "--keep_tokens",
        "1",
        "--password=***",
        "--a",
        "b",
    ]
    monkeypatch.setattr(sys, "argv", command)
    run = RunDirectory(tmp_path)
    write_meta(run, fingerprint="f", settings={"a": (1, 2)}, model_files={}, dataset={"dataset_hash": "d"}, seed=7, processes=2)
    meta = json.loads(run.meta.read_text())
    assert meta["versions"]["torch"] == versions()["torch"] == torch.__version__
    assert (meta["fingerprint"], meta["dataset_hash"], meta["seed"], meta["processes"]) == ("f", "d", 7, 2)
    assert "open-sesame" not in run.meta.read_text() and meta["git"] == git_revision()
