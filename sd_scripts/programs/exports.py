"""The way back: the settings of a run as a command line of sd-scripts, or a file of ai-toolkit, musubi-tuner or OneTrainer.

What an importer's rules can say backwards is not repeated here. What is written is read again by the
importer of that program. An option that comes back with another value cannot be said there, and is named; so what is exported and not named
is the same there and here.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import toml
import yaml

from sd_scripts.families import FACTS
from sd_scripts.schema import flat, kohya_words
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.prompts import Defaults, PromptSpec, read_prompts
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import shown

from . import ai_toolkit, command_lines, musubi, onetrainer
from .kohya import reading as kohya
from .table import said, version_of


@dataclass(frozen=True)
class Exported:
    """A file for another program."""

    program: str
    name: str
    """A name for the file."""
    text: str
    unsaid: tuple[str, ...]
    """What cannot be said there, as `option = value`."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Further files, their texts by their names: the data set of a program that keeps it apart."""


def to_kohya(options: RunOptions) -> Exported:
    """A command line of sd-scripts, for sh. Raises OptionError for a kind of run that no script of its own trains."""
    own = next((kind for kind, family in kohya_words.MODEL_TYPES.items() if family == options.family), "")
    like = next((name for name, facts in FACTS.items() if facts.kohya and facts.kohya.model_type), "") if own else options.family
    script = next((name for name, (family, method, _) in kohya_words.SCRIPTS.items() if (family, method) == (like, options.method)), None)
    if script is None:
        raise OptionError(f"sd-scripts has no script that trains {options.label}")
    values, asleep = _with_alpha(flat.flatten(options)), flat.asleep(type(options), flat.flatten(options))
    facts = FACTS[like].kohya
    theirs = {**kohya_words.DEFAULTS, **(facts.defaults if facts else {})}
    changed = ((flat.changed(options).keys() | theirs.keys()) & values.keys()) - asleep.keys()
    lacking = kohya_words.LACKING.get(script, frozenset())
    words = [word for name in values if name in (changed & kohya_words.SAME) - lacking for word in _flag(name, values[name])]
    for option, names in (facts.options if facts else {}).items():
        words += [word for name in names if option in changed for word in _flag(name, values[option])]
    words += ["--model_type", own] if own else []
    version = version_of(options.family, str(values["pretrained_model_name_or_path"]))
    words += [f"--{version}"] if version else []
    if options.method == "network":
        words += _network(values, changed, like)
    elif facts and facts.dreambooth_trains_text and not values["train_text_encoder"]:
        words += ["--stop_text_encoder_training=-1"]
    switches = {switch: meant for switch, meant in kohya_words.SWITCHES.items() if switch not in lacking}
    words += [f"--{switch}" for switch, meant in switches.items() if _says(switch, meant, values, changed)]
    prompts = _prompts_beside(values)
    words += [f"--sample_prompts={name}" for name in prompts]
    lines = " \\\n".join(f"  {line}" for line in _lines(words))
    text = f"accelerate launch {script} \\\n{lines}\n"
    found = kohya.of_line("the line", command_lines.commands("x.sh", text)[0])
    assert found is not None
    return Exported("sd-scripts", f"{values['output_name']}.sh", text, _unsaid(options, _with_prompts(found, prompts)), prompts)


def _prompts_beside(values: Mapping[str, Any]) -> dict[str, str]:
    """The file of previews that a program reads, by its name; none for no prompts."""
    return {f"{values['output_name']}-prompts.txt": values["sample_prompts"].strip() + "\n"} if values["sample_prompts"].strip() else {}


def _with_prompts(found: Imported, prompts: Mapping[str, str]) -> Imported:
    """The import with the file of previews that lies beside it."""
    text = prompts.get(str(found.values.get("sample_prompts")))
    return replace(found, values={**found.values, **({"sample_prompts": text.strip()} if text is not None else {})})


def _previews(options: RunOptions) -> list[PromptSpec]:
    """The previews that are asked for, complete; none where a file with them cannot be read."""
    try:
        return read_prompts(Defaults(options.samples, options.dataset.resolution, options.model.grid, options.training.seed))
    except OptionError:
        return []


