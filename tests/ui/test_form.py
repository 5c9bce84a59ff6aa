"""The form without a browser: what controls hold, what they mean, and which fields there are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_like import form, theme
from kohya_like.training_modes import TRAINING_MODES
from sd_scripts.families import RUNS, TOOLS
from sd_scripts.runs.cluster import ClusterOptions
from sd_scripts.schema import flat
from sd_scripts.schema import labels as labels_module
from sd_scripts.schema.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
RUN = RUNS["sdxl", "network"]
BASE = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}


def payload(**texts: form.Text) -> dict[str, Any]:
    return {"run": form.run_key(RUN), "values": {**form.texts(RUN, BASE), **texts}}


def numbers(group: dict[str, Any]) -> list[int]:
    """The fields of a group by their place in the schema."""
    return [number for block in group["blocks"] for number in block["fields"]]


_NO_WORDS = set(
    "ae alphas args attn aug c cfg ckpt clip config cpus dim dims dir dtype ema fft gib gpu gpus hf huggingface id ids img indices ip json "
    "lambda lf loraplus lora lr lrs mlp mod multires n neg num org out param pred qkv reg repo reso reso std struct swd t5xxl tex txt unet "
    "v vae w wandb".split()
)
"""Pieces of option names that are no words; a label has them as a word, or in capitals where the field writes them so."""


def test_options_are_called_by_words_and_not_by_their_bare_names() -> None:
    wrong = []
    for forms in (*RUNS.values(), *TOOLS.values(), ClusterOptions):
        family = getattr(forms, "family", "")
        labels = {name: form.specification(field, family)["label"] for name, field in form.shown_fields(forms).items()}
        for name, label in labels.items():
            found = _NO_WORDS & set(label.replace("(", " ").replace(")", " ").split())
            if found or "_" in label or not label[0].isupper() or len(label) > 40:
                wrong.append(f"{name}: {label!r} {sorted(found)}")
        wrong += [f"{label!r} twice in {forms.__name__}" for label, count in Counter(labels.values()).items() if count > 1]
    assert not wrong, "\n".join(sorted(set(wrong)))
    wanted = {"save_last_n_steps": "Keep checkpoints of the last N steps", "save_every_n_steps": "Save every N steps"}
    assert {name: labels_module.label(name) for name in wanted} == wanted
    assert set(labels_module._LABELS) <= {
        name for forms in (*RUNS.values(), *TOOLS.values(), ClusterOptions) for name in form.shown_fields(forms)
    }


@pytest.mark.parametrize(
    ("typed", "meant"), [("0,001", 0.001), ("1,5", 1.5), (" -2,5e-4 ", -2.5e-4), ("0,125", 0.125), (",5", 0.5), ("1,000", None)]
)
def test_a_comma_is_a_decimal_sign_unless_it_may_part_thousands(typed: str, meant: float | None) -> None:
    field = form.shown_fields(RUN)["network_alpha"]
    value = form.from_text(field, typed)
    if meant is not None:
        assert float(value) == meant
        return
    with pytest.raises(OptionError, match=r'"1,000" may mean 1000 or 1\.000; write one of them, without a comma'):
        flat.build(RUN, {**BASE, "network_alpha": value})


def test_a_comma_in_a_list_with_spaces_between_is_a_decimal_sign_and_in_one_of_whole_numbers_parts() -> None:
    fields = form.shown_fields(RUN)
    assert form.from_text(fields["block_lr_weight"], "0,5 1") == ["0.5", "1"]
    assert form.from_text(fields["block_lr_weight"], "0,5") == ["0,5"], "it may be two, and is asked about"
    assert form.from_text(fields["additional_resolutions"], "512,640 768") == ["512", "640", "768"]
    assert form.specification(fields["block_lr_weight"])["fractions"] and "fractions" not in form.specification(fields["block_dims"])


@pytest.mark.parametrize(
    "name", ["safe\u202egnp", "a\u200bb", "a\x7fb", "a/b", ".a", "", "CON", "nul.v1", "com1", "a.", "a "], ids=lambda name: ascii(name)
)
def test_names_of_files_are_names_on_every_system_and_have_no_characters_that_nobody_sees(name: str) -> None:
    with pytest.raises(OptionError, match="output_name") as caught:
        flat.build(RUN, {**BASE, "output_name": name})
    assert str(caught.value).isprintable()


def test_kinds_of_runs_share_the_descriptions_of_their_fields() -> None:
    total = sum(len(form.shown_fields(run)) for run in RUNS.values())
    schema = json.loads(form.schema_json())
    assert len(schema["fields"]) < total / 3
    assert len(schema["fields"]) == len({json.dumps(field) for field in schema["fields"]})


def test_the_choices_of_the_page_lead_to_every_kind_of_run_and_name_options_that_exist() -> None:
    schema = json.loads(form.schema_json())
    keys = {f"{family}/{mode['method']}" for family in schema["families"] for mode in schema["modes"]}
    assert keys >= {form.run_key(run) for run in RUNS.values()}
    for mode in TRAINING_MODES:
        of_way = [set(form.shown_fields(run)) for run in RUNS.values() if run.method == mode.method]
        assert set(mode.first) <= set.intersection(*of_way) and set(mode.hidden) <= set.union(*of_way)


@pytest.mark.parametrize("run", RUNS.values(), ids=form.run_key)
def test_every_option_has_exactly_one_control_with_a_label_and_a_help_text(run: Any) -> None:
    schema = json.loads(form.schema_json())
    shown = [schema["fields"][index] for group in schema["runs"][form.run_key(run)]["groups"] for index in numbers(group)]
    names = [field["name"] for field in shown]
    wanted = [name for name, field in flat.fields(run).items() if not field.show.cli_only]
    assert sorted(names) == sorted(wanted)
    assert all(field["label"] and field["help"] for field in shown)


@pytest.mark.parametrize("run", RUNS.values(), ids=form.run_key)
def test_every_group_has_a_place_on_the_page_and_basics_stay_few(run: Any) -> None:
    schema = json.loads(form.schema_json())
    groups = schema["runs"][form.run_key(run)]["groups"]
    assert [group["title"] for group in groups] == [
        name for name in (theme.BASICS, *theme.GROUPS) if name in {group["title"] for group in groups}
    ]
    assert len(numbers(groups[0])) < 12


@pytest.mark.parametrize("run", RUNS.values(), ids=form.run_key)
def test_defaults_pass_through_the_controls_unchanged(run: Any) -> None:
    for name, field in form.shown_fields(run).items():
        if field.required:
            continue
        text = form.to_text(field, field.default)
        again = (
            form.to_text(field, flat.flatten(flat.build(run, {**BASE, name: form.from_text(field, text)}))[name])
            if name not in BASE
            else text
        )
        assert again == text, name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(min_size=0, max_size=12), max_size=4))
def test_lists_of_texts_survive_their_control(items: list[str]) -> None:
    field = form.shown_fields(RUN)["optimizer_args"]
    assert form.from_text(field, form.to_text(field, tuple(items))) == items


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=0, max_value=100, allow_nan=False))
def test_numbers_survive_their_control_to_the_last_bit(value: float) -> None:
    field = form.shown_fields(RUN)["learning_rate"]
    options = form.options([payload(learning_rate=form.to_text(field, value), unet_lr="1e-4")], (Path("/"),))
    assert flat.flatten(options)["learning_rate"] == value


def test_an_empty_field_means_none_where_none_is_allowed_and_is_refused_elsewhere() -> None:
    options = form.options([payload(network_alpha="", sample_size=" ", vae="")], (Path("/"),))
    values = flat.flatten(options)
    assert (values["network_alpha"], values["sample_size"], values["vae"]) == (None, None, None)
    with pytest.raises(OptionError, match="network_dim"):
        form.options([payload(network_dim="")], (Path("/"),))
    with pytest.raises(OptionError, match="resolution"):
        form.options([payload(resolution="")], (Path("/"),))


def test_the_page_cannot_set_what_only_the_command_line_may() -> None:
    made_up = payload()
    made_up["values"]["allow_custom_modules"] = True
    _run, values = form.read([made_up])
    assert "allow_custom_modules" not in values
    with pytest.raises(OptionError, match="allow_custom_modules"):
        form.options([payload(optimizer_type="os.system")], (Path("/"),))


def test_images_are_looked_at_whatever_else_a_start_still_lacks() -> None:
    given = payload(
        pretrained_model_name_or_path="", learning_rate="much", train_text_encoder=True, resolution="320,256", max_token_length="150"
    )
    with pytest.raises(OptionError, match="learning_rate"):
        form.options([given], (Path("/"),))
    options = form.options([given], (Path("/"),), ("dataset", "model"))
    assert (options.dataset.resolution, options.dataset.train_data_dir, options.model.max_token_length) == ((320, 256), "toy:star", 150)
    with pytest.raises(OptionError, match="resolution"):
        form.options([payload(resolution="wide")], (Path("/"),), ("dataset", "model"))


@pytest.mark.parametrize(
    "junk", [None, 3, "x", [], {"values": 3}, {"run": [], "values": {}}, {"run": "no/such", "values": {"seed": {"a": [1]}}}]
)
def test_what_a_page_never_sends_is_answered_with_sentences(junk: Any) -> None:
    with pytest.raises(OptionError):
        form.options([junk], (Path("/"),))


def test_all_problems_come_at_once_with_their_fields(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        form.options([payload(network_dim="x", learning_rate="-1", train_data_dir="/etc", resume="/etc/shadow")], (tmp_path,))
    assert {"network_dim", "learning_rate", "train_data_dir", "resume"} <= {problem.option for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("pretrained_model_name_or_path", "stabilityai/stable-diffusion-xl-base-1.0", False),
        ("pretrained_model_name_or_path", "toy", False),
        ("pretrained_model_name_or_path", "/etc/passwd", True),
        ("pretrained_model_name_or_path", "../../x.safetensors", True),
        ("train_data_dir", "toy:star", False),
        ("train_data_dir", "/", True),
        ("train_data_dir", "images", True),
        ("base_weights", "/etc/a.safetensors", True),
        ("sample_prompts", "a cat", False),
        ("sample_prompts", "/etc/prompts.txt", True),
        ("resume", "auto", False),
        ("resume", "400", False),
        ("output_dir", "\\\\server\\share", True),
    ],
)
def test_places_outside_the_roots_are_refused_and_other_words_pass(name: str, value: str, is_refused: bool, tmp_path: Path) -> None:
    field = form.shown_fields(RUN)[name]
    problems = form.outside(RUN, {name: form.from_text(field, value)}, (tmp_path,))
    assert bool(problems) == is_refused


def test_the_front_end_never_imports_torch() -> None:
    heavy = ("torch", "diffusers", "transformers", "peft", "accelerate")
    begin = "import sys; from kohya_like import startup; startup.prepare(); import kohya_like.app"
    code = f"{begin}; print([name for name in {heavy!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr
