"""Files for clusters: every script is run by bash as a cluster would run it, every manifest is read back."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sd_scripts.families import RUNS
from sd_scripts.runs.cluster import UNFINISHED, ClusterOptions, ClusterSection, files, manifest_problems
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.__main__ import main
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

SCHEMAS = Path(__file__).resolve().parents[1] / "data" / "kubernetes"
STAMP = "20260102-030405"
KINDS: dict[str, dict[str, Any]] = {"slurm": {}, "torchrun": {"main_address": "node0"}, "kubernetes": {"mount_path": "/"}}
NASTY = 'it\'s $(touch x) `y` "z" & ünï 名'


def run_options(**values: Any) -> RunOptions:
    given = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": "/shared/out", **values}
    return flat.build(RUNS["sdxl", "network"], given)


def section(kind: str, **values: Any) -> ClusterSection:
    return flat.build(ClusterOptions, {"kind": kind, **KINDS[kind], **values}).cluster


def sentences(options: RunOptions, cluster: ClusterSection) -> str:
    with pytest.raises(OptionError) as caught:
        files(options, cluster, STAMP)
    return "\n".join(problem.message for problem in caught.value.problems)


# --- what is in the files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model", "a b's $(x)", "звезда", "2.5"])
def test_every_script_is_valid_and_every_configuration_is_the_run(kind: str, name: str, tmp_path: Path) -> None:
    options = run_options(output_name=name, output_dir=f"/shared/{NASTY}", network_dim=7, gpu_ids=["3"], multi_gpu=True, learning_rate=3e-5)
    made = files(options, section(kind), STAMP)
    scripts = [file for file, text in made.items() if text.startswith("#!")]
    assert len(scripts) == {"slurm": 2, "torchrun": 3, "kubernetes": 1}[kind]
    for file in scripts:
        (tmp_path / file).write_text(made[file], encoding="utf-8")
        subprocess.run(["bash", "-n", str(tmp_path / file)], check=True, capture_output=True)
    values = toml_files.parse_toml(made["config.toml"], "config.toml")
    assert flat.run_of(values) is type(options)
    read = flat.flatten(flat.build(type(options), values))
    differing = {key for key, value in flat.flatten(options).items() if read[key] != value}
    # Which GPUs and machines is the business of what starts it.
    assert differing <= {"gpu_ids", "launcher"} and read["multi_gpu"] and read["num_machines"] == 1 and read["gpu_ids"] == ()
    assert f"/shared/{NASTY}/{STAMP}-{name}" in made["README.md"]


def test_the_job_asks_slurm_for_what_was_chosen() -> None:
    cluster = section(
        "slurm", machines=3, gpus_per_machine=4, cpus_per_machine=24, memory_gib=200, time_limit="2-00:00:00", partition="gpu,long"
    )
    cluster = cluster.model_copy(update={"account": "lab.7", "sbatch_options": ("--qos=long", "--comment=two words", "--exclusive")})
    lines = files(run_options(output_name="Cats & Dogs"), cluster, STAMP)["job.sbatch"].splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert asked[:8] == [
        *("--job-name=cats-dogs", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=24", "--gpus-per-node=4", "--mem=200G"),
        *("--time=2-00:00:00", "--partition=gpu,long"),
    ]
    assert {"--account=lab.7", "--requeue", "--signal=B:USR1@300", "--qos=long", '--comment="two words"', "--exclusive"} <= set(asked)


def test_a_manifest_has_its_run_and_its_parts_fit() -> None:
    options = run_options(output_name="Täst_1", max_restarts=2, output_dir="/data/o")
    cluster = section("kubernetes", machines=3, gpus_per_machine=4, memory_gib=9, image="reg/i:1", volume_claim="disk", mount_path="/data")
    made = files(options, cluster, STAMP)
    config, service, job = yaml.safe_load_all(made["job.yaml"])
    assert (config["data"]["config.toml"], config["data"]["train.sh"]) == (made["config.toml"], made["train.sh"])
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == "tast-1"
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (3, 3, 9)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "9Gi", "nvidia.com/gpu": "4"}
    assert container["env"] == [{"name": "MAIN_ADDRESS", "value": "tast-1-0.tast-1"}]
    assert manifest_problems(made["job.yaml"]) == []


def misfits(value: Any, schema: Any, definitions: dict[str, Any], place: str = "") -> Iterator[str]:
    """Where a value is not what a schema says, as far as the schemas of Kubernetes say anything."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if "oneOf" in schema:
        if all(any(misfits(value, one, definitions)) for one in schema["oneOf"]):
            yield f"{place} is {value!r}"
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}
    asked = schema.get("type", [])
    if asked and not any(isinstance(value, kinds[name]) for name in ([asked] if isinstance(asked, str) else asked)):
        yield f"{place} is {value!r} instead of {asked}"
    if value not in schema.get("enum", [value]):
        yield f"{place} is {value!r} and none of {schema['enum']}"
    if isinstance(value, dict):
        yield from (f"{place} has no {name}" for name in schema.get("required", ()) if name not in value)
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, item in value.items():
            if name not in known and others is False:
                yield f"{place}.{name} is not known"
            elif name in known or isinstance(others, dict):
                yield from misfits(item, known.get(name, others), definitions, f"{place}.{name}")
    for number, item in enumerate(value if isinstance(value, list) else ()):
        yield from misfits(item, schema.get("items", {}), definitions, f"{place}.{number}")