def _says(switch: str, meant: Mapping[str, object], values: Mapping[str, Any], changed: set[str]) -> bool:
    """Whether one of kohya's switches has to be on. Of two for the same the first; what names have as well is said by them."""
    of_names = switch in ("use_8bit_adam", "use_lion_optimizer", "fp8_base_unet", "unsloth_offload_checkpointing", "no_half_vae")
    if switch == "network_train_unet_only":
        return values.get("train_text_encoder") is False
    return not of_names and bool(meant.keys() & changed) and all(values.get(name) == value for name, value in meant.items())


def _network(values: Mapping[str, Any], changed: set[str], family: str) -> list[str]:
    kind, facts = values["network_type"], FACTS[family].kohya
    plain = next((name for name, type_ in (facts.types if facts else {}).items() if type_ == "transformer"), "networks.lora")
    words = ["--network_module", {"loha": "networks.loha", "lokr": "networks.lokr"}.get(kind, plain)]
    same = [name for argument, name in kohya_words.NETWORK_ARGS.items() if argument == name and name in changed]
    given = [f"{name}={_written(values[name])}" for name in same if values.get(name) is not None]
    if kind == "lokr":
        given += [f"factor={values['lokr_factor']}"] if "lokr_factor" in changed else []
    return [*words, *(["--network_args", *given] if given else [])]


def _flag(name: str, value: object) -> list[str]:
    if value is None or value is False or value == ():
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, tuple) and name != "resolution":
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={_written(value)}"]


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    # A number of steps may be a part of the run there, and 12.0 is neither.
    return repr(int(value) if value.is_integer() else value) if isinstance(value, float) else str(value)


def _lines(words: list[str]) -> list[str]:
    """The words for a shell, an option a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines


def _unsaid(options: RunOptions, found: Imported) -> tuple[str, ...]:
    """What comes back otherwise. Previews are the same where the same is drawn, however it is written."""
    run = type(options)
    wanted = _with_alpha(flat.flatten(options))
    if found.run is not run:
        raise OptionError(f"{options.label} comes back as {found.run.label}")
    stand_ins = {sentence.partition(":")[0]: "toy" for sentence in found.missing}
    built = flat.build(run, {**stand_ins, **found.values})
    back = _with_alpha(flat.flatten(built))
    if _previews(options) and _previews(options) == _previews(built):
        back["sample_prompts"] = wanted["sample_prompts"]
    asleep = flat.asleep(run, wanted)
    lost = [name for name, value in wanted.items() if not _same(name, back[name], value) and name not in asleep]
    return tuple(f"{name} = {shown(wanted[name])}" for name in lost)


def _with_alpha(values: dict[str, Any]) -> dict[str, Any]:
    """No alpha means that of the rank."""
    ranks = {"network_alpha": "network_dim", "conv_alpha": "conv_dim"}
    missing = [alpha for alpha, rank in ranks.items() if alpha in values and values[alpha] is None and values[rank] is not None]
    return values | {alpha: float(values[ranks[alpha]]) for alpha in missing}


def _same(name: str, one: Any, other: Any) -> bool:
    if name == "optimizer_args":
        return _arguments(one) == _arguments(other)
    return one == other or (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-9))


# --- tables of programs whose rules go both ways ----------------------------------------------------------------------


def _values(options: RunOptions) -> dict[str, Any]:
    """The options by name; what this kind of run does not have is None, and an adapter's alpha is a number."""
    values: dict[str, Any] = defaultdict(lambda: None, flat.flatten(options))
    return defaultdict(lambda: None, _with_alpha(values))


def _sides(values: Mapping[str, Any]) -> list[int] | None:
    """The sides of squares that are trained, the largest last; None for a size that is no square."""
    width, height = values["resolution"]
    return [*values["additional_resolutions"], width] if width == height else None


