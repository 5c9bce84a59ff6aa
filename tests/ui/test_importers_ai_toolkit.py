"""Jobs of ai-toolkit as our options: what means something else is converted, what nobody knows is unknown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sd_scripts.families import FACTS, RUNS
from sd_scripts.library.objectives.distances import pseudo_huber
from sd_scripts.programs import ai_toolkit, table
from sd_scripts.runs.schedules import factor_at
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import builds, job, said


def test_a_job_of_ai_toolkit_becomes_the_same_run() -> None:
    found = job()
    options = builds(found)
    assert found.run is RUNS["zimage", "network"]
    wanted = {
        "pretrained_model_name_or_path": "some/model",
        "output_dir": "out",
        "output_name": "mine",
        "instance_prompt": "zwx",
        "network_dim": 32,
        "network_alpha": 16.0,
        "exclude_modules": (r"proj_out", "refiner"),
        "save_precision": "bf16",
        "save_every_n_steps": 200,
        "save_last_n_steps": 600,
        "train_data_dir": "a",
        "dataset_repeats": 2,
        "resolution": (768, 768),
        "additional_resolutions": (512,),
        "flip_aug": True,
        "train_batch_size": 2,
        "max_train_steps": 900,
        "gradient_accumulation_steps": 4,
        "learning_rate": 2e-4,
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("weight_decay=0.0001", "betas=(0.9,0.99)", "eps=1e-06"),
        "timestep_sampling": "uniform",
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "gradient_checkpointing": True,
        "mixed_precision": "bf16",
        "use_ema": True,
        "ema_decay": 0.99,
        "sample_at_first": False,
        "transformer_quantization": "qfloat8",
        "training_adapter": "undo.safetensors",
        "sample_size": (768, 512),
        "sample_steps": 9,
        "sample_cfg_scale": 5.0,
        "sample_prompts": "a zwx dog --d 7\na cat --w 640 --d 5",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert not [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    assert any("trigger_word" in text for text in found.conflicts)
    assert job(name="job.json").values == found.values


def test_what_a_job_leaves_out_is_what_that_program_takes() -> None:
    def less(process: dict[str, Any]) -> None:
        process["train"] = {"steps": 10}
        process["network"] = {"type": "lora"}
        process["datasets"] = [{"folder_path": "a"}]

    options = builds(job(less))
    wanted = {"network_dim": 4, "network_alpha": 1.0, "learning_rate": 1e-6, "resolution": (512, 512), "timestep_sampling": "sigmoid"}
    assert {name: options[name] for name in wanted} == wanted and options["mixed_precision"] == "no"


def test_several_folders_become_one_dataset_config_that_the_data_set_reads(tmp_path: Any) -> None:
    from PIL import Image

    from sd_scripts.dataset.config import subsets_of

    for name in ("a", "b", "reg"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (64, 64)).save(tmp_path / name / "x.png")

    def more(process: dict[str, Any]) -> None:
        process["datasets"] = [
            {"folder_path": str(tmp_path / "a"), "num_repeats": 3, "resolution": 512, "caption_ext": "cap", "caption_dropout_rate": 0.1},
            {"folder_path": str(tmp_path / "b"), "resolution": [256, 512], "shuffle_tokens": True},
            {"folder_path": str(tmp_path / "reg"), "is_reg": True},
        ]

    found = job(more)
    options = flat.build(found.run, found.values)
    subsets = subsets_of(options.dataset, tmp_path).items
    assert [subset.folder.name for subset in subsets] == ["a", "b", "reg"]
    assert [subset.is_reg for subset in subsets] == [False, False, True] and subsets[0].repeats == 3
    assert (subsets[0].options.caption_extension, subsets[0].options.caption_dropout_rate) == (".cap", 0.1)
    assert subsets[1].options.additional_resolutions == (256,) and subsets[1].options.shuffle_caption
    assert "dataset_config" in said(found, "datasets[1].folder_path")[1]


def test_what_decides_the_result_of_a_job_and_is_not_here_stands_above_the_form() -> None:
    changes: list[tuple[str, str, Any]] = [
        ("train", "timestep_type", "weighted"),
        ("train", "content_or_style", "style"),
        ("train", "optimizer", "automagic"),
        ("train", "diff_output_preservation", True),
        ("train", "do_differential_guidance", True),
        ("model", "qtype", "uint3|some/file.safetensors"),
        ("model", "layer_offloading", True),
        ("network", "type", "lorm"),
    ]
    for section, key, value in changes:
        found = job(lambda process: process[section].update({key: value}))  # noqa: B023
        builds(found)
        assert said(found, f"{section}.{key}")[0] == "not supported", key
        assert any(text.startswith(f"{section}.{key} = ") for text in found.conflicts), key


def test_settings_of_what_a_job_does_not_use_and_what_that_program_has_given_up_are_known() -> None:
    lorm = {"extract_mode": "ratio", "extract_mode_param": 0.25, "module_settings": [{"contains": "attn", "extract_mode": "fixed"}]}
    found = job(lambda process: process["network"].update({"lorm": lorm}))
    rows = [row for row in found.rows if row.key.startswith("network.lorm")]
    assert len(rows) == 4 and {row.verdict for row in rows} == {"not needed"} and builds(found) == builds(job())
    for nothing in (None, {}):
        assert said(job(lambda process: process["network"].update({"lorm": nothing})), "network.lorm")[0] == "not needed"  # noqa: B023
    cropped = job(lambda process: process["datasets"][0].update({"poi": "person"}))
    verdict, text = said(cropped, "datasets[0].poi")
    assert verdict == "not supported" and f"datasets[0].poi = person: {text}" in cropped.conflicts
    assert said(job(lambda process: process["datasets"][0].update({"poi": None})), "datasets[0].poi")[0] == "not needed"


def test_shifted_times_of_a_job_are_those_of_its_sampler() -> None:
    """The line through 0.5 at 256 tokens and 1.15 at 4096, at 1024 x 1024 pixels, is the family's own factor."""
    found = job(
        lambda process: (
            process["model"].update(arch="flux"),
            process["train"].update(timestep_type="flux_shift"),
            process["datasets"][0].update(resolution=1024),
        )
    )
    options = builds(found)
    assert found.run is RUNS["flux", "network"] and options["timestep_sampling"] == "sigma"
    assert options["discrete_flow_shift"] == pytest.approx(3.1582, abs=1e-3)


