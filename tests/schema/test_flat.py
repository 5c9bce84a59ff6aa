"""Flat names, TOML, command line: one set of options in every form, and a sentence for everything that is wrong."""

from __future__ import annotations

import string
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sd_scripts.families import RUNS, TOOLS
from sd_scripts.families.sdxl.options import SdxlFull, SdxlNetwork
from sd_scripts.schema import legacy
from sd_scripts.schema.command_line import parse_cli, parse_tool, to_argv
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.fields import show_of
from sd_scripts.schema.flat import FlatField, build, changed, core_type, fields, flatten, with_absolute_paths
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.toml_files import parse_toml, read_toml, to_toml
from sd_scripts.schema.tools import FILE_TOOLS

NEEDED = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"}
# Texts without the two things an argument list cannot carry: NUL, and lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(string.ascii_letters + "é字 _-", min_size=1, max_size=12)


def value_of(field: FlatField, kind: Any = None) -> st.SearchStrategy[Any]:
    """Values that one field allows, by its type and range."""
    kind = field.type if kind is None else kind
    if field.choices:
        return st.sampled_from(field.choices)
    if field.many:
        elements = [item for item in get_args(kind) if item is not Ellipsis]
        one = value_of_type(field, core_type(elements[0]))
        return st.tuples(one, one) if len(elements) == 2 else st.lists(one, max_size=3).map(tuple)
    return value_of_type(field, kind)


def value_of_type(field: FlatField, kind: Any) -> st.SearchStrategy[Any]:
    bounds = field.bounds
    if kind is bool:
        return st.booleans()
    if kind is int:
        low = int(bounds.get("ge", bounds.get("gt", -9) + 1))
        return st.integers(low, int(min(bounds.get("le", bounds.get("lt", low + 9000) - 1), 2**60)))
    if kind is float:
        low, high = bounds.get("ge", bounds.get("gt", -100.0)), bounds.get("le", bounds.get("lt", 100.0))
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    assert kind is str
    if field.name == "output_name":
        return NAMES.filter(lambda text: not text.startswith("."))
    return TEXT.filter(bool) if field.name == "caption_separator" else TEXT


@st.composite
def configurations(draw: st.DrawFn) -> RunOptions:
    """Valid options of any kind of run with some fields changed; contradictions are drawn again."""
    run = draw(st.sampled_from(list(RUNS.values())))
    known = {name: field for name, field in fields(run).items() if not field.show.cli_only}
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=12, unique=True))
    values = NEEDED | {name: draw(value_of(known[name])) for name in names}
    kept = dict(NEEDED)
    for name, value in values.items():
        try:
            build(run, kept | {name: value})
        except OptionError:
            continue
        kept[name] = value
    return build(run, kept)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations())
def test_toml_and_command_line_give_back_the_same_options(options: RunOptions) -> None:
    assert build(type(options), parse_toml(to_toml(options), "a.toml")) == options
    assert parse_cli(type(options), to_argv(options)).options == options
    assert build(type(options), flatten(options)) == options


def every_field_once() -> list[tuple[type[RunOptions], str]]:
    """Each option with the first kind of run that has it, and again with each that has a form of its own of it."""
    found: dict[tuple[str, object, str], tuple[type[RunOptions], str]] = {}
    for run in RUNS.values():
        for name, field in fields(run).items():
            if not field.show.cli_only:
                found.setdefault((name, field.default, str(field.type)), (run, name))
    return list(found.values())


def test_every_field_of_every_run_is_among_those_that_are_tried() -> None:
    tried = {name for _, name in every_field_once()}
    assert tried == {name for run in RUNS.values() for name, field in fields(run).items() if not field.show.cli_only}


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.__name__)
def test_every_single_field_survives_toml_and_command_line(run: type[RunOptions], subtests: pytest.Subtests) -> None:
    for name in [name for one, name in every_field_once() if one is run]:
        with subtests.test(msg=name):
            check_field(run, name)


