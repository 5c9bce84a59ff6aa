"""What the page says Start would do, against run folders on disk and against what the training process decides for the same ones."""

from __future__ import annotations

import base64
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import sd_scripts.toy
from kohya_like import app, desk, form, resuming
from kohya_like.supervisor import JobSupervisor
from kohya_like.tabs import train
from sd_scripts.families import RUNS
from sd_scripts.runs import drawing, resume
from sd_scripts.runs.events import RunFinished, RunStarted, RunStopped
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions
from tests.made_here import lora_of
from tests.ui.runs_on_disk import BASE, made, options, settings


def idle(_run: Path) -> str:
    return ""


def trainer(of: RunOptions, run_dir: Path | None = None) -> resume.Start:
    """What the training process decides."""
    return resume.choose(resume.Wanted(of.output, of.distributed.resume, run_dir, settings(of), "d", of.training.max_train_steps))


def test_without_a_run_of_this_name_a_new_one_starts(tmp_path: Path) -> None:
    found = resuming.outlook(options(tmp_path), idle)
    assert (found.kind, found.run, found.state) == ("new", None, None)
    assert trainer(options(tmp_path)).run is None


def test_a_run_with_the_same_settings_goes_on_from_its_newest_state(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (200, 400))
    desk.say(run.path, {"label": {"before": "", "after": "Best cat"}})
    again = options(tmp_path, sample_prompts="a cat", save_every_n_steps=50)
    found = resuming.outlook(again, idle)
    assert found.text == "Continues Best cat from step 400 of 1600, saved 12 minutes ago."
    assert (found.kind, found.run, found.state) == ("continue", run.path, run.state / "000400")
    same = trainer(again)
    assert same.run is not None and (same.run.path, same.state) == (found.run, found.state)


def test_other_settings_are_named_and_start_a_new_run(tmp_path: Path) -> None:
    made(tmp_path, options(tmp_path), (400,))
    other = options(tmp_path, learning_rate=0.0003)
    found = resuming.outlook(other, idle)
    assert found.kind == "new" and trainer(other).run is None
    assert found.notes == ("The earlier run cat has other settings: learning_rate: 0.0001, now 0.0003.",)


def test_other_images_are_another_run(tmp_path: Path) -> None:
    made(tmp_path, options(tmp_path), (400,))
    found = resuming.outlook(options(tmp_path, train_data_dir="toy:teal"), idle)
    assert found.kind == "new" and "train_data_dir: 'toy:star', now 'toy:teal'" in found.notes[0]


def test_latest_goes_on_with_the_newest_state_and_refuses_everything_else(tmp_path: Path) -> None:
    latest = options(tmp_path, resume="latest")
    assert outcome(latest) == ("refused", None)
    run = made(tmp_path, options(tmp_path), (200, 400))
    made(tmp_path, options(tmp_path), ())
    assert outcome(latest) == ("continue", run.state / "000400")
    with pytest.raises(OptionError, match="latest needs a saved state, and there is none of"):
        trainer(latest, RunDirectory(tmp_path / "elsewhere").path)
    made(tmp_path, options(tmp_path, seed=5), (300,))
    assert outcome(latest) == ("refused", None)


def outcome(of: RunOptions) -> tuple[str, Path | None]:
    """What the page says and the training process does; they agree."""
    found = resuming.outlook(of, idle)
    if found.kind == "refused":
        with pytest.raises(OptionError, match=r"latest needs a saved state|was trained with other settings"):
            trainer(of)
    else:
        assert trainer(of).state == found.state
    return found.kind, found.state


@pytest.mark.parametrize("step", [200, 273, 1600])
def test_a_step_finds_the_state_of_a_save_of_a_stop_and_of_the_end(step: int, tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (200, 273, 1600))
    for kind, at in ((RunStopped, 273), (RunFinished, 1600)):
        run.log(kind(step=at))
    assert trainer(options(tmp_path, resume=str(step))).state == run.state / f"{step:06d}"


def test_an_older_run_with_the_same_settings_is_found_behind_a_newer_one_with_others(tmp_path: Path) -> None:
    wanted = made(tmp_path, options(tmp_path), (100,))
    made(tmp_path, options(tmp_path, seed=5), (300,))
    found = resuming.outlook(options(tmp_path), idle)
    assert (found.run, trainer(options(tmp_path)).state) == (wanted.path, found.state)