def test_sides_that_the_model_does_not_take_are_rounded_and_said() -> None:
    found = job(lambda process: process["datasets"][0].update(resolution=[650, 330]))
    options = builds(found)
    assert (options["resolution"], options["additional_resolutions"]) == ((640, 640), (320,))
    assert "multiples of 16" in said(found, "datasets[0].resolution")[1]


def test_models_of_ai_toolkit_that_are_not_trained_are_refused_by_their_names() -> None:
    for name, model in ai_toolkit.models.MODELS.items():
        change = lambda process: process["model"].update(arch=name)  # noqa: B023, E731
        if model.family in FACTS:
            builds(job(change))
        else:
            with pytest.raises(OptionError, match="which this version does not train"):
                job(change)
    with pytest.raises(OptionError, match="for tomorrows, which this version does not know"):
        job(lambda process: process["model"].update(arch="tomorrows"))


def test_flags_in_the_prompts_of_a_job_are_previews_here() -> None:
    """That program cuts a prompt wherever two dashes stand; what it reads there wins over the sample's own keys."""

    def edits(process: dict[str, Any]) -> None:
        process["model"] = {"arch": "flux_kontext", "name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"}
        process["sample"] = {"prompts": ["make it smile  --ctrl_img refs/a b.jpg --w 512 --steps 9 --m 0.5", "a--d 7"], "seed": 1}

    found = job(edits)
    text = builds(found)["sample_prompts"]
    assert text.splitlines() == ["make it smile --w 512 --d 1 --s 9 --ci refs/a b.jpg", "a --d 7"]
    assert "without --m" in said(found, "sample.prompts")[1]
    assert table.line_of_prompt("a --w dog\n-- cat", n="b --h 3") == "a - w dog -- cat --n b - h 3"