def check_field(run: type[RunOptions], name: str) -> None:
    """With the other fields that it needs: what keeps it awake, and for other validators' demands the table below."""
    company: dict[str, dict[str, Any]] = {
        "text_encoder_lr": {"train_text_encoder": True, "cache_text_encoder_outputs": False},
        "train_text_encoder": {"cache_text_encoder_outputs": False},
        "train_unet": {"train_text_encoder": True, "cache_text_encoder_outputs": False},
        "base_weights_multiplier": {"base_weights": ["a.safetensors", "b.safetensors"]},
        "color_aug": {"cache_latents": False},
        "masked_loss": {"alpha_mask": True},
        "num_class_images": {"class_prompt": "a dog"},
        "train_t5xxl": {"cache_text_encoder_outputs": False},
        "gpu_ids": {"multi_gpu": True},
        "num_machines": {"main_process_ip": "10.0.0.1", "main_process_port": 29500},
        "machine_rank": {"num_machines": 5, "main_process_ip": "10.0.0.1", "main_process_port": 29500},
        "main_process_ip": {"main_process_port": 29500},
        "fused_backward_pass": {"max_grad_norm": 0.0},
        "swd_scale_weights": {"swd_scales": (1, 3)},
    }
    special: dict[str, Any] = {
        "lr_scheduler_type": None,
        "optimizer_type": "Lion",
        "min_bucket_reso": 128,
        "max_bucket_reso": 1536,
        "base_weights_multiplier": (0.5, -1e-7),
        "dataset_config": "sets.toml",
        "min_timestep": 10,
        "max_timestep": 900,
        "network_reg_dims": ("attn2=8", "ff=0"),
        "network_reg_lrs": ("attn2=1e-5",),
        "huggingface_repo_id": "me/loras",
        "in_dims": (4, 0, 4, 0, 4),
        "block_lr": tuple(number * 1e-6 for number in range(23)),
        "train_double_block_indices": "0-3,5",
        "train_single_block_indices": "none",
        "train_block_indices": "0-3,5",
        "vae_device": "cuda:1",
        "text_encoder_device": "cpu",
        "gpu_ids": ("GPU-1a2b3c4d-0000-1111-2222-333344445555", "GPU-2a2b3c4d-0000-1111-2222-333344445555"),
        "cfg_training_scale": 2.5,
        "channel_multipliers": (1, 2, 2, 4),
        "attention_levels": (0, 3) if run.family == "ddpm" else (0, 2),
        "attention_head_dim": 64 if run.family == "ddpm" else 32,
        "swd_scales": (1, 7),
        "style_weights": ("monet=2", "ukiyo-e=0.5"),
        "vocab_size": 4096,
        "text_heads": 8,
        "beta_start": 0.001,
    }
    if run.family == "ddpm":
        special["max_token_length"] = 32
    field = fields(run)[name]
    value = special[name] if name in special else example(field)
    # A model from nothing has no base.
    base = {} if run.family == "ddpm" and name != "pretrained_model_name_or_path" else NEEDED
    given = base | {"train_data_dir": NEEDED["train_data_dir"]}
    if value is None:
        return_value = build(run, given)
        assert getattr(getattr(return_value, field.section), name) is None
        return
    needed = {key: item for key, item in given.items() if not (name == "dataset_config" and key == "train_data_dir")}
    options = build(run, needed | awakening(run, name, special) | company.get(name, {}) | {name: value})
    assert getattr(getattr(options, field.section), name) == value
    assert name in changed(options)
    assert build(run, parse_toml(to_toml(options), "a.toml")) == options
    assert parse_cli(run, to_argv(options)).options == options


def awakening(run: type[RunOptions], name: str, special: dict[str, Any]) -> dict[str, Any]:
    """Values of other options with which this one has an effect."""
    known = fields(run)
    need = next((need for need in known[name].show.conditions if need.name in known), None)
    if need is None:
        return {}
    other = known[need.name]
    if need.off:
        return {}
    if need.values and (str(other.default) in need.values) != need.but:
        return awakening(run, need.name, special)
    value = need.values[0] if need.values and not need.but else True if other.type is bool else special.get(need.name, example(other))
    return awakening(run, need.name, special) | {need.name: value}