def test_a_finished_run_is_not_started_again_and_longer_ones_go_on(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (1600,))
    (run.path / "cat.safetensors").write_bytes(b"x")
    run.log(RunFinished(step=1600))
    found = resuming.outlook(options(tmp_path), idle)
    assert found.kind == "finished" and found.text.startswith("cat is finished already (1600 steps).") and not found.starts
    assert "open it or to train again" in found.text and "resume" not in found.text
    assert trainer(options(tmp_path)).finished
    longer = resuming.outlook(options(tmp_path, max_train_steps=2000), idle)
    assert longer.kind == "continue" and "step 1600 of 2000" in longer.text


def test_a_finished_model_in_a_folder_counts_as_finished(tmp_path: Path) -> None:
    of = flat.build(RUNS["sdxl", "full"], {**BASE, "output_dir": str(tmp_path), "save_model_as": "diffusers", "output_name": "cat"})
    run = made(tmp_path, of, (1600,))
    run.log(RunFinished(step=1600))
    assert resuming.outlook(of, idle).kind == "continue"
    (run.path / "cat").mkdir()
    assert resuming.outlook(of, idle).kind == "finished"


def test_a_run_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (400,))
    for state, says in (("running", "is at work"), ("queued", "waits in the queue")):
        found = resuming.outlook(options(tmp_path), lambda path, state=state: state if path == run.path else "")
        assert found.kind == "busy" and found.text.startswith(f"cat {says}.") and not found.starts
        assert "open it or to train again" in found.text and "resume" not in found.text


def test_epochs_take_the_number_of_steps_from_the_log(tmp_path: Path) -> None:
    of = options(tmp_path, max_train_epochs=4)
    run = made(tmp_path, of, (30,))
    assert "from step 30, saved" in resuming.outlook(of, idle).text
    run.log(RunStarted(steps=120, start_step=0))
    assert "from step 30 of 120, saved" in resuming.outlook(of, idle).text
    assert "from step 30, saved" in resuming.outlook(options(tmp_path, max_train_epochs=5), idle).text


def test_a_state_that_lacks_a_file_is_passed_over_with_a_sentence(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (200, 400))
    (run.state / "000400" / "state.json").unlink()
    found = resuming.outlook(options(tmp_path), idle)
    assert found.state == run.state / "000200"
    assert "The state of step 400 is broken and is not used: state.json is missing." in found.notes


def test_none_starts_afresh_whatever_there_is(tmp_path: Path) -> None:
    made(tmp_path, options(tmp_path), (400,))
    assert resuming.outlook(options(tmp_path, resume="none"), idle).kind == "new"


def test_a_step_and_a_folder_begin_a_new_run_there(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (200, 400))
    by_step = resuming.outlook(options(tmp_path, resume="200"), idle)
    by_state = resuming.outlook(options(tmp_path, resume=str(run.state / "000200"), learning_rate=0.0003), idle)
    by_run = resuming.outlook(options(tmp_path, resume=str(run.path)), idle)
    assert [found.state for found in (by_step, by_state, by_run)] == [run.state / "000200"] * 2 + [run.state / "000400"]
    assert all(found.kind == "from state" and found.run is None for found in (by_step, by_state, by_run))
    assert trainer(options(tmp_path, resume="200")).state == by_step.state
    assert trainer(options(tmp_path, resume=str(run.path))).state == by_run.state
    assert "learning_rate: 0.0001, now 0.0003" in by_state.notes[0]


