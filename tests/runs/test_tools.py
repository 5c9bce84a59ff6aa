"""The tools as scripts: exit codes, sentences, reports, and that a cancelled one leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.families import TOOLS
from sd_scripts.library.tools import run
from sd_scripts.schema.command_line import parse_tool, to_argv
from sd_scripts.schema.flat import build, fields

SCRIPTS = Path(__file__).parents[2] / "sd_scripts"
STEM = "lora_unet_double_blocks_0_img_attn_proj"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    path = tmp_path / "lora.safetensors"
    rng = torch.Generator().manual_seed(0)
    tensors = {f"{STEM}.lora_up.weight": torch.randn(3072, 4, generator=rng), f"{STEM}.alpha": torch.tensor(4.0)}
    save_file(tensors | {f"{STEM}.lora_down.weight": torch.randn(4, 3072, generator=rng)}, path)
    return path


def started(tool: str, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPTS / TOOLS[tool].script), *arguments]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_script_does_its_work_from_any_folder_and_writes_its_report(lora: Path, tmp_path: Path) -> None:
    process = started(
        "edit_metadata", "--model", str(lora), "--set_keys", "a=b", "--save_to", "new.safetensors", "--report", "r.json", cwd=tmp_path
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "byte for byte" in out and load_file(tmp_path / "new.safetensors").keys() == load_file(lora).keys()
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["metadata"] == {"a": "b"}


def test_wrong_options_are_sentences_without_loading_anything(lora: Path, tmp_path: Path) -> None:
    process = started("merge_lora", "--models", str(lora), "--sd_model", "x", "--ratios", "1", "2", "--save_to", "y", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "use base_model" in err and "ratios has 2 numbers for 1 files" in err and "Traceback" not in err


@pytest.mark.parametrize("tool", TOOLS)
def test_the_command_line_gives_the_options_of_the_page(tool: str) -> None:
    values = {name: "a.safetensors" for name, field in fields(TOOLS[tool]).items() if field.required and not field.many}
    values |= {name: ["a.safetensors", "b.safetensors"] for name, field in fields(TOOLS[tool]).items() if field.required and field.many}
    more = {"resize_lora": {"new_rank": 4}, "fetch_model": {"hub_id": "someone/model"}, "rate": {"clip_model": "someone/clip"}}
    values |= more.get(tool, {})
    options = build(TOOLS[tool], values)
    assert parse_tool(TOOLS[tool], to_argv(options)) == options
    for field in fields(TOOLS[tool]).values():
        assert len(field.help) > 20 and field.help.endswith((".", ")")), field.name


def test_every_option_of_a_tool_is_read() -> None:
    works = {find_spec(tool.work.partition(":")[0]).origin for tool in TOOLS.values()}
    helpers = [path for name in ("captioning", "masking") for path in (SCRIPTS / "library" / name).glob("*.py")]
    files = [*(SCRIPTS / "library" / "tools").glob("*.py"), *helpers, *map(Path, works)]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    names = {name for tool in TOOLS.values() for name in fields(tool)} - {"set_keys", "replace_words", "mask_points", "mask_box"}
    assert [name for name in sorted(names) if f".{name}" not in code] == []
    assert all(f".{name}" in code for name in ("keys_to_set", "replacements", "points", "box"))


def test_a_broken_file_ends_with_1_and_a_missing_one_with_2(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(lora)
    tensors[f"{STEM}.lora_up.weight"][0, 0] = float("nan")
    save_file(tensors, lora)
    assert run.start(parse_tool(TOOLS["verify_lora"], ["--model", str(lora)])) == 1
    assert "BROKEN" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        run.main("edit_metadata", ["--model", str(lora.with_name("no.safetensors"))])
    assert ended.value.code == 2 and "there is no file" in capsys.readouterr().err


def test_a_cancelled_tool_leaves_nothing_behind(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for block in range(19):
        for part, rows in (("img_mod_lin", 18432), ("txt_mod_lin", 18432), ("img_mlp_0", 12288), ("txt_mlp_0", 12288)):
            tensors[f"lora_unet_double_blocks_{block}_{part}.lora_down.weight"] = torch.randn(48, 3072, generator=rng).half()
            tensors[f"lora_unet_double_blocks_{block}_{part}.lora_up.weight"] = torch.zeros(rows, 48).half()
    save_file(tensors, tmp_path / "big.safetensors")
    before = set(tmp_path.iterdir())
    process = started("resize_lora", "--model", "big.safetensors", "--save_to", "new.safetensors", "--new_rank", "4", cwd=tmp_path)
    while process.poll() is None and len(set(tmp_path.iterdir())) == len(before):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "cancelled" in err and set(tmp_path.iterdir()) == before


def test_no_tool_writes_over_a_file_that_it_reads(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own path, through a link, or as one file of a folder that is read."""
    link, folder = tmp_path / "link.safetensors", tmp_path / "model"
    link.symlink_to(lora)
    folder.mkdir()
    inside = folder / "unet.safetensors"
    inside.write_bytes(lora.read_bytes())
    more = {"merge_lora": ["--models", lora, lora], "extract_lora": ["--model_tuned", folder, "--model_org", lora]}
    more |= {"resize_lora": ["--model", lora, "--new_rank", 2], "convert_lora": ["--model", lora]}
    cases = [(tool, [*options, "--save_to", target]) for tool, options in more.items() for target in (lora, link)]
    cases += [("extract_lora", [*more["extract_lora"], "--save_to", inside])]
    cases += [("merge_lora", ["--models", lora, "--base_model", inside, "--save_to", inside])]
    cases += [("verify_lora", ["--model", lora, "--report", lora]), ("edit_metadata", ["--model", lora, "--report", link])]
    bytes_before, wrong = lora.read_bytes(), []
    for tool, argv in cases:
        with pytest.raises(SystemExit) as ended:
            run.main(tool, [str(text) for text in argv])
        told = capsys.readouterr().err
        if ended.value.code != 2 or "would be lost" not in told or {lora.read_bytes(), inside.read_bytes()} != {bytes_before}:
            wrong.append(f"{tool} {argv[-2:]}: {ended.value.code}, {told}")
            lora.write_bytes(bytes_before)
    assert wrong == []
    named = tmp_path / "named.safetensors"
    named.mkdir()
    with pytest.raises(SystemExit) as ended:
        run.main("resize_lora", ["--model", str(lora), "--new_rank", "2", "--save_to", str(named)])
    assert ended.value.code == 2 and "is a folder; give the name of a file in it" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run.main("edit_metadata", ["--model", str(lora), "--set_keys", "a=b", "--save_to", str(lora)])
    assert ended.value.code == 0, "which is what edit_metadata does without save_to, too"