def example(field: FlatField) -> Any:
    """A value that is not the default."""
    if field.choices:
        return next(choice for choice in reversed(field.choices) if choice != field.default)
    if field.type is bool:
        return not field.default
    if field.many:
        elements = [core_type(item) for item in get_args(field.type) if item is not Ellipsis]
        if len(elements) == 2:
            return (512, 768)
        return {int: (16, 32), float: (0.25, 1e-05), str: ("--x", "a b", '["c"]', "é=1,2")}[elements[0]]
    if field.type is int:
        return 3 if field.bounds.get("ge", 0) < 8 else 96
    if field.type is float:
        return 0.375 if field.default != 0.375 else 0.5
    return 'a "quoted" text, with\nlines \\ and é' if field.name != "output_name" else "my lora é"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'pretrained_model_name_or_path = "toy"\ntrain_data_dir = "a"\nnetwork_dim = 8\nmax_grad_norm = 0\n'
        "[training]\nseed = 7\nmax_train_epochs = 3\n"
    )
    seen = parse_cli(
        SdxlNetwork, ["--config_file", str(file), "--network_dim", "4", "--flip_aug", "--no_enable_bucket", "--max_train_epochs", "none"]
    )
    assert seen.options.network.network_dim == 4
    assert seen.options.training.seed == 7 and seen.options.training.max_train_epochs is None
    assert seen.options.optimizer.max_grad_norm == 0, "an explicit zero is a value"
    assert seen.options.dataset.flip_aug and not seen.options.dataset.enable_bucket
    assert "network_alpha" not in seen.given and "network_dim" in seen.given


def test_sizes_and_numeric_choices_are_read_as_kohya_writes_them() -> None:
    for text, wanted in {"768": (768, 768), "512,768": (512, 768), "512x768": (512, 768)}.items():
        assert parse_cli(SdxlNetwork, [*argv(NEEDED), "--resolution", text]).options.dataset.resolution == wanted
    assert parse_cli(SdxlNetwork, [*argv(NEEDED), "--resolution", "640", "384"]).options.dataset.resolution == (640, 384)
    assert parse_cli(SdxlNetwork, [*argv(NEEDED), "--max_token_length", "150"]).options.model.max_token_length == 150


def test_a_comma_on_the_command_line_is_a_decimal_sign_and_is_told() -> None:
    asked = parse_cli(SdxlNetwork, [*argv(NEEDED), "--learning_rate", "0,001", "--network_alpha=1,5"])
    assert (asked.options.optimizer.learning_rate, asked.options.network.network_alpha) == (0.001, 1.5)
    assert [note for note in asked.notes if "comma" in note] == [
        "learning_rate: 0,001 is read as 0.001, with a decimal comma",
        "network_alpha: 1,5 is read as 1.5, with a decimal comma",
    ]
    # What may be a thousand, and a rate that may be two: 1,5e-5 trained the first text encoder at 1.
    for text, told in {
        "--max_train_steps=1,000": "may mean 1000 or 1.000; write one of them",
        "--text_encoder_lr=1,5e-5": "may mean 1.5e-5, or the numbers 1 and 5e-5; write 1.5e-5, or a space between them",
    }.items():
        with pytest.raises(OptionError, match=told):
            parse_cli(SdxlNetwork, [*argv(NEEDED), "--train_text_encoder", text])
    for text in ("--text_encoder_lr=1,5e-5 2e-5", "--text_encoder_lr=1,5e-5, 2e-5"):
        parted = parse_cli(SdxlNetwork, [*argv(NEEDED), "--train_text_encoder", text])
        assert flatten(parted.options)["text_encoder_lr"] == (1.5e-5, 2e-5)
        assert "text_encoder_lr: 1,5e-5 is read as 1.5e-5, with a decimal comma" in parted.notes
    both = parse_cli(SdxlNetwork, [*argv(NEEDED), "--train_text_encoder", "--text_encoder_lr=1e-4,0.5"])
    assert flatten(both.options)["text_encoder_lr"] == (1e-4, 0.5)