def trained(**train: Any) -> Any:
    return job(lambda process: process["train"].update(train))


def sdxl(**train: Any) -> Any:
    return job(
        lambda process: (process["model"].update(arch="sdxl", is_v_pred=True), process["train"].update(noise_scheduler="ddpm", **train))
    )


def test_a_linear_rate_of_ai_toolkit_rises_unless_it_is_told_to_fall() -> None:
    """Its factor is start + (end - start) n / N, from a third to 1 where the file says nothing."""
    falling = trained(lr_scheduler="linear", lr_scheduler_params={"start_factor": 1.0, "end_factor": 0.0})
    options: Any = flat.build(falling.run, falling.values)
    assert [factor_at(options.optimizer, 200)(step) for step in range(200)] == pytest.approx([1 - step / 200 for step in range(200)])
    rising = trained(lr_scheduler="linear")
    assert builds(rising)["lr_scheduler"] == "constant" and any("from 0.33 of lr to 1 of it" in text for text in rising.conflicts)
    assert not any("lr_scheduler" in text for text in falling.conflicts)
    assert builds(trained(lr_scheduler="constant_with_warmup"))["lr_warmup_steps"] == 1000
    assert builds(trained(lr_scheduler="constant_with_warmup", lr_scheduler_params={"num_warmup_steps": 30}))["lr_warmup_steps"] == 30


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("adamw", {"eps=1e-06"}),
        ("adamw8bit", {"eps=1e-06"}),
        ("adam8bit", {"eps=1e-06", "weight_decay=0.0"}),
        ("prodigy", {"eps=1e-06"}),
        ("lion", set()),
        ("adafactor", set()),
    ],
)
def test_optimizers_of_ai_toolkit_have_what_it_gives_them(name: str, wanted: set[str]) -> None:
    assert set(builds(trained(optimizer=name, optimizer_params={}))["optimizer_args"]) == wanted
    given = set(builds(trained(optimizer=name, optimizer_params={"weight_decay": 0.03}))["optimizer_args"])
    assert given == {"weight_decay=0.03", *wanted - {"weight_decay=0.0"}}


def test_losses_of_ai_toolkit_are_the_same_up_to_a_factor() -> None:
    options: Any = flat.build((found := trained(loss_type="pseudo_huber")).run, found.values)
    distances = torch.linspace(-3, 3, 301, dtype=torch.float64).view(1, 1, 1, -1)
    theirs = (distances**2 + 0.01**2).sqrt() - 0.01
    ours = pseudo_huber(lambda t: t * 0 + options.objective.huber_c, scale_by_c=False)(distances, torch.zeros(1))
    assert options.objective.loss_type == "smooth_l1" and options.objective.huber_schedule == "constant"
    assert torch.allclose(ours, 2 * theirs, atol=1e-9)
    weighted = sdxl(min_snr_gamma=5.0)
    assert builds(weighted)["prediction_type"] == "v_prediction" and any("SNR + 1" in text for text in weighted.conflicts)
    masked = builds(job(lambda process: process["datasets"][0].update(mask_path="m", mask_min_value=0.1)))
    assert masked["normalize_masked_loss"] and masked["masked_loss_outside_weight"] == 0.1


def test_tokens_that_ai_toolkit_keeps_are_shuffled_there() -> None:
    def found(**data: Any) -> Any:
        return job(lambda process: process["datasets"][0].update(keep_tokens=2, **data))

    assert builds(found(shuffle_tokens=True))["keep_tokens"] == 0
    both = found(shuffle_tokens=True, token_dropout_rate=0.1)
    assert builds(both)["keep_tokens"] == 2 and any("keep_tokens" in text for text in both.conflicts)
    dropped = found(token_dropout_rate=0.1)
    assert builds(dropped)["keep_tokens"] == 2 and not any("keep_tokens" in text for text in dropped.conflicts)