def _arguments(texts: Sequence[str]) -> dict[str, object]:
    """The optimizer's arguments by name; their order means nothing."""
    found: dict[str, object] = {}
    for name, _, text in (text.partition("=") for text in texts):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        found[name.strip()] = list(value) if isinstance(value, tuple) else value
    return found


def _of_one_version(options: RunOptions) -> RunOptions:
    """The same run, on the one of the family's models that its base is by its name. Raises OptionError where the name does not tell."""
    values = flat.flatten(options)
    if values.get("model_version") != "auto":
        return options
    name = re.split(r"[/\\]", str(values["pretrained_model_name_or_path"]))[-1].lower()
    choices = sorted(map(str, flat.fields(type(options))["model_version"].choices), key=lambda one: ("-" not in one, one))
    # "edit-2509" by its number, because names have other signs between the two.
    found = next((one for one in choices if one != "auto" and one.rpartition("-")[2] in name), None)
    if found is None:
        raise OptionError(f"{options.label}: the name {name} does not say which of the family's models it is; choose model_version")
    return flat.build(type(options), {**flat.flatten(options), "model_version": found})


_BITS = {"qfloat8": "qfloat8", "qint8": "qint8", "nf4": "uint4", "fp8": "qfloat8"}


def to_ai_toolkit(options: RunOptions) -> Exported:
    """A job of ai-toolkit (YAML). Raises OptionError for a kind of run that it does not have."""
    options = _of_one_version(options)
    values, program = _values(options), ai_toolkit
    arch = program.name_of(options.family, values)
    if arch is None or options.method == "scratch":
        raise OptionError(f"{program.PROGRAM} does not train {options.label}")
    bits = {name: values[f"{name}_quantization"] or "none" for name in ("transformer", "text_encoder")}
    kept = (values["save_last_n_steps"] or 10**6) // (values["save_every_n_steps"] or 1000)
    sides = values["sample_size"] or (None, None)
    # Bounds are places in the list of times there, which are times where all are alike.
    even = values["timestep_sampling"] == "uniform"
    others = {
        "type": "diffusion_trainer",
        "device": "cuda:0",
        "trigger_word": values["instance_prompt"],
        "network.type": values["network_type"],
        "network.linear": values["network_dim"],
        "network.linear_alpha": values["network_alpha"],
        "network.lokr_full_rank": values["network_dim"] >= 4096 if values["network_type"] == "lokr" else None,
        "network.conv": values["conv_dim"],
        "network.conv_alpha": values["conv_alpha"],
        "save.max_step_saves_to_keep": kept,
        "datasets[].trigger_word": None,
        "datasets[].caption_ext": values["caption_extension"],
        "datasets[].resolution": _sides(values),
        "datasets[].control_path": values["control_data_dir"] or None,
        "datasets[].mask_path": values["conditioning_data_dir"],
        "datasets[].mask_min_value": values["masked_loss_outside_weight"] if values["conditioning_data_dir"] else None,
        "train.gradient_accumulation": values["gradient_accumulation_steps"],
        "train.lr": values["learning_rate"],
        "train.optimizer": values["optimizer_type"].lower(),
        "train.optimizer_params": {name: value for name, value in _arguments(values["optimizer_args"]).items() if name != "eps"} or None,
        **_ai_toolkits_rate(values),
        "train.timestep_type": {"sigmoid": "sigmoid", "uniform": "linear"}.get(str(values["timestep_sampling"])),
        "train.min_denoising_steps": 1000 - values["max_timestep"] if even and values["max_timestep"] < 1000 else None,
        "train.max_denoising_steps": 1000 - values["min_timestep"] if even and values["min_timestep"] else None,
        "train.loss_type": {"l2": "mse", "l1": "mae"}.get(str(values["loss_type"])),
        "train.noise_scheduler": program.SCHEDULERS["model_prediction_type" in values],
        "train.skip_first_sample": not values["sample_at_first"],
        "train.train_text_encoder": values["train_text_encoder"],
        "train.ema_config.use_ema": values["use_ema"],
        "train.ema_config.ema_decay": values["ema_decay"],
        "train.disable_sampling": None,
        "train.unet_lr": values["unet_lr"],
        "model.arch": arch,
        "model.assistant_lora_path": values["training_adapter"],
        "model.quantize": bits["transformer"] != "none",
        "model.qtype": _BITS.get(bits["transformer"]),
        "model.quantize_te": bits["text_encoder"] != "none",
        "model.qtype_te": _BITS.get(bits["text_encoder"]),
        "sample.width": sides[0],
        "sample.height": sides[1],
        "sample.guidance_scale": values["sample_guidance_scale"],
        "sample.prompts": None,
        "sample.samples": [_ai_toolkits_sample(options, spec) for spec in _previews(options)],
    }
    process = said(program.TABLE, values, others)
    if options.method != "network":
        process.pop("network", None)
    name = process.pop("config", {}).get("name") or values["output_name"]
    job = {"job": "extension", "config": {"name": name, "process": [process]}, "meta": {"version": "1.0"}}
    text = yaml.safe_dump(job, sort_keys=False, allow_unicode=True)
    return Exported(program.PROGRAM, f"{values['output_name']}.yaml", text, _unsaid(options, program.read("the job", yaml.safe_load(text))))