def test_the_end_of_an_epoch_begins_a_new_run_there(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path), (200, 400))
    for epoch, step in ((1, 200), (2, 400)):
        manifest = run.state / f"{step:06d}" / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"epochs": [epoch - 1, epoch]}))
    found = resuming.outlook(options(tmp_path, resume="epoch:1"), idle)
    assert (found.kind, found.state) == ("from state", run.state / "000200")
    assert trainer(options(tmp_path, resume="epoch:1")).state == found.state
    assert "it has the epochs 1, 2" in resuming.outlook(options(tmp_path, resume="epoch:3"), idle).text


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("300", "no saved state of step 300; it has the steps 200"),
        ("epoch:3", "no saved state of epoch 3; it has none"),
        ("{output}/nowhere", "is not a folder"),
        ("{output}", "no whole training"),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_what_there_is(tmp_path: Path, asked: str, why: str) -> None:
    made(tmp_path, options(tmp_path), (200,))
    found = resuming.outlook(options(tmp_path, resume=asked.format(output=tmp_path)), idle)
    assert found.kind == "refused" and why in found.text and not found.starts


def test_states_are_offered_newest_first(tmp_path: Path) -> None:
    first = made(tmp_path, options(tmp_path), (100, 200, 300))
    second = made(tmp_path, options(tmp_path, seed=9), (50,), minutes_ago=200)
    offers = resuming.foresight(options(tmp_path), idle).offers
    assert [(offer.run, offer.step) for offer in offers] == [(second.name, 50), *((first.name, step) for step in (300, 200, 100))]
    assert offers[0].path == str(second.state / "000050") and offers[0].saved == "3 hours ago"


def test_a_run_of_another_kind_or_with_a_damaged_config_is_no_hindrance(tmp_path: Path) -> None:
    damaged = made(tmp_path, options(tmp_path), (100,))
    damaged.config.write_text("not toml [")
    found = resuming.outlook(options(tmp_path), idle)
    assert found.kind == "new" and "config.toml is not one of this version" in found.notes[0]
    made(tmp_path, flat.build(RUNS["sdxl", "full"], {**BASE, "output_dir": str(tmp_path)}), (100,))
    assert "The earlier run cat has other settings: it is a run of sdxl_train.py." in resuming.outlook(options(tmp_path), idle).notes


# --- the Start button -----------------------------------------------------------------------------------------------


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[train.TrainTab]:
    """The Train tab of a studio whose runs do nothing but wait for a request to stop."""
    output = tmp_path / "output"
    context = app.make_context(output, [], is_private=True)
    wait = "import sys, time, pathlib\nwhile not (pathlib.Path(sys.argv[1]) / 'stop.request').exists(): time.sleep(0.05)"
    supervisor = JobSupervisor(output, lambda _options, run: [sys.executable, "-c", wait, str(run)])
    yield train.TrainTab(replace(context, supervisor=supervisor))
    for job in supervisor.jobs():
        supervisor.stop(job, grace_seconds=10)
    supervisor.close()