def test_a_run_that_would_train_nothing_is_refused_whichever_rates_are_0() -> None:
    def told(run: type[RunOptions], **values: object) -> str:
        try:
            build(run, NEEDED | {"cache_text_encoder_outputs": False} | values)
        except OptionError as err:
            return str(err)
        return ""

    words = "all learning rates are 0"
    assert words in told(SdxlNetwork, learning_rate=0) and words in told(SdxlFull, learning_rate=0)
    assert words in told(SdxlNetwork, unet_lr=0, train_text_encoder=True, text_encoder_lr=[0, 0])
    assert words in told(SdxlNetwork, learning_rate=0, train_unet=False, train_text_encoder=True)
    assert words in told(SdxlFull, block_lr=[0] * 23)
    assert words in told(SdxlNetwork, learning_rate=0, text_encoder_lr=[1e-5]), "text encoders are not trained"
    assert "block_lr_weight: every block has 0, so nothing would be trained" in told(SdxlNetwork, block_lr_weight=[0] * 19)
    for run, rates in (
        (SdxlNetwork, {"unet_lr": 1e-4}),
        (SdxlNetwork, {"network_reg_lrs": ["attn2=1e-4"]}),
        (SdxlNetwork, {"train_text_encoder": True, "text_encoder_lr": [0, 1e-5]}),
        (SdxlFull, {"unet_lr": 1e-6}),
        (SdxlFull, {"block_lr": [0] * 22 + [1e-6]}),
    ):
        assert told(run, learning_rate=0, **rates) == ""
    for rates in (
        {"network_reg_lrs": ["attn2=1e-4"]},
        {"train_text_encoder": True},
        {"network_weights": "a.safetensors", "dim_from_weights": True},
    ):
        assert told(SdxlNetwork, block_lr_weight=[0] * 19, **rates) == ""
    assert told(SdxlNetwork, block_lr_weight=[0] * 18 + [1]) == ""


def test_an_expression_of_which_python_may_change_its_mind_one_day_is_taken_without_a_word() -> None:
    assert build(SdxlNetwork, NEEDED | {"target_modules": ["[[a]ttn"]}).network.target_modules == ("[[a]ttn",)


def argv(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def test_kohyas_network_args_are_opened_into_plain_options() -> None:
    options = parse_cli(
        SdxlNetwork, [*argv(NEEDED), "--network_args", "conv_dim=8", "conv_alpha=2", "algo=lora", "loraplus_lr_ratio=4"]
    ).options
    assert (options.network.conv_dim, options.network.conv_alpha, options.network.loraplus_lr_ratio) == (8, 2.0, 4.0)
    with pytest.raises(OptionError, match="dora_wd is not known"):
        build(SdxlNetwork, NEEDED | {"network_args": ["dora_wd=true"]})


def test_all_problems_are_told_at_once_with_option_value_and_what_is_allowed() -> None:
    with pytest.raises(OptionError) as caught:
        parse_cli(
            SdxlNetwork,
            ["stray", "--network_dmi", "3", "--network_alpha", "-1", "--loss_type", "l3", "--min_timestep", "900", "--max_timestep", "5"],
        )
    text = str(caught.value)
    assert "network_dmi: there is no such option. Did you mean network_dim?" in text
    assert 'network_alpha: "-1" is out of range; above 0 or more' not in text
    assert 'network_alpha: "-1" is out of range; above 0 is allowed' in text
    assert 'loss_type: "l3" is not one of l2, l1, huber, smooth_l1' in text
    assert "min_timestep (900) must be below max_timestep (5)" in text
    assert "pretrained_model_name_or_path is missing" in text and "train_data_dir is missing" in text
    assert '"stray" does not belong to an option' in text
    assert len(caught.value.problems) == 7


def test_what_a_tool_works_on_may_stand_first_without_its_flag() -> None:
    for tool in FILE_TOOLS:
        first = next(field for field in fields(tool).values() if field.required)
        rest = [f"--{field.name}=2" for field in fields(tool).values() if field.required and field is not first]
        words = ["an/one", "two"] if first.many else ["an/one"]
        found, named = parse_tool(tool, [*words, *rest]), parse_tool(tool, [f"--{first.name}", *words, *rest])
        assert found == named and flatten(found)[first.name] == (tuple(words) if first.many else "an/one")
    for wrong in (["one", "two"], ["one", "--model=two"]):
        with pytest.raises(OptionError, match='"one" does not belong to an option'):
            parse_tool(TOOLS["verify_lora"], wrong)


def test_a_broken_toml_file_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("network_dim = 8\nlearning_rate = = 3\n")
    with pytest.raises(OptionError, match=r"broken\.toml is not valid TOML: .*line 2"):
        read_toml(file)
    with pytest.raises(OptionError, match="does not exist"):
        read_toml(tmp_path / "no.toml")


def test_code_of_other_people_is_only_run_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'pretrained_model_name_or_path = "toy"\ntrain_data_dir = "a"\nallow_custom_modules = true\noptimizer_type = "os.system"\n'
    )
    with pytest.raises(OptionError, match="may only be given on the command line"):
        parse_cli(SdxlNetwork, ["--config_file", str(file)])
    with pytest.raises(OptionError, match="may only be given on the command line"):
        build(SdxlNetwork, NEEDED | {"allow_custom_modules": True})
    with pytest.raises(OptionError, match="needs --allow_custom_modules"):
        build(SdxlNetwork, NEEDED | {"optimizer_type": "os.system"})
    options = parse_cli(SdxlNetwork, [*argv(NEEDED), "--optimizer_type", "torch.optim.Adam", "--allow_custom_modules"]).options
    assert options.optimizer.allow_custom_modules
    assert "allow_custom_modules" not in tomllib.loads(to_toml(options))["optimizer"]


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.script)
def test_every_field_has_help_and_names_are_unique(run: type[RunOptions]) -> None:
    for field in fields(run).values():
        assert (len(field.help) > 20 and field.help[0].isupper()) or field.help.startswith("modelspec"), field.name
        assert field.help.endswith((".", ")")), field.name
        assert field.name == field.name.lower() and "-" not in field.name
    basic = [field.name for field in fields(run).values() if show_of(field.info).basic]
    assert 5 <= len(basic) < 12