def _ai_toolkits_rate(values: Mapping[str, Any]) -> dict[str, object]:
    """A schedule with its numbers; a linear one rises there without them."""
    name = values["lr_scheduler"]
    floor, warm = values["lr_scheduler_min_lr_ratio"] * values["learning_rate"], values["lr_warmup_steps"]
    numbers: dict[str, dict[str, object]] = {
        "linear": {"start_factor": 1.0, "end_factor": 0.0},
        "cosine_with_min_lr": {"eta_min": floor},
        "constant_with_warmup": {"num_warmup_steps": warm if warm >= 1 else round(warm * (values["max_train_steps"] or 0))},
    }
    return {
        "train.lr_scheduler": "cosine" if name == "cosine_with_min_lr" else name,
        **{f"train.lr_scheduler_params.{key}": value for key, value in numbers.get(name, {}).items()},
    }


def _ai_toolkits_sample(options: RunOptions, spec: PromptSpec) -> dict[str, object]:
    guided = "g" in options.samples.own_flags
    images = {f"ctrl_img_{index}": image for index, image in enumerate(spec.controls, 1)}
    more = 0.0 if guided or spec.cfg_scale <= 1 else ai_toolkit.models.PREVIEW_GUIDANCE.get(options.family, 0.0)
    return {
        "prompt": spec.prompt,
        "width": spec.width,
        "height": spec.height,
        "seed": spec.seed,
        "guidance_scale": spec.guidance if guided else spec.cfg_scale - more,
        "sample_steps": spec.steps,
        **({"neg": spec.negative_prompt} if spec.negative_prompt else {}),
        **images,
    }


# --- OneTrainer -------------------------------------------------------------------------------------------------------


def to_onetrainer(options: RunOptions) -> Exported:
    """A configuration of OneTrainer (JSON). Raises OptionError for a kind of run that it does not have."""
    options = _of_one_version(options)
    values, program = _values(options), onetrainer
    model = program.name_of(options.family, values)
    if model is None or options.method == "scratch":
        raise OptionError(f"{program.PROGRAM} does not train {options.label}, or cannot tell it by the name of its base model")
    others = program.said_otherwise(model, type(options), values, _arguments(values["optimizer_args"]), program.layers_of(model))
    given = said(program.TABLE, values, others)
    guided = "g" in options.samples.own_flags
    given["samples"] = [program.sample(spec, guided) for spec in _previews(options)]
    text = json.dumps(given, indent=4, ensure_ascii=False) + "\n"
    return Exported(program.PROGRAM, f"{values['output_name']}.json", text, _unsaid(options, program.read("the file", json.loads(text))))


# --- musubi-tuner -----------------------------------------------------------------------------------------------------

