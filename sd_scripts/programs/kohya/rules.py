"""What the settings of kohya_ss and sd-scripts become, key by key: page, model, data, length, previews, saving. Recipe (optimizer, noise,
times) and network (adapters, rates) have modules of their own. A key without a rule goes through `sheet.plain`.

Facts about the other program are those of kohya_ss v26 and sd-scripts v0.10, read in their code.
"""

from __future__ import annotations

import math

from sd_scripts.families import FACTS
from sd_scripts.schema import kohya_words as words
from sd_scripts.schema import prompts
from sd_scripts.schema.samples import SAMPLERS, SampleOptions, samplers_of
from sd_scripts.schema.sheet import is_empty, is_off, number, parts, shown, unless_empty, unless_off

from .sheet import KOHYA, NAMES, OPTIONS, KohyaSheet, Table, named, rules

RULES: Table = {}
rule = rules(RULES)


# --- the page itself ------------------------------------------------------------------------------------------------

_BOXES = tuple(box for facts in KOHYA.values() for box in facts.boxes)
_OF_THE_PAGE = """file_path save_as_bool model_list create_caption create_buckets
    generate_caption_database generate_image_buckets use_latent_files full_path caption_metadata_filename latent_metadata_filename train_dir
    batch_size num_cpu_threads_per_process downcast_bf16""".split()


@rule(*_OF_THE_PAGE, *_BOXES)
def _state_of_the_page(sheet: KohyaSheet, key: str) -> None:
    if key in _BOXES:
        sheet.skip(key, f"the kind of run says which family is trained: {sheet.run.label}")
    elif key == "model_list":
        sheet.skip(key, "it only fills in the path of the base model")
    elif key == "num_cpu_threads_per_process":
        sheet.skip(key, "it is set when a run is started: all cores but one")
    elif key == "downcast_bf16":
        sheet.skip(key, "it is for TPUs")
    elif key == "batch_size":
        sheet.skip(key, "it is for preparing latents; vae_batch_size is for caching them here")
    elif key == "train_dir":
        sheet.skip(key, "caches and lists of the images are kept in output_dir")
    elif key.endswith(("_path", "_bool")):
        sheet.skip(key, "it belongs to kohya_ss's page, not to the training")
    else:
        sheet.skip(key, "captions are read beside the images and latents are cached by themselves; in_json takes a metadata file")


# --- the start -------------------------------------------------------------------------------------------------------


def _num_processes(sheet: KohyaSheet) -> int:
    """Processes on all machines, as accelerate launch was told."""
    return max(1, int(sheet.number("num_processes") or 1))


def _has_several(sheet: KohyaSheet) -> bool:
    return _num_processes(sheet) > 1 or (sheet.number("num_machines") or 1) > 1


@rule("num_processes")
def _processes(sheet: KohyaSheet, key: str) -> None:
    machines = max(1, int(sheet.number("num_machines") or 1))
    if _num_processes(sheet) == 1:
        sheet.skip(key, "one is what a run has")
        return
    sheet.put("multi_gpu", True, key)
    here = _num_processes(sheet) // machines
    if len(parts(sheet.value("gpu_ids") or "")) == here:
        sheet.write(key, "renamed", "multi_gpu = on, with a process for each of gpu_ids")
    else:
        sheet.take(
            key, "num_gpus", here, "with multi_gpu on" + (f"; a part of {_num_processes(sheet)} on each machine" if machines > 1 else "")
        )


@rule("multi_gpu")
def _multi_gpu(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "num_processes says it" if _has_several(sheet) else "it is off")
    elif not _has_several(sheet):
        sheet.skip(key, "num_processes is 1, so one process trained")
    else:
        sheet.take(key, key, True)


@rule("gpu_ids")
def _gpus(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)) and str(sheet.value(key)).strip() != "0":
        sheet.skip(key, "it is empty")
    elif str(sheet.value(key)).strip() == "all":
        sheet.skip(key, "all is what an empty list means")
    elif not _has_several(sheet) and len(parts(sheet.value(key))) > 1:
        sheet.take(key, key, parts(sheet.value(key))[:1], "num_processes is 1, so one process trained on the first of them")
    else:
        sheet.take(key, key, parts(sheet.value(key)))


