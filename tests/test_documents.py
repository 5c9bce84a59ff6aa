"""What README.md and docs/ say exists and works: commands, options, values, files, names, anchors."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import gui
from kohya_like import cli, exporting, sweep_cli, sweeps
from sd_scripts.dataset.config import read_config
from sd_scripts.families import RUNS, TOOLS
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.runs.cluster import ClusterOptions
from sd_scripts.runs.events import KINDS
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.generate import FAMILIES, GenerateOptions, generate_options
from sd_scripts.schema.optimizer import BUILT_IN
from sd_scripts.schema.prompts import FLAGS
from tests.documents import PAGES, ROOT, Block, blocks, command_blocks, page_text, prose, ticked

OPTIONS = {name: field for run in reversed(RUNS.values()) for name, field in flat.fields(run).items()}
"""Of all kinds of run; where they differ, the field of the first kind."""
OWN_FLAGS = {"config_file", "run_dir", "dry_run", "cache_only", "estimate", "fit", "json", "network_args"}
COMMANDS = {tool.script: tool for tool in (*TOOLS.values(), QwenImagePredict, ClusterOptions)}
"""What is not a training, by its script."""
SCRIPTS = {run.script: run for run in RUNS.values()}
NEEDED = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}
LAUNCHER_FLAGS = {"num_processes", "num_machines", "mixed_precision", "dynamo_backend", "multi_gpu"}
OTHER_FLAGS = {"all", "help", "test", "index-url", "check", "yes", "build-arg", "gpus", "ipc", "missing"}
"""Of setup.sh, gui.py, the doctor, pip, the export for a cluster, docker and the catalogues of languages."""


def page_ids(path: Path) -> str:
    return path.name


# --- files and commands ---------------------------------------------------------------------------------------------


def folders_of(block: Block) -> list[str]:
    return re.findall(r'^image_dir = "(.+)"$', block.text, re.MULTILINE)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: f"{block.page}-{block.name or 'part'}")
def test_a_toml_file_in_a_document_is_valid(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = tomllib.loads(block.text)
    if "datasets" not in values:
        given = toml_files.parse_toml(block.text, block.name)
        run = next((run for run in RUNS.values() if given.keys() <= flat.fields(run).keys()), SdxlNetwork)
        flat.build(run, NEEDED | given)
        return
    for folder in folders_of(block):
        Path(folder).mkdir(parents=True, exist_ok=True)
    Path("dataset.toml").write_text(block.text, encoding="utf-8")
    found = read_config(Path("dataset.toml"), DatasetOptions(dataset_config="dataset.toml"))
    assert len(found.items) == len(folders_of(block)) and found.warnings == ()


def test_documents_show_files_and_commands():
    assert len(blocks("toml")) >= 4 and len(command_blocks()) >= 10


def check_training(words: list[str], folder: Path) -> None:
    script = next(word for word in words if Path(word).name in SCRIPTS)
    assert (ROOT / script).is_file()
    before, after = words[: words.index(script)], words[words.index(script) + 1 :]
    unknown = {word.removeprefix("--") for word in before if word.startswith("--")} - LAUNCHER_FLAGS
    assert unknown == set()
    for block in blocks("toml"):
        if block.name:
            (folder / block.name).write_text(block.text, encoding="utf-8")
    presets = [word for word in after if word.startswith("presets/")]
    assert all((ROOT / preset).is_file() for preset in presets)
    after = [str(ROOT / word) if word in presets else word for word in after]
    command_line.parse_cli(SCRIPTS[Path(script).name], after)


def check_setup(words: list[str]) -> None:
    subcommand, *rest = [word for word in words if word not in ("bash", "powershell", "-ExecutionPolicy", "Bypass", "-File")][1:]
    assert subcommand in {"install", "gui", "demo", "toys", "test", "doctor"}
    if subcommand == "gui":
        given = gui.parser().parse_args(rest)
        given.allowed_dir = []
        assert gui.problems(given) == []


@pytest.mark.parametrize(("page", "words"), command_blocks(), ids=lambda item: " ".join(item)[:80] if isinstance(item, list) else item)
def test_a_command_in_a_document_is_understood(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if words[1:4] == ["-m", "kohya_like.cli", "sweep"]:
        asked, rest = cli.parser().parse_known_args(words[3:])
        run = next(run for run in RUNS.values() if run.script == asked.script)
        assert command_line.parser(run).parse_known_args(rest)[1] == []
        sweeps.read_axes(run, dict(text.split("=") for text in asked.vary))
    elif words[1:3] == ["-m", "tests.languages"]:
        assert set(words[3:]) <= {"--missing"} and (ROOT / "tests" / "languages.py").is_file()
    elif any(Path(word).name in SCRIPTS for word in words):
        check_training(words, tmp_path)
    elif any(word in ("setup.sh", "setup.ps1") for word in words):
        check_setup(words)
    elif words[1:3] == ["gui.py", "export-space"]:
        assert exporting.parser().parse_args(words[3:])
    elif words[1] == f"sd_scripts/{GenerateOptions.script}":
        # Which family it is tell files that are not here.
        assert command_line.parser(generate_options(FAMILIES[0])).parse_known_args(words[2:])[1] == []
    elif tool := next((tool for script, tool in COMMANDS.items() if words[1].endswith(script)), None):
        assert (ROOT / words[1]).is_file()
        command_line.parse_tool(tool, words[2:])
    else:
        files = {block.name for block in blocks("python")}
        assert words[0] == "ssh" or (words[0] == ".venv/bin/python" and words[1] in files)


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_a_command_within_a_sentence_is_understood(path):
    for text in ticked(path):
        words = shlex.split(text) if "setup.sh " in text or "python -m" in text else []
        if "setup.sh" in words:
            check_setup(words[words.index("setup.sh") - 1 :])
        elif "-m" in words and words[words.index("-m") + 1].startswith("sd_scripts"):
            assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None, text


def test_the_flags_of_the_launcher_exist():
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--help"], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert [flag for flag in LAUNCHER_FLAGS if f"--{flag}" not in done.stdout] == []


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_every_flag_in_a_document_exists(path):
    of_sweeps = argparse.ArgumentParser()
    sweep_cli.add_to(of_sweeps)
    of_the_page = {action.dest for parser in (gui.parser(), exporting.parser(), of_sweeps) for action in parser._actions}
    known = set(OPTIONS) | OWN_FLAGS | of_the_page | LAUNCHER_FLAGS | OTHER_FLAGS | set(FLAGS)
    known |= {f"no_{name}" for name, field in OPTIONS.items() if field.type is bool}
    for tool in COMMANDS.values():
        known |= {f"{no}{name}" for name, field in flat.fields(tool).items() for no in (("", "no_") if field.type is bool else ("",))}
    known |= {name for family in FAMILIES for name in flat.fields(generate_options(family))}
    assert set(re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", page_text(path))) - known == set()


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_a_setting_with_its_value_is_accepted(path):
    settings = [text for text in ticked(path) if re.fullmatch(r"[a-z]\w+ = .+", text)]
    for text in settings:
        name, _, value = text.partition(" = ")
        assert name in OPTIONS, text
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            # A letter or a word that stands for a value, as in a formula.
            assert re.fullmatch(r"\w+", value) or value.isalpha(), text
            continue
        # What may be wrong here is only how options go together: a lone value cannot say that.
        try:
            flat.build(next(run for run in RUNS.values() if name in flat.fields(run)), NEEDED | values)
        except OptionError as err:
            assert [str(problem) for problem in err.problems if problem.message.startswith(f"{name}:")] == []


@cache
def words_of_the_code() -> frozenset[str]:
    """Every word in the code, the scripts and the presets."""
    endings = {".py", ".js", ".sh", ".ps1", ".toml"}
    found: set[str] = set()
    for folder in ("sd_scripts", "kohya_like", "presets"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in endings:
                found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    for name in ("gui.py", "setup.sh", "setup.ps1", "pyproject.toml"):
        found |= set(re.findall(r"\w+", (ROOT / name).read_text(encoding="utf-8")))
    return frozenset(found)


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_every_name_of_code_in_a_document_is_in_the_code(path):
    names = {text for text in ticked(path) if re.fullmatch(r"[A-Za-z]+(_[A-Za-z0-9]+)+", text)}
    elsewhere = {
        "metadata.jsonl",
        "load_lora_weights",
        "from_single_file",
        "ACCELERATE_USE_CPU",
        "CUDA_VISIBLE_DEVICES",
        "HF_TOKEN",
    }
    assert names - words_of_the_code() - elsewhere == set()


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_every_file_of_the_repository_in_a_document_is_there(path):
    folders = ("sd_scripts", "kohya_like", "presets", "tests", "docs")
    mentioned = {text for text in ticked(path) if text.split("/")[0] in folders and re.fullmatch(r"[\w./-]+", text)}
    mentioned |= {text for text in ticked(path) if text in ("gui.py", "setup.sh", "setup.ps1", "pyproject.toml", "requirements.txt")}
    assert [name for name in sorted(mentioned) if not (ROOT / name).exists()] == []


def test_modules_that_objectives_are_made_of_are_there():
    (line,) = re.findall(r"`sd_scripts/library/objectives` \(([^)]+)\)", page_text(ROOT / "docs" / "architecture.md"))
    assert [name for name in re.findall(r"`([\w.]+)`", line) if not (ROOT / "sd_scripts/library/objectives" / name).is_file()] == []


def test_the_preset_for_little_memory_is_there():
    assert "`low-vram-8gb`" in prose(ROOT / "README.md")
    assert (ROOT / "presets/sdxl_train_network/low-vram-8gb.toml").is_file()


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_every_anchor_is_a_heading(path):
    def anchors(target: Path) -> set[str]:
        titles = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(path)):
        if anchor not in anchors((path.parent / target).resolve() if target else path):
            broken.append(f"{target}#{anchor}")
    assert broken == []


# --- what is listed completely ----------------------------------------------------------------------------------------


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    text = prose(ROOT / "docs" / page)
    (table,) = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_every_kind_of_event_is_documented_with_its_fields():
    documented: dict[str, set[str]] = {}
    for kinds, fields, _ in rows("files-and-resume.md", "kind"):
        for kind in re.findall(r"`(\w+)`", kinds):
            documented[kind] = set(re.findall(r"`(\w+)`", fields))
    assert documented == {name: {item.name for item in dataclasses.fields(kind)} - {"time"} for name, kind in KINDS.items()}


def test_every_loss_time_density_and_optimizer_is_documented():
    training = page_text(ROOT / "docs" / "training.md")
    for name in ("loss_type", "timestep_sampling", "prediction_type", "huber_schedule", "weighting_scheme", "model_prediction_type"):
        choices = {choice for run in RUNS.values() if name in flat.fields(run) for choice in flat.fields(run)[name].choices}
        assert [choice for choice in sorted(choices) if choice != "auto" and f"`{choice}`" not in training] == [], name
    assert [name for name in BUILT_IN if f"`{name}`" not in training] == []


def test_every_kind_of_adapter_has_its_layout_documented():
    listed = {name for cells in rows("files-and-resume.md", "network_type") for name in re.findall(r"`(\w+)`", cells[0])}
    assert listed == set(OPTIONS["network_type"].choices)


def test_every_button_in_the_documents_is_on_the_page():
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kohya_like").rglob("*") if path.suffix in {".py", ".js"})
    buttons = [name for cells in rows("studio.md", "button") for name in cells[0].split(", ")]
    buttons += ["End now", "Resume", "Use these settings", "Copy command", "Only changed"]
    assert [name for name in buttons if f'"{name}"' not in page and f"t`{name}`" not in page] == []
    states = [name for cells in rows("studio.md", "state") for name in cells[0].split(", ")]
    assert [name for name in states if f'"{name}"' not in page and f"t`{name}`" not in page] == []


def test_every_ending_of_an_image_is_documented():
    from sd_scripts.dataset.images import EXTENSIONS

    assert f"`{' '.join(EXTENSIONS)}`" in prose(ROOT / "docs" / "data.md").replace("\n", " ")