def test_no_legacy_name_is_an_option_and_each_has_advice() -> None:
    known = {name for run in RUNS.values() for name in fields(run)}
    # Options of some families, which the others explain.
    own = {"clip_skip", "block_lr", "train_blocks", "model_version", "text_encoder", "full_bf16", "fused_backward_pass"}
    for table in (legacy.RENAMED, legacy.NOT_NEEDED, legacy.UNSUPPORTED):
        for name in table:
            assert name not in known - own, name
            assert legacy.verdict(name, True)
    assert legacy.verdict("no_such_thing", True) is None
    for name, advice in legacy.RENAMED.items():
        assert advice.split()[0].rstrip(",") in known or advice.split()[0] == "dry_run", name


KOHYA_NAMES = (Path(__file__).parents[1] / "data" / "kohya_option_names.txt").read_text().split()


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.__name__)
def test_every_option_name_of_kohyas_tools_is_known_or_answered(run: type[RunOptions]) -> None:
    unknown = []
    for name in KOHYA_NAMES:
        try:
            build(run, NEEDED | {name: "1"})
        except OptionError as err:
            unknown += [name] if "there is no such option" in str(err) else []
    assert len(KOHYA_NAMES) > 300 and unknown == []


def test_paths_of_a_kept_configuration_do_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "prompts.txt").write_text("a cat")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"pretrained_model_name_or_path": "toy", "train_data_dir": "images", "output_dir": "runs", "sample_prompts": "prompts.txt"}
    options = with_absolute_paths(build(SdxlNetwork, values))
    assert flatten(options) == flatten(build(SdxlNetwork, values)) | {
        "train_data_dir": str(tmp_path / "images"),
        "output_dir": str(tmp_path / "runs"),
        "sample_prompts": str(tmp_path / "prompts.txt"),
    }
    assert with_absolute_paths(options) is options
    assert build(SdxlNetwork, values | {"train_data_dir": "~/images"}).dataset.train_data_dir == str(tmp_path / "images")


@pytest.mark.parametrize("text", ["abc", ":", "", "1,2,3", "12.5", "x", "-5", "1024,"])
def test_a_size_that_is_none_is_a_sentence(text: str) -> None:
    if text == "1024,":
        assert build(SdxlNetwork, NEEDED | {"resolution": text}).dataset.resolution == (1024, 1024)
        return
    for value in (text, [text]):
        with pytest.raises(OptionError, match="resolution"):
            build(SdxlNetwork, NEEDED | {"resolution": value})


def test_an_empty_path_is_not_given_wherever_it_stands(tmp_path: Path) -> None:
    """In a file, on the command line and on the page; in a list; for every option that is a path."""
    taken = []
    for run, name in every_field_once():
        field = fields(run)[name]
        base = {key: value for key, value in NEEDED.items() if not (run.family == "ddpm" and key.startswith("pretrained"))}
        if field.show.kind not in ("folder", "file", "start") or name in base:
            continue
        file = tmp_path / "a.toml"
        file.write_text("".join(f'{key} = "{value}"\n' for key, value in base.items()) + f"{name} = {[''] if field.many else repr('')}")
        for options in (
            build(run, base | {name: [" "] if field.many else " "}),
            parse_cli(run, [*argv(base), f"--{name}=", "--dry_run"]).options,
            parse_cli(run, [f"--config_file={file}"]).options,
        ):
            value = getattr(getattr(options, field.section), name)
            taken += [f"{run.script} {name}: {value!r}"] if value != field.default else []
    assert taken == []
    for name in ("run_dir", "config_file"):
        asked = parse_cli(SdxlNetwork, [*argv(NEEDED), f"--{name}="])
        assert asked.run_dir is None and asked.options == build(SdxlNetwork, NEEDED)