@rule("num_machines", "machine_rank")
def _machines(sheet: KohyaSheet, key: str) -> None:
    if (sheet.number("num_machines") or 1) <= 1:
        sheet.skip(key, "one machine is what a run has")
    else:
        sheet.put("multi_gpu", True, key)
        sheet.take(key, key, sheet.value(key))


@rule("main_process_port", "main_process_ip")
def _meeting_place(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is empty or 0")
    elif not _has_several(sheet) or (key == "main_process_ip" and (sheet.number("num_machines") or 1) <= 1):
        sheet.skip(key, "processes of one machine find each other by themselves" if _has_several(sheet) else "one process meets nobody")
    else:
        sheet.take(key, key, sheet.value(key))


@rule(*(f"{other}_checkbox" for facts in KOHYA.values() for other in facts.like), "model_type")
def _other_family(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)) or sheet.value(key) in [facts.model_type for facts in KOHYA.values()]:
        sheet.skip(key, "it is off")
    else:
        name = sheet.value("model_type") if key == "model_type" else key.removesuffix("_checkbox")
        sheet.refuse(
            key, f"{name} is not trained by this version; the rest of the recipe was put on {sheet.run.label}, so choose a base model"
        )


# --- base model -----------------------------------------------------------------------------------------------------


@rule("pretrained_model_name_or_path")
@unless_empty
def _base(sheet: KohyaSheet, key: str) -> None:
    if sheet.other_family:
        sheet.refuse(key, f"it is a model of another family; choose one for {sheet.run.label}")
    else:
        sheet.take(key, key, sheet.value(key))