_MUSUBIS = """vae text_encoder dataset_config network_dim network_dropout network_weights dim_from_weights scale_weight_norms
    base_weights base_weights_multiplier learning_rate optimizer_type optimizer_args max_grad_norm lr_scheduler lr_scheduler_num_cycles
    lr_scheduler_power lr_scheduler_timescale lr_scheduler_min_lr_ratio lr_warmup_steps lr_decay_steps max_train_steps max_train_epochs seed
    mixed_precision gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_cpu_offload blocks_to_swap compile
    compile_backend compile_mode compile_dynamic compile_fullgraph cuda_allow_tf32 cuda_cudnn_benchmark max_data_loader_n_workers
    timestep_sampling discrete_flow_shift sigmoid_scale mode_scale logit_mean logit_std weighting_scheme min_timestep max_timestep
    output_dir output_name save_every_n_steps save_every_n_epochs save_last_n_steps save_last_n_epochs save_precision save_state
    save_state_on_train_end sample_at_first sample_every_n_steps sample_every_n_epochs log_with log_tracker_name wandb_run_name
    training_comment metadata_title metadata_author metadata_description metadata_license metadata_tags huggingface_repo_id
    huggingface_repo_visibility huggingface_path_in_repo""".split()
"""Options that musubi-tuner has under the same name."""


def to_musubi(options: RunOptions) -> Exported:
    """The TOML of a run of musubi-tuner. Raises OptionError for a kind of run that it does not have."""
    name, options = musubi.name_of(options.family), _of_one_version(options)
    if name is None:
        raise OptionError(f"{musubi.PROGRAM} does not train {options.label}")
    if options.method != "network":
        raise OptionError(f"a file of {musubi.PROGRAM} says its model by the module of a LoRA, which {options.label} has not")
    values = _values(options)
    asleep = flat.asleep(type(options), flat.flatten(options))
    given: dict[str, object] = {"dit": values["pretrained_model_name_or_path"]}
    if values["model_version"] not in (None, "auto"):
        given["model_version"] = {"image": "original"}.get(values["model_version"], values["model_version"])
    if values["network_type"] != "lora":
        raise OptionError(
            f"a file of {musubi.PROGRAM} for {options.label} says its model by the module of a LoRA; set network_type to lora"
        )
    module = next((module for module, model in musubi.MODULES.items() if model == name), f"networks.lora_{name}")
    given |= {"network_module": module, "network_alpha": values["network_alpha"]}
    given |= {theirs: values[one] for theirs, ours in musubi.FILES.items() for one in ours if values[one] is not None}
    given |= {one: values[one] for one in _MUSUBIS if values[one] not in (None, (), "", "auto", "none") and one not in asleep}
    bits = values["transformer_quantization"]
    given |= {"fp8_base": True} if bits in ("fp8", "qfloat8") else {}
    given |= {"fp8_scaled": True} if bits == "qfloat8" else {}
    given |= {musubi.FP8_OF_TEXTS[name]: True} if values["text_encoder_quantization"] == "qfloat8" else {}
    beside: dict[str, str] = {}
    if values["dataset_config"] is None:
        given["dataset_config"] = f"{values['output_name']}-data.toml"
        beside = {f"{values['output_name']}-data.toml": _toml(musubi.data_set(values))}
    prompts = _prompts_beside(values)
    given |= {"sample_prompts": next(iter(prompts))} if prompts else {}
    text = _toml(given)

    def again() -> Imported:
        found = _with_prompts(musubi.read("the run", tomllib.loads(text)), prompts)
        for made in beside.values():
            found.values.pop("dataset_config")
            found.values.update(musubi.of_data_set(tomllib.loads(made)))
        return found

    return Exported(musubi.PROGRAM, f"{values['output_name']}.toml", text, _unsaid(options, again()), {**beside, **prompts})


def _toml(given: Mapping[str, object]) -> str:
    return str(toml.dumps({key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}))


PROGRAMS: Mapping[str, Callable[[RunOptions], Exported]] = {
    "sd-scripts": to_kohya,
    "ai-toolkit": to_ai_toolkit,
    musubi.PROGRAM: to_musubi,
    onetrainer.PROGRAM: to_onetrainer,
}
"""What settings can be exported to."""