NONSENSE: dict[str, tuple[Any, ...]] = {
    "a number": ("1e30", -1e30, 2**70, "inf", "y" * 5000),
    "an expression": (["["], ["(" * 5000]),
    "a path": ("a" * 5000, "a\udce4", "~nobody-of-that-name/x", "a\0b", "/" + "b" * 300),
}


def test_nonsense_is_refused_with_a_short_sentence_that_names_the_option() -> None:
    wrong, tried = [], set()
    for run in (*RUNS.values(), *TOOLS.values()):
        for name, field in fields(run).items():
            is_number = field.type in (int, float) or (field.many and core_type(get_args(field.type)[0]) in (int, float))
            kind = "a number" if is_number else "a path" if field.show.kind in ("folder", "file") else ""
            kind = "an expression" if name in ("target_modules", "exclude_modules") else kind
            if not kind or (name, field.range_text, field.type) in tried:
                continue
            tried.add((name, field.range_text, field.type))
            awake = awakening(run, name, {"cfg_training_scale": 2.0, "num_machines": 2})
            for value in NONSENSE[kind]:
                given = NEEDED | awake | {name: [value] if field.many and not isinstance(value, list) else value}
                # Whatever else is missing: the sentence about this option is wanted.
                try:
                    build(run, {key: item for key, item in given.items() if key in fields(run)})
                    told = []
                except OptionError as err:
                    told = [str(problem) for problem in err.problems if problem.option == name]
                if not told or max(map(len, told)) > 700:
                    wrong.append(f"{run.script} {name} = {str(value)[:20]}: {told}")
    assert wrong == []


@pytest.mark.parametrize("name", ["run_dir", "config_file", "instance_prompt", "output_dir"])
def test_names_and_texts_that_are_not_utf_8_are_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name}: .*dir.udce4.* has bytes that are not UTF-8"):
        parse_cli(SdxlNetwork, [*argv(NEEDED), f"--{name}", "dir\udce4"])


def test_what_is_allowed_is_really_allowed() -> None:
    """The limits that a sentence names are the field's own: where both at most 1 and below 1 hold, 1 is not allowed."""
    wrong = []
    for run in (*RUNS.values(), *TOOLS.values()):
        for name, field in fields(run).items():
            strict = {"lt", "gt"} & field.bounds.keys()
            for key, limit in field.bounds.items():
                value = int(limit) if field.type is int else limit
                try:
                    field.reader.validate_python([value] * 2 if field.many else value)
                    taken = True
                except ValueError:
                    taken = False
                word = {"lt": "below", "gt": "above", "le": "to", "ge": ""}[key]
                if taken is (key in strict) and not field.many:
                    wrong.append(
                        f"{run.script} {name}: {limit} is {'taken' if taken else 'refused'}, but the sentence says {field.range_text}"
                    )
                if abs(limit) < 10**9 and word not in field.range_text:
                    wrong.append(f"{run.script} {name}: {field.range_text} lacks {word} {limit}")
    assert wrong == []


@pytest.mark.parametrize("text", ["--", "-- --", "--seed"])
def test_a_text_of_dashes_is_a_text(text: str) -> None:
    options = build(SdxlNetwork, {**NEEDED, "metadata_author": text})
    assert parse_cli(SdxlNetwork, to_argv(options)).options == options


def test_a_file_of_an_earlier_version_means_what_it_meant() -> None:
    """A preset that somebody kept names what differs from the defaults of its day, such as that of Z-Image's objective."""
    kept = '[kohya_like]\nscript = "zimage_train_network.py"\nschema_version = {}\n[objective]\nturbo_steps = 4\n'
    run = RUNS["zimage", "network"]
    then, now = (build(run, {**NEEDED, **parse_toml(kept.format(version), "a.toml")}) for version in (1, 2))
    assert (flatten(then)["objective"], flatten(now)["objective"]) == ("acrf", "flow")
    assert flatten(build(run, parse_toml(to_toml(now), "a.toml")))["objective"] == "flow"