@pytest.mark.parametrize("version", ["1.26", "1.28", "1.37"])
def test_the_manifest_is_what_kubernetes_takes(version: str) -> None:
    definitions = json.loads(gzip.decompress((SCHEMAS / f"{version}.json.gz").read_bytes()))
    names = {"ConfigMap": "core.v1.ConfigMap", "Service": "core.v1.Service", "Job": "batch.v1.Job"}
    filled = {"image": "i", "volume_claim": "c", "memory_gib": 9}
    wrong = []
    for values in ({}, {"machines": 1, "gpus_per_machine": 0}):
        for document in yaml.safe_load_all(files(run_options(), section("kubernetes", **filled, **values), STAMP)["job.yaml"]):
            schema = definitions[f"io.k8s.api.{names[document['kind']]}"]
            wrong += [f"{document['kind']}{text}" for text in misfits(document, schema, definitions)]
            broken = {**document, "spcc": {}, "metadata": {"name": 5}}
            assert len(list(misfits(broken, schema, definitions))) == 2, "the reader of schemas sees what is wrong"
    assert wrong == []


def test_one_dead_machine_does_not_end_the_job() -> None:
    for machines in (1, 2, 8):
        made = files(run_options(), section("kubernetes", machines=machines), STAMP)["job.yaml"]
        spec = list(yaml.safe_load_all(made))[2]["spec"]
        # The dead one's pod has the condition that is forgiven; the others end with an error, because it is gone.
        assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert spec["backoffLimit"] >= machines - 1


def set_in(job: Any, place: str, value: Any) -> None:
    *way, last = [int(step) if step.isdigit() else step for step in place.split(".")]
    for step in way:
        job = job[step]
    job[last] = value


@pytest.mark.parametrize(
    ("place", "value", "word"),
    [
        ("2.spec.completionMode", "NonIndexed", "Indexed"),
        ("2.spec.parallelism", 1, "parallelism"),
        ("1.spec.clusterIP", "10.0.0.1", "clusterIP"),
        ("2.spec.template.spec.subdomain", "other", "subdomain"),
        ("1.spec.selector", {"app": "x"}, "select"),
        ("2.metadata.name", "other", "MAIN_ADDRESS"),
        ("0.metadata.name", "other", "ConfigMap"),
        ("2.spec.template.spec.containers.0.volumeMounts", [], "mounted"),
        ("0.data", {"config.toml": ""}, "train.sh"),
        ("2.spec.template.spec.containers", [], "missing"),
        ("1.kind", "Pod", "Service"),
        ("2.spec.template.spec.containers.0.image", "FILL-IN-IMAGE", "FILL-IN-IMAGE"),
    ],
)
def test_a_manifest_whose_parts_do_not_fit_is_found(place: str, value: Any, word: str) -> None:
    documents = list(yaml.safe_load_all(files(run_options(), section("kubernetes", image="i", volume_claim="c"), STAMP)["job.yaml"]))
    assert manifest_problems(yaml.safe_dump_all(documents)) == []
    set_in(documents, place, value)
    assert word in "\n".join(manifest_problems(yaml.safe_dump_all(documents)))