@pytest.fixture
def few(tmp_path: Path) -> dict[str, object]:
    """Options of a run on one image."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images" / "1.png")
    return {"train_data_dir": str(tmp_path / "images")}


def on_page(of: RunOptions) -> list[dict[str, object]]:
    return [{"run": form.run_key(type(of)), "values": form.texts(type(of), flat.flatten(of))}]


def test_start_does_what_was_foreseen(tab: train.TrainTab, few: dict[str, object]) -> None:
    output = tab.context.output_dir
    run = made(output, options(output, **few), (400,))
    page = on_page(options(output, **few))
    assert tab.foresight(page[0])["text"] == "Continues cat from step 400 of 1600, saved 12 minutes ago."
    said, job = tab.start(page)
    assert job is not None and job.path == run.path
    assert said["note"].startswith("Continues cat from step 400") and said["note"].endswith("cat has started.")
    assert tab.foresight(page[0])["kind"] == "busy"
    refused, none = tab.start(page)
    assert none is None and [problem["option"] for problem in refused["problems"]] == ["resume"]


def named(kind: str) -> dict[str, object]:
    """A base model that may be there: the built-in one, or one of the hub."""
    return {} if drawing.has_toy(kind.partition("/")[0]) else {"pretrained_model_name_or_path": "some/model"}


def test_start_refuses_at_its_field_what_training_would_refuse_before_the_first_step(
    tab: train.TrainTab, few: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    gone, empty, file = (str(tmp_path / name) for name in ("gone.safetensors", "empty", "file"))
    pointer, page, adapter, other = (str(tmp_path / f"{name}.safetensors") for name in ("pointer", "page", "adapter", "other"))
    Path(pointer).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n")
    Path(page).write_text("<!DOCTYPE html><html><body>Log in</body></html>")
    save_file(
        {"lora_unet_a.lora_down.weight": np.zeros((4, 8), np.float32), "lora_unet_a.lora_up.weight": np.zeros((8, 4), np.float32)}, adapter
    )
    save_file({"txtfusion.projector.weight": np.zeros((4, 8), np.float32)}, other)
    of_krea = str(lora_of("krea2", tmp_path / "krea.safetensors", "krea/Krea-2-Raw"))
    toys = Path(sd_scripts.toy.__file__).parent / "bases"
    base, new = "pretrained_model_name_or_path", ("krea2/network", "qwen_image21/full", "flux2/network", "chroma/full")
    wrong: list[tuple[str, str, dict[str, object]]] = [
        ("min_bucket_reso", "sdxl/network", {"resolution": 64, "min_bucket_reso": 256}),
        ("resolution", "sdxl/network", {"enable_bucket": False, "resolution": 100}),
        ("bucket_reso_steps", "flux/network", {"bucket_reso_steps": 8}),
        ("sample_prompts", "flux/network", {"sample_prompts": "a star --w 520 --h 512"}),
        ("pretrained_model_name_or_path", "sdxl/network", {"pretrained_model_name_or_path": gone}),
        ("vae", "sdxl/network", {"vae": "models/vae.safetensors"}),
        ("text_encoder", "zimage/network", {"text_encoder": gone}),
        ("network_weights", "sdxl/network", {"network_weights": "my/lora"}),
        ("base_weights", "sdxl/network", {"base_weights": [gone]}),
        ("train_data_dir", "sdxl/network", {"train_data_dir": empty}),
        ("train_data_dir", "sdxl/network", {"train_data_dir": "toy:nothing"}),
        ("train_data_dir", "lgt/scratch", {"train_data_dir": empty, "vae": "toy"}),
        ("in_json", "sdxl/network", {"in_json": file}),
        ("masked_loss", "sdxl/network", {"masked_loss": True}),
        ("max_train_epochs", "sdxl/network", {"max_train_epochs": 1, "train_batch_size": 4000}),
        *((base, kind, {base: pointer}) for kind in new),
        *((base, kind, {base: adapter}) for kind in ("sd/full", "krea2/network")),
        *((base, kind, {base: str(toys / "sdxl")}) for kind in (*new, "flux/network")),
        *((base, kind, {base: "toy"}) for kind in (*new, "anima/network") if named(kind)),
        (base, "sdxl/network", {base: other}),
        (base, "zimage/network", {base: page}),
        (base, "qwen_edit/network", {base: empty}),
        ("vae", "sd/network", {"vae": adapter}),
        ("text_encoder", "krea2/network", {"text_encoder": empty}),
        ("t5xxl", "chroma/network", {"t5xxl": pointer}),
        ("network_weights", "sdxl/network", {"network_weights": page}),
        ("network_weights", "krea2/network", {"network_weights": other}),
        ("training_adapter", "zimage/network", {"training_adapter": pointer}),
        ("network_weights", "sdxl/network", {"network_weights": of_krea}),
        ("network_weights", "krea2/network", {"network_weights": of_krea, "network_type": "loha"}),
        ("blocks_to_swap", "sdxl/network", {"blocks_to_swap": 88}),
        ("blocks_to_swap", "krea2/network", {"blocks_to_swap": 29}),
        ("target_modules", "sdxl/network", {"target_modules": ["attn1", "no_such_layer"]}),
        ("exclude_modules", "krea2/network", {"exclude_modules": [r"transformer_blocks\.28\."]}),
        ("optimizer_args", "sdxl/network", {"optimizer_args": ["weigth_decay=0.1"]}),
        ("optimizer_args", "sdxl/network", {"optimizer_args": ["betas=0.9"]}),
        ("optimizer_args", "sdxl/full", {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=True"]}),
        ("attention_backend", "sdxl/network", {"attention_backend": "cudnn"}),
        ("vae_device", "qwen_edit/network", {"vae_device": "cuda:7"}),
        ("text_encoder_device", "qwen_edit/network", {"text_encoder_device": "cuda"}),
    ]
    found = []
    for option, kind, values in wrong:
        run = form.run_of_key(kind)
        of = {
            name: value
            for name, value in {**BASE, **named(kind), **few, "resolution": 64, "min_bucket_reso": 32, **values}.items()
            if name in flat.fields(run)
        }
        said, job = tab.start(on_page(flat.build(run, of)))
        found.append((option, kind, values) if job is None and {each["option"] for each in said["problems"]} == {option} else said)
    assert found == wrong
    assert tab.context.supervisor.jobs() == []


def test_start_from_a_step_makes_a_run_of_its_own_that_begins_there(tab: train.TrainTab, few: dict[str, object]) -> None:
    output = tab.context.output_dir
    run = made(output, options(output, **few), (200, 400))
    _said, job = tab.start(on_page(options(output, resume="200", **few)))
    assert job is not None and job.path != run.path
    assert job.run.options().distributed.resume == str(run.state / "000200")


def test_start_of_a_finished_run_is_refused_at_its_field(tab: train.TrainTab) -> None:
    output = tab.context.output_dir
    run = made(output, options(output), (1600,))
    (run.path / "cat.safetensors").write_bytes(b"x")
    run.log(RunFinished(step=1600))
    refused, job = tab.start(on_page(options(output)))
    assert job is None and "finished already" in refused["problems"][0]["message"]


def test_the_demo_does_not_start_a_second_time_beside_itself(tab: train.TrainTab) -> None:
    opened = tab.load({"demo": True, "form": {"run": "sdxl/full"}})
    assert opened["problems"] == []
    form = [{"run": opened["fill"]["run"], "values": opened["fill"]["texts"]}]
    said, job = tab.start(form)
    assert job is not None and said["problems"] == [] and opened["fill"]["texts"]["output_name"] in job.name
    again, second = tab.start(form)
    (problem,) = again["problems"]
    assert second is None and problem["run"] == job.name and "is at work" in problem["message"]
    assert len(list(tab.context.supervisor.run_folders())) == 1


def test_a_form_with_mistakes_foresees_nothing_but_what_is_wrong_with_resume(tab: train.TrainTab) -> None:
    page = on_page(options(tab.context.output_dir))[0]
    values = dict(page["values"])  # type: ignore[call-overload]
    assert tab.foresight({**page, "values": {**values, "learning_rate": "fast"}})["text"] == ""
    named = {**values, "pretrained_model_name_or_path": "mine.safetensors"}
    assert tab.foresight({**page, "values": named})["base"].startswith("Licence: CreativeML Open RAIL")
    assert tab.foresight({**page, "values": {**named, "learning_rate": "fast"}})["base"].startswith("Licence: ")
    assert tab.foresight({**page, "values": values})["base"] == ""
    wrong = tab.foresight({**page, "values": {**values, "resume": "\\\\server\\share"}})
    assert wrong["kind"] == "refused" and "network paths" in wrong["text"]


# --- the files for a cluster ----------------------------------------------------------------------------------------


def test_files_for_a_cluster_come_as_texts_and_as_one_archive_and_nothing_starts(tab: train.TrainTab) -> None:
    output = tab.context.output_dir
    answer = tab.exported({"kind": "slurm", "machines": "3", "gpus_per_machine": "4"}, on_page(options(output)))
    texts = {file["name"]: file["text"] for file in answer["files"]}
    assert "#SBATCH --nodes=3" in texts["job.sbatch"] and "multi_gpu = true" in texts["config.toml"]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(answer["zip"]))) as archive:
        assert {name.removeprefix("cat-slurm/"): archive.read(name).decode() for name in archive.namelist()} == texts
        assert archive.getinfo("cat-slurm/train.sh").external_attr >> 16 == 0o755
    assert tab.context.supervisor.jobs() == []


def test_what_cannot_be_exported_stands_at_its_field(tab: train.TrainTab) -> None:
    page = on_page(options(tab.context.output_dir))
    assert [problem["option"] for problem in tab.exported({"machines": "0"}, page)["problems"]] == ["machines"]
    missing = tab.exported({"kind": "torchrun", "machines": "2"}, page)["problems"]
    assert "main_address" in missing[0]["message"]