@rule("v_parameterization")
def _prediction(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is off, and prediction_type = auto reads it from the model")
    elif "prediction_type" not in sheet.known:
        sheet.lose(key, f"{FACTS[sheet.run.family].label} predicts a velocity; remove it")
    else:
        sheet.take(key, "prediction_type", words.SWITCHES[key]["prediction_type"])


@rule(*named("no_half_vae"))
def _vae_precision(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "the VAE works in full precision here (vae_dtype = float)")


@rule(*OPTIONS)
def _under_another_name(sheet: KohyaSheet, key: str) -> None:
    """What the scripts of one family call otherwise. Of several names for one option the first decides."""
    option = OPTIONS[key]
    names = sheet.kohya.options.get(option, ()) if sheet.kohya is not None else ()
    first = next((name for name in names if not is_off(sheet.value(name))), key)
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is empty")
    elif key not in names:
        sheet.skip(key, f"it is for {' and '.join(FACTS[family].label for family, facts in KOHYA.items() if option in facts.options)}")
    elif key == first:
        sheet.take(key, option, sheet.value(key))
    elif sheet.number(key) == sheet.number(first):
        sheet.skip(key, f"{first} says it")
    else:
        sheet.lose(key, f"captions have one length here, max_token_length, which is that of {first}")


@rule(*words.BESIDE)
def _of_networks_beside(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "it is empty or off" if is_off(sheet.value(key)) else sheet.advice(key, sheet.value(key)))


@rule("clip_skip")
def _clip_skip(sheet: KohyaSheet, key: str) -> None:
    if (sheet.number(key) or 0) <= 1:
        sheet.skip(key, "1 and 0 are the model's own way")
    elif "clip_skip" in sheet.known:
        sheet.take(key, key, sheet.value(key))
    elif sheet.kohya is not None and not sheet.other_family:
        sheet.skip(key, f"kohya's scripts for {FACTS[sheet.run.family].label} take no notice of it either")
    else:
        sheet.lose(key, sheet.advice(key, sheet.value(key)))


@rule("max_token_length")
def _caption_length(sheet: KohyaSheet, key: str) -> None:
    """CLIP's, which other text encoders of kohya's have an option of their own for."""
    own = sheet.kohya.options.get(key, ()) if sheet.kohya is not None else ()
    if not is_empty(sheet.value(key)) and own:
        sheet.skip(key, f"it is for CLIP; {own[0]} says it for {FACTS[sheet.run.family].label}")
    elif key in sheet.known and (longest := max(sheet.known[key].choices, default=0)) and (sheet.number(key) or 0) > longest:
        sheet.take(key, key, longest, "the most tokens of CLIP's captions that are read")
    elif is_empty(sheet.value(key)) or key in sheet.known:
        sheet.plain(key)
    else:
        sheet.skip(key, sheet.advice(key, sheet.value(key)))


@rule(*named("clip_l", "t5xxl"), "sd3_clip_l", "sd3_t5xxl")
@unless_empty
def _text_encoder_files(sheet: KohyaSheet, key: str) -> None:
    option = NAMES.get(key, key).removeprefix("sd3_")
    if option not in sheet.known or sheet.other_family:
        sheet.skip(key, f"text encoders come with the base model; files of their own are for {sheet.families_with(option)}")
    elif key.startswith("sd3_"):
        sheet.skip(key, f"it is the path for Stable Diffusion 3; {FACTS[sheet.run.family].label} has one of its own")
    else:
        sheet.take(key, option, sheet.value(key))


# --- data -----------------------------------------------------------------------------------------------------------


@rule("train_data_dir", "image_folder", "reg_data_dir", "in_json")
@unless_empty
def _folders(sheet: KohyaSheet, key: str) -> None:
    option = "train_data_dir" if key == "image_folder" else key
    if not is_empty(sheet.value("dataset_config")):
        sheet.skip(key, "dataset_config replaces it")
    else:
        sheet.take(key, option, sheet.value(key))


@rule("max_resolution")
@unless_empty
def _resolution(sheet: KohyaSheet, key: str) -> None:
    sheet.take(key, "resolution", sheet.value(key))


@rule("bucket_reso_steps")
def _bucket_steps(sheet: KohyaSheet, key: str) -> None:
    if 0 < (sheet.number(key) or 0) < 8:
        sheet.take(key, key, 8, "the sides of an image that a VAE encodes are multiples of 8")
    else:
        sheet.plain(key)


@rule("min_bucket_reso", "max_bucket_reso")
def _bucket_limits(sheet: KohyaSheet, key: str) -> None:
    if sheet.on("bucket_no_upscale") and not is_empty(sheet.value(key)):
        sheet.skip(key, "sd-scripts takes no notice of it with bucket_no_upscale, and here it would hold")
    else:
        sheet.plain(key)


@rule("color_aug")
def _colours(sheet: KohyaSheet, key: str) -> None:
    sheet.plain(key)
    if sheet.on(key):
        sheet.put("cache_latents", False, key)


@rule("cache_latents")
def _latents(sheet: KohyaSheet, key: str) -> None:
    if sheet.on("color_aug"):
        sheet.skip(key, "color_aug needs it off")
    else:
        sheet.plain(key)


@rule(*named("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk", "cache_latents_to_disk"))
def _caches(sheet: KohyaSheet, key: str) -> None:
    option = NAMES.get(key, key)
    if is_off(sheet.value(key)):
        sheet.skip(key, f"off costs time and changes nothing; {option} is on here unless something forbids it")
    elif "text_encoder" in option and sheet.trains_text and "train_text_encoder" in sheet.known:
        sheet.skip(key, "the text encoders are trained, so their outputs cannot be cached")
    elif sheet.is_of_others(key):
        sheet.skip(key, "it is the switch of another family")
    else:
        sheet.take(key, option, sheet.value(key))


# --- length ---------------------------------------------------------------------------------------------------------


@rule("max_train_epochs", "max_train_steps", "epoch")
def _length(sheet: KohyaSheet, key: str) -> None:
    by_epochs, by_steps = (sheet.number("max_train_epochs") or 0) > 0, (sheet.number("max_train_steps") or 0) > 0
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is 0 or empty, so it does not say how long the run is")
    elif key == "max_train_epochs":
        sheet.take(key, key, sheet.value(key))
    elif by_epochs:
        sheet.skip(key, "max_train_epochs decides how long the run is")
    elif key == "max_train_steps":
        sheet.take(key, key, sheet.value(key))
    elif by_steps:
        sheet.skip(key, "max_train_steps decides how long the run is")
    else:
        sheet.take(key, "max_train_epochs", sheet.value(key))


@rule("seed")
def _seed(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "kohya_ss draws a new seed for each run then; here every run has one, so that it can be repeated")
    else:
        sheet.plain(key)


@rule("mixed_precision")
def _precision(sheet: KohyaSheet, key: str) -> None:
    if sheet.value(key) == "fp8":
        sheet.refuse(key, "sd-scripts has no such precision either; mixed_precision stays auto")
    else:
        sheet.plain(key)


@rule("prior_loss_weight", "guidance_scale")
def _zeros(sheet: KohyaSheet, key: str) -> None:
    lost = sheet.page and number(sheet.value(key)) == 0
    if lost and key in sheet.known:
        sheet.take(key, key, sheet.value(key), "kohya_ss lost zeros on the way to its trainer, here 0 means 0")
    elif key not in sheet.known:
        sheet.skip(key, f"it is for {sheet.families_with(key)}")
    else:
        sheet.plain(key)


@rule("no_metadata")
@unless_off
def _metadata(sheet: KohyaSheet, key: str) -> None:
    sheet.take(key, "metadata", words.SWITCHES[key]["metadata"])


# --- previews -------------------------------------------------------------------------------------------------------


def _sampler_name(name: str) -> str:
    """Our name of one of kohya's samplers; a name of its own stays, so that the schema explains it."""
    short = name.strip().removeprefix("k_")
    return words.SAMPLERS.get(short, short)


def _samples_of(sheet: KohyaSheet) -> type[SampleOptions]:
    samples = sheet.run.model_fields["samples"].annotation
    assert isinstance(samples, type) and issubclass(samples, SampleOptions)
    return samples


def _draws(samples: type[SampleOptions], sampler: str) -> bool:
    """Whether a family is drawn with a sampler; a name that is none at all stays, so that the schema explains it."""
    return sampler not in SAMPLERS or sampler in samplers_of(samples)


@rule("sample_prompts")
def _prompts(sheet: KohyaSheet, key: str) -> None:
    text = str(sheet.value(key) or "")
    if is_empty(text):
        sheet.skip(key, "it is empty")
    else:
        write_prompts(sheet, key, text)


def write_prompts(sheet: KohyaSheet, key: str, text: str) -> None:
    """Prompts, one a line, without the flags that the model does not have; or the path of a file of them."""
    samples = _samples_of(sheet)
    known = set(prompts.flags_of(samples))
    kept, dropped = [], []
    for line in text.splitlines():
        prompt, *flags = line.split(" --")
        split = [flag.strip().partition(" ") for flag in flags]
        dropped += [f"--{name}" for name, _, _ in split if name not in known]
        good = [(name, _sampler_name(value) if name == "ss" else value.strip()) for name, _, value in split if name in known]
        dropped += [f"--ss {value}" for name, value in good if name == "ss" and not _draws(samples, value)]
        good = [(name, value) for name, value in good if name != "ss" or _draws(samples, value)]
        kept.append(" --".join([prompt.rstrip(), *(f"{name} {value}" for name, value in good)]))
    note = f"without {', '.join(sorted(set(dropped)))}, which this model does not have" if dropped else ""
    sheet.take(key, "sample_prompts", "\n".join(kept) if any(" --" in line for line in text.splitlines()) else text, note)


@rule("sample_sampler")
def _sampler(sheet: KohyaSheet, key: str) -> None:
    name = str(sheet.value(key) or "")
    if is_empty(name):
        sheet.skip(key, "it is empty")
    elif key not in sheet.known or not _draws(_samples_of(sheet), _sampler_name(name)):
        sheet.skip(key, "previews are made with the family's own sampler")
    else:
        sheet.take(key, key, _sampler_name(name))


# --- saving ---------------------------------------------------------------------------------------------------------


@rule("save_model_as")
def _file_kind(sheet: KohyaSheet, key: str) -> None:
    text = str(sheet.value(key) or "")
    if sheet.run.method == "network":
        if text == "ckpt":
            sheet.refuse(key, "ckpt files can run code when they are read; a .safetensors file with kohya's names is written")
        else:
            sheet.take(key, key, "kohya", "a .safetensors file with kohya's names")
    elif text.startswith("diffusers"):
        sheet.take(key, key, "diffusers")
    elif text == "ckpt":
        sheet.refuse(key, "ckpt files can run code when they are read; a .safetensors file is written")
    else:
        sheet.plain(key)


@rule("save_precision")
@unless_empty
def _file_precision(sheet: KohyaSheet, key: str) -> None:
    value = sheet.value(key)
    sheet.take(key, key, words.FILE_PRECISIONS.get(str(value), value))


@rule("save_state", "save_state_on_train_end")
def _states(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, f"off is the default there; {key} stays on here, so that a stopped run can go on")
    else:
        sheet.plain(key)


@rule("save_last_n_epochs_state", "save_last_n_steps_state")
def _number_of_states(sheet: KohyaSheet, key: str) -> None:
    kept, every = sheet.number(key) or 0, sheet.number(key.replace("save_last", "save_every").removesuffix("_state")) or 1
    if kept <= 0:
        sheet.skip(key, "it is off")
    else:
        sheet.take(key, "save_last_n_states", max(1, math.ceil(kept / max(every, 1))), "states are counted here, not epochs or steps")


@rule(*words.INTERVALS)
def _intervals(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "0 is never, which is the default")
    else:
        sheet.plain(key)


@rule("resume")
@unless_empty
def _resume(sheet: KohyaSheet, key: str) -> None:
    sheet.lose(key, "training states of other programs cannot be continued; give the last saved adapter as network_weights")


@rule("log_with")
def _trackers(sheet: KohyaSheet, key: str) -> None:
    if is_empty(sheet.value(key)):
        sheet.skip(key, "it is off")
    else:
        sheet.plain(key)


@rule("use_wandb")
def _wandb(sheet: KohyaSheet, key: str) -> None:
    if sheet.on(key) and is_empty(sheet.value("log_with")):
        sheet.take(key, "log_with", "wandb")
    else:
        sheet.skip(key, "log_with says it")


@rule("wandb_run_name", "log_tracker_name")
@unless_empty
def _tracker_names(sheet: KohyaSheet, key: str) -> None:
    tracker = "wandb" if sheet.on("use_wandb") else str(sheet.value("log_with") or "")
    if tracker in ("wandb", "all") or (tracker == "tensorboard" and key == "log_tracker_name"):
        sheet.plain(key)
    else:
        sheet.skip(key, "log_with names no tracker that would use it")


@rule("wandb_api_key", "wandb_key", "huggingface_token")
def _secrets(sheet: KohyaSheet, key: str) -> None:
    variable = "HF_TOKEN" if key.startswith("hugging") else "WANDB_API_KEY"
    why = f"secrets are read from the environment ({variable}) and never written; this one was not kept"
    sheet.skip(key, "it is empty" if is_empty(sheet.value(key)) else why)


@rule("huggingface_repo_visibility", "huggingface_path_in_repo", "huggingface_repo_type", "async_upload")
def _hub(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)) or is_empty(sheet.value("huggingface_repo_id")):
        sheet.skip(key, "nothing is uploaded without huggingface_repo_id" if not is_off(sheet.value(key)) else "it is empty or off")
    elif key == "huggingface_repo_type" and sheet.value(key) != "model":
        sheet.refuse(key, f"uploads go to a model repository, not to a {shown(sheet.value(key))}")
    else:
        sheet.plain(key)


@rule(
    "highvram",
    "lowvram",
    "lowram",
    "logging_dir",
    "xformers",
    "sdpa",
    "mem_eff_attn",
    *(version.switch for facts in KOHYA.values() for version in facts.versions),
)
def _never_needed(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, sheet.advice(key, sheet.value(key)))