def test_places_to_fill_in_are_told() -> None:
    text = files(run_options(), section("kubernetes"), STAMP)["job.yaml"]
    assert manifest_problems(text) == ["FILL-IN-CLAIM is still to be filled in", "FILL-IN-IMAGE is still to be filled in"]
    assert "YAML" in manifest_problems("a: [")[0]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "torchrun"}, ["main_address is missing"]),
        ({"kind": "slurm", "sbatch_options": ["--x=1\n#SBATCH --y"], "run_dir": "out"}, ["sbatch_options", "run_dir: out"]),
        ({"kind": "slurm", "partition": "a b", "time_limit": "soon", "gpus_per_machine": -1}, ["partition", "time_limit", "gpus_per_mach"]),
        ({"kind": "slurm", "network_interface": "ib0; rm"}, ["network_interface"]),
    ],
)
def test_a_wrong_cluster_is_a_sentence(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        flat.build(ClusterOptions, values)
    said = "\n".join(problem.message for problem in caught.value.problems)
    assert [word for word in words if word not in said] == []


def test_a_run_that_does_not_go_with_the_cluster_is_refused_before_it_waits_in_a_queue() -> None:
    wrong = run_options(
        global_batch_size=100,
        train_batch_size=2,
        multi_gpu=True,
        launcher="filestore",
        distributed_backend="nccl",
        gradient_accumulation_steps=1,
    )
    said = sentences(wrong, section("slurm", machines=3, gpus_per_machine=0))
    assert "take 96 or 102" in said and "filestore" in said and "nccl is for GPUs" in said
    assert "/shared/out is not on the shared disk" in sentences(run_options(), section("kubernetes", mount_path="/data"))


# --- the scripts, run -------------------------------------------------------------------------------------------------

STAND_IN = r"""#!/usr/bin/env bash
# In place of python: notes how it was called, then ends as it is told.
printf '%s\n' "$@" >"$NOTES/argv.$MACHINE_RANK"
printf '%s\n' "$PWD" "$OMP_NUM_THREADS" "${GLOO_SOCKET_IFNAME:-}" >"$NOTES/place.$MACHINE_RANK"
say() { printf '{"time": 1.5, "kind": "%s", "step": 3, "text": "kind: \\"kind\\": \\"finished\\""}\n' "$1" >>"$RUN_DIR/events.jsonl"; }
case $DOES in
  finish) say finished ;;
  fail) exit 9 ;;
  silent) say step ;;
  stop)
    trap 'touch "$NOTES/told"' TERM INT
    touch "$NOTES/ready.$MACHINE_RANK"
    until [ -e "$RUN_DIR/stop.request" ]; do
      if [ ! -d "$NOTES" ]; then exit 1; fi
      /bin/sleep 0.02
    done
    say stopped
    ;;
  hold)
    trap 'touch "$NOTES/told"' HUP INT
    touch "$NOTES/ready.$MACHINE_RANK"
    until [ -e "$NOTES/go" ]; do
      if [ ! -d "$NOTES" ]; then exit 1; fi
      /bin/sleep 0.02
    done
    say stopped
    exit 1
    ;;
esac
"""
SRUN = r"""#!/usr/bin/env bash
# In place of srun: a task for each machine, here; the largest exit code of all.
while [ "$1" != bash ]; do printf '%s\n' "$1" >>"$NOTES/srun"; shift; done
for rank in 0 1; do SLURM_NODEID=$rank SLURM_CPUS_PER_TASK=6 "$@" & tasks[$rank]=$!; done
worst=0
for task in "${tasks[@]}"; do wait "$task"; code=$?; if [ "$code" -gt "$worst" ]; then worst=$code; fi; done
exit "$worst"
"""
GETENT = r"""#!/bin/sh
[ "$2" != no-such-host.invalid ]
"""
SCONTROL = r"""#!/usr/bin/env bash
case "$*" in
  "show hostnames"*) printf 'localhost\nother\n' ;;
  *"show job"*) echo "JobId=77 JobName=x JobState=${STATE:-RUNNING} PreemptEligibleTime=2026-11-23 PreemptTime=${PREEMPTED:-None} Power=" ;;
  *) echo "$*" >>"$NOTES/requeued" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Folders with names that a shell takes apart, and programs of a cluster in front of the PATH."""
    folder = tmp_path / NASTY
    for name in ("bin", "project", "notes", "export"):
        (folder / name).mkdir(parents=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": STAND_IN, "getent": GETENT, "sleep": "#!/bin/sh\n"}.items():
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    return folder


def exported(place: Path, kind: str, **values: Any) -> Path:
    own = {key: values.pop(key) for key in ("resume", "max_restarts", "launcher", "multi_gpu") if key in values}
    where = {"project_dir": str(place / "project"), "python": str(place / "bin" / "python"), "run_dir": str(place / "run")}
    made = files(run_options(**own), section(kind, **where, **values), STAMP)
    for name, text in made.items():
        (place / "export" / name).write_text(text, encoding="utf-8")
    return place / "export"


def begin(place: Path, script: str, does: str, **environment: str) -> subprocess.Popen[str]:
    values = {"NOTES": str(place / "notes"), "RUN_DIR": str(place / "run"), "DOES": does, **environment}
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MACHINE_RANK")}
    return subprocess.Popen(
        ["bash", str(place / "export" / script)],
        env={**kept, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", **values},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A suite that a shell has put into the background ignores SIGINT, and bash cannot trap what was ignored when it began.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end_of(started: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said = started.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        # The stand-in has a session of its own, and ends when its notes are gone.
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        assert started.stdout is not None
        started.stdout.close()
        raise
    return started.returncode, said


def wait_for(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


def argv(place: Path, rank: int) -> list[str]:
    return (place / "notes" / f"argv.{rank}").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_train_sh_starts_the_launcher_of_its_machine(place: Path, launcher: str) -> None:
    exported(place, "slurm", multi_gpu=True, launcher=launcher, machines=4, gpus_per_machine=3, port=31000, network_interface="ib0")
    code, said = end_of(begin(place, "train.sh", "finish", MACHINE_RANK="2", MAIN_ADDRESS="localhost", SLURM_CPUS_PER_TASK="24"))
    assert code == 0, said
    words = argv(place, 2)
    script = words.index(str(place / "project" / "sd_scripts" / "sdxl_train_network.py"))
    assert words[script + 1 :] == ["--config_file", str(place / "export" / "config.toml"), "--run_dir", str(place / "run")]
    pairs = set(itertools.pairwise(words))
    if launcher == "accelerate":
        assert words[:2] == ["-m", "accelerate.commands.launch"]
        wanted = {("--num_processes", "12"), ("--num_machines", "4"), ("--machine_rank", "2"), ("--main_process_ip", "localhost")}
        wanted |= {("--main_process_port", "31000"), ("--num_cpu_threads_per_process", "8")}
    else:
        wanted = {
            ("--nproc_per_node", "3"),
            ("--nnodes", "4"),
            ("--node_rank", "2"),
            ("--master_addr", "localhost"),
            ("--master_port", "31000"),
        }
    assert wanted <= pairs
    assert not any(str(SCRIPTS) in word for word in words), "paths of this machine"
    assert (place / "notes" / "place.2").read_text(encoding="utf-8").splitlines() == [str(place / "project"), "8", "ib0"]


def test_train_sh_says_how_the_run_ended(place: Path) -> None:
    exported(place, "slurm", resume="none")
    known = {"MAIN_ADDRESS": "localhost", "MACHINE_RANK": "0"}
    assert end_of(begin(place, "train.sh", "finish", **known))[0] == 0
    assert "--resume" not in argv(place, 0)
    assert end_of(begin(place, "train.sh", "fail", **known))[0] == 9
    code, said = end_of(begin(place, "train.sh", "silent", **known))
    assert code == 1 and "does not say how it ended" in said
    (place / "run" / "state" / "000500").mkdir(parents=True)
    assert end_of(begin(place, "train.sh", "finish", **known))[0] == 0
    assert argv(place, 0)[-2:] == ["--resume", "auto"], "what began with none goes on from its own states"
    code, said = end_of(begin(place, "train.sh", "finish", MAIN_ADDRESS="localhost"))
    assert code != 0 and "MACHINE_RANK" in said
    code, said = end_of(begin(place, "train.sh", "finish", MACHINE_RANK="0", MAIN_ADDRESS="no-such-host.invalid"))
    assert code == 1 and "not found under the name no-such-host.invalid" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_machine_that_is_told_to_end_makes_the_run_save(place: Path, number: int) -> None:
    exported(place, "torchrun", main_address="localhost")
    (place / "run").mkdir()
    (place / "run" / "stop.request").touch()
    started = begin(place, "host0.sh", "stop")
    wait_for((place / "notes" / "ready.0").exists)
    assert not (place / "run" / "stop.request").exists(), "an old request ends no new run"
    started.send_signal(number)
    code, said = end_of(started)
    assert code == UNFINISHED and "asked to end" in said
    assert not (place / "notes" / "told").exists(), "the launcher is left alone"


def test_a_request_to_end_counts_before_and_beside_that_of_another_machine(place: Path) -> None:
    exported(place, "slurm")
    asked = place / "run" / "stop.request"
    known = {"MAIN_ADDRESS": "localhost", "MACHINE_RANK": "0"}
    ready = {**known, "KOHYA_LIKE_RUN_FOLDER": str(place / "run")}
    getent = place / "bin" / "getent"
    told_while_waiting = '#!/bin/sh\nkill -TERM "$PPID"\nexit 1\n'
    getent.write_text(told_while_waiting)
    assert end_of(begin(place, "train.sh", "fail", **known))[0] == UNFINISHED and asked.exists(), "while it looks for machine 0"
    getent.write_text(GETENT)
    assert end_of(begin(place, "train.sh", "stop", **ready))[0] == UNFINISHED, "before the script, but after the job was begun"
    started = begin(place, "train.sh", "hold", **{**ready, "MACHINE_RANK": "1"})
    wait_for((place / "notes" / "ready.1").exists)
    started.send_signal(signal.SIGTERM)
    assert started.stdout is not None and "asked to end" in started.stdout.readline(), "the first signal here, whoever made the file"
    (place / "notes" / "go").touch()
    assert end_of(started)[0] == UNFINISHED, "the log says how the run ended, not a launcher that was told to end as well"
    assert not (place / "notes" / "told").exists()


def test_a_job_starts_a_launcher_on_each_machine(place: Path) -> None:
    folder = exported(place, "slurm", gpus_per_machine=2)
    submitted = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "77"}
    shutil.copy(folder / "job.sbatch", place / "spooled.sh")
    code, said = end_of(begin(place, "../spooled.sh", "finish", **submitted))
    assert code == 0, said
    assert [argv(place, rank)[argv(place, rank).index("--machine_rank") + 1] for rank in (0, 1)] == ["0", "1"]
    assert (place / "notes" / "place.1").read_text(encoding="utf-8").splitlines()[1] == "3", "six cores for two processes"
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16"} <= set((place / "notes" / "srun").read_text().splitlines())
    assert not (place / "notes" / "requeued").exists()


PREEMPTED = {"PREEMPTED": "2026-11-23T12:32:29"}


@pytest.mark.parametrize(
    ("number", "job", "requeued"),
    [
        (signal.SIGUSR1, {}, True),
        (signal.SIGTERM, {}, False),
        (signal.SIGTERM, PREEMPTED, True),
        (signal.SIGTERM, {**PREEMPTED, "STATE": "CANCELLED"}, False),
    ],
)
def test_a_job_whose_time_is_over_saves_and_queues_again(place: Path, number: int, job: dict[str, str], requeued: bool) -> None:
    folder = exported(place, "slurm")
    submitted = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "77", **job}
    started = begin(place, "job.sbatch", "stop", **submitted)
    wait_for(lambda: all((place / "notes" / f"ready.{rank}").exists() for rank in (0, 1)))
    started.send_signal(number)
    assert end_of(started)[0] == UNFINISHED
    assert (place / "notes" / "requeued").exists() is requeued
    if requeued:
        assert (place / "notes" / "requeued").read_text() == "requeue 77\n"


@pytest.mark.parametrize(("before", "requeued"), [("0", True), ("1", True), ("2", False)])
def test_a_job_that_failed_queues_again_as_often_as_asked(place: Path, before: str, requeued: bool) -> None:
    folder = exported(place, "slurm", max_restarts=2)
    submitted = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": before}
    assert end_of(begin(place, "job.sbatch", "fail", **submitted))[0] == 9
    assert (place / "notes" / "requeued").exists() is requeued


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_files_and_checks_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(toml_files.to_toml(run_options()), encoding="utf-8")
    to = tmp_path / "for the cluster"
    command = ["cluster", "--run", str(tmp_path / "run.toml"), "--save_to", str(to), "--kind=kubernetes", "--mount_path=/shared"]
    assert main(command) == 0
    assert sorted(path.name for path in to.iterdir()) == ["README.md", "config.toml", "job.yaml", "train.sh"]
    capsys.readouterr()
    assert main(["cluster", "--check", str(to / "job.yaml")]) == 1
    assert "FILL-IN-IMAGE" in capsys.readouterr().out
    assert main([*command, "--image=i", "--volume_claim=c", "--run_dir=/shared/my run"]) == 0
    assert "/shared/my run" in (to / "README.md").read_text(encoding="utf-8")
    assert main(["cluster", "--check", str(to / "job.yaml")]) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["cluster"], "--run FILE"),
        (["cluster", "--run", "none.toml", "--save_to", "x"], "none.toml"),
        (["cluster", "--check", "none.yaml"], "none.yaml"),
        (["cluster", "--machines", "many", "--kinds", "x"], "many"),
    ],
)
def test_a_wrong_command_is_a_sentence(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and word in capsys.readouterr().err
