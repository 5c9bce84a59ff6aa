"""Ready files for training on several machines: a Slurm job, scripts for hosts that one logs in to, or a Kubernetes Job.

`files(options, cluster)` gives the texts by file name; nothing is written or started. All kinds share config.toml, which says what is
trained, and train.sh, which starts the launcher of one machine. What differs is who starts train.sh on each machine, and with which rank.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, model_validator

from sd_scripts.schema import flat, toml_files
from sd_scripts.schema.errors import Problem, refuse
from sd_scripts.schema.fields import Count, Section, Show, WholeNumber, raise_all
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.tools import ToolOptions

from .command import SCRIPTS, launch_command

Kind = Literal["slurm", "torchrun", "kubernetes"]
UNFINISHED = 75
"""Exit code of train.sh when the run was asked to stop before its end (EX_TEMPFAIL of sysexits.h): start again to go on."""
SECONDS_TO_SAVE = 300
"""How long before its end a job is told, and how long a pod that must go may still save."""
PLACEHOLDER = "FILL-IN"
"""Begins every word that a person has to replace. Kubernetes takes no capital letters there, so that none is overlooked."""
_MAIN = "main-address-of-the-run"
_JOB_NAME = re.compile(r"[^a-z0-9]+")


class ClusterSection(Section):
    """Where a run is to be trained: how many machines, what each has, and what manages them."""

    title: ClassVar[str] = "Cluster"

    kind: Annotated[Kind, Show(basic=True)] = "slurm"
    """What starts the machines. slurm: a job for sbatch. torchrun: a script for each host, to be started there. kubernetes: an Indexed Job
    with its Service, for kubectl apply."""
    machines: Annotated[Count, Show(basic=True)] = 2
    """Machines that train together."""
    gpus_per_machine: Annotated[WholeNumber, Show(basic=True)] = 8
    """GPUs of each machine, with a process for each; 0 trains with one process on the CPU of each machine."""
    cpus_per_machine: Annotated[Count, Show(needs="kind=slurm|kubernetes")] = 16
    """CPU cores to ask for on each machine (slurm, kubernetes): about eight for each GPU."""
    memory_gib: Annotated[Count | None, Show(unit="GiB", needs="kind=slurm|kubernetes")] = None
    """Host RAM to ask for on each machine (slurm, kubernetes); None asks for none."""
    project_dir: Annotated[str, Show(kind="folder")] = ""
    """Folder of this program on those machines; empty means that it lies where it lies here."""
    python: Annotated[str, Show(kind="file")] = ""
    """Python on those machines; empty takes .venv/bin/python in project_dir, which setup.sh makes."""
    run_dir: Annotated[str, Show(kind="folder")] = ""
    """Folder of the run, on a disk that all machines share; empty names a new one in output_dir after the moment of the export. Whatever
    starts the files again goes on in it."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port on the first machine over which the processes find each other."""
    network_interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:,=^-]*$")] = ""
    """Network interface between the machines, such as ib0 or eth0; empty lets NCCL and gloo choose."""
    time_limit: Annotated[str, Show(basic=True, needs="kind=slurm"), Field(pattern=r"^(\d+-)?\d{1,3}(:\d{2}){0,2}$")] = "24:00:00"
    """Longest time of a Slurm job, as days-hours:minutes:seconds. Five minutes before, the run saves and queues again."""
    partition: Annotated[str, Show(basic=True, needs="kind=slurm"), Field(pattern=r"^[\w.,-]*$")] = ""
    """Slurm partition; empty takes the cluster's own choice."""
    account: Annotated[str, Show(needs="kind=slurm"), Field(pattern=r"^[\w.-]*$")] = ""
    """Slurm account that pays for the job; empty takes your own."""
    sbatch_options: Annotated[tuple[str, ...], Show(needs="kind=slurm")] = ()
    """Further options of sbatch, such as --qos=long and --constraint=h100."""
    main_address: Annotated[str, Show(basic=True, needs="kind=torchrun"), Field(pattern=r"^[A-Za-z0-9.:-]*$")] = ""
    """Name or address of the first host, as the others see it (torchrun)."""
    image: Annotated[str, Show(basic=True, needs="kind=kubernetes"), Field(pattern=r"^[\w./:@-]*$")] = ""
    """Container image that has this program in project_dir (kubernetes); empty leaves a place to fill in."""
    volume_claim: Annotated[str, Show(basic=True, needs="kind=kubernetes"), Field(pattern=r"^[a-z0-9.-]*$")] = ""
    """PersistentVolumeClaim of the shared disk, ReadWriteMany (kubernetes); empty leaves a place to fill in."""
    mount_path: Annotated[str, Show(needs="kind=kubernetes"), Field(pattern=r"^/[^\x00-\x1f:]*$")] = "/data"
    """Where the shared disk is mounted in the containers (kubernetes)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            f"sbatch_options: {text!r} is not an option of sbatch such as --qos=long"
            for text in self.sbatch_options
            if not re.fullmatch(r"--[a-z][a-z-]*(=[^\x00-\x1f\"'\\]+)?", text)
        ]
        if self.kind == "torchrun" and self.machines > 1 and not self.main_address:
            problems.append("main_address is missing: the name or address of the first host, as the others see it")
        for name in ("run_dir", "project_dir", "python"):
            value = getattr(self, name)
            if value and not value.startswith("/"):
                problems.append(f"{name}: {value} must be a whole path from the root, because every machine reads it")
            if any(ord(letter) < 32 for letter in value):
                problems.append(f"{name}: a path may not have line breaks")
        raise_all(problems)
        return self

    @property
    def processes_per_machine(self) -> int:
        """One for each GPU, or one on the CPU."""
        return max(1, self.gpus_per_machine)


class ExportSection(Section):
    """What is exported, and to where; for the command line."""

    title: ClassVar[str] = "Export"

    run: Annotated[str, Show(kind="file", cli_only=True)] = ""
    """TOML file of the run, as Save TOML writes it."""
    save_to: Annotated[str, Show(kind="folder", cli_only=True)] = ""
    """Folder for the files; files of the same names in it are replaced."""


class ClusterOptions(ToolOptions):
    """Write files that train a run on several machines."""

    name: ClassVar[str] = "cluster"
    script: ClassVar[str] = "python -m sd_scripts.schema cluster"
    label: ClassVar[str] = "Export for cluster"

    cluster: ClusterSection = ClusterSection()
    export: ExportSection = ExportSection()


def files(options: RunOptions, cluster: ClusterSection, stamp: str | None = None) -> dict[str, str]:
    """The files that train these options on these machines, by name; README.md says what to do with them.

    stamp (YYYYMMDD-HHMMSS) begins the name of the run's folder where cluster.run_dir names none; None takes the present moment. Raises
    OptionError for what cannot be trained there, with every problem.
    """
    options = flat.with_absolute_paths(options)
    raise_problems(options, cluster)
    stamp = stamp or datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = cluster.run_dir or f"{options.output.output_dir}/{stamp}-{options.output.output_name}"
    shared = {"config.toml": toml_files.to_toml(portable(options, cluster)), "train.sh": train_script(options, cluster, run_dir)}
    made = {"slurm": _slurm, "torchrun": _torchrun, "kubernetes": _kubernetes}[cluster.kind](options, cluster, run_dir, shared)
    return {"README.md": _readme(options, cluster, run_dir), **made}


def raise_problems(options: RunOptions, cluster: ClusterSection) -> None:
    """Raises OptionError when these options cannot be trained on these machines."""
    problems = []
    distributed = options.distributed
    processes = cluster.machines * cluster.processes_per_machine
    for name, path in (("project_dir", _project_dir(cluster)), ("output_dir", cluster.run_dir or options.output.output_dir)):
        if not path.startswith("/") or any(ord(letter) < 32 for letter in path):
            problems.append(Problem(name, f"{name}: {path!r} is not a path from the root of the machines, such as /shared/{name}"))
    if cluster.kind == "kubernetes":
        kept = {"output_dir": options.output.output_dir, "cache_dir": options.dataset.cache_dir, "run_dir": cluster.run_dir}
        for name, kept_at in kept.items():
            if kept_at and not Path(kept_at).is_relative_to(cluster.mount_path):
                text = (
                    f"{name}: {kept_at} is not on the shared disk, which is mounted at {cluster.mount_path}, so it is lost with its "
                    f"container; take a folder below {cluster.mount_path}, or another mount_path"
                )
                problems.append(Problem(name, text))
    if distributed.launcher == "filestore" and cluster.kind != "torchrun":
        problems.append(Problem("launcher", "launcher: filestore works on one machine; for a cluster take accelerate or torchrun"))
    together = options.dataset.train_batch_size * processes
    wanted = distributed.global_batch_size
    if wanted is not None and wanted % together:
        low, high = wanted // together * together, (wanted // together + 1) * together
        near = f"{low} or {high}" if low else str(high)
        text = (
            f"global_batch_size: {wanted} is not a multiple of train_batch_size x processes = {options.dataset.train_batch_size} x "
            f"{processes}; take {near}, another train_batch_size or other numbers of machines and GPUs"
        )
        problems.append(Problem("global_batch_size", text))
    if distributed.distributed_backend == "nccl" and cluster.gpus_per_machine == 0:
        text = "distributed_backend: nccl is for GPUs, and gpus_per_machine is 0; take auto or gloo"
        problems.append(Problem("distributed_backend", text))
    refuse(problems)


def portable(options: RunOptions, cluster: ClusterSection) -> RunOptions:
    """The options without anything about this machine's GPUs: how many processes train, and where, is up to what starts them."""
    here = {"multi_gpu": True, "num_gpus": 0, "gpu_ids": (), "max_restarts": 0, "launcher": _launcher(options, cluster)}
    one = {"num_machines": 1, "machine_rank": 0, "main_process_ip": "", "main_process_port": 0}
    return flat.build(type(options), _given(options, {**here, **one}), from_cli=True)


def _launcher(options: RunOptions, cluster: ClusterSection) -> str:
    return "torchrun" if cluster.kind == "torchrun" else options.distributed.launcher


def _given(options: RunOptions, changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**flat.flatten(options), **changes}.items() if value is not None}


# What runs on one machine.

_TRAIN = r"""
export MACHINE_RANK=${MACHINE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}
: "${MACHINE_RANK:?is the number of this machine, from 0}"
: "${MAIN_ADDRESS:?is the name or address of machine 0}"
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
cores=${SLURM_CPUS_PER_TASK:-$(nproc)}
threads=$((cores / processes_per_machine))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

mkdir -p -- "$run_dir"
stop_file=$run_dir/stop.request
# What was asked of an earlier start is over; a job that starts all machines has taken it away before.
if [ "$MACHINE_RANK" -eq 0 ] && [ "${KOHYA_LIKE_RUN_FOLDER:-}" != "$run_dir" ]; then rm -f -- "$stop_file"; fi
export KOHYA_LIKE_RUN_FOLDER=$run_dir
# A signal to end becomes a request to stop, which gives the run all the time that it needs to finish its step and to save; a second one
# on the same machine ends the launcher.
asked=
begun=
launcher=
end() {
  if [ -z "$asked" ]; then
    asked=yes
    echo "asked to end; the run saves after this step"
    : >"$stop_file"
  elif [ -n "$launcher" ]; then
    kill -HUP "$launcher" 2>/dev/null || true
  fi
  if [ -z "$begun" ]; then exit "$unfinished"; fi
}
trap end TERM INT HUP

for second in {1..300}; do
  if getent ahosts "$MAIN_ADDRESS" >/dev/null; then break; fi
  if [ "$second" -eq 300 ]; then echo "machine 0 is not found under the name $MAIN_ADDRESS" >&2; exit 1; fi
  sleep 1
done

# However the run began, from its first state on it is continued.
more=()
if [ -n "$(ls -A -- "$run_dir/state" 2>/dev/null)" ]; then more=(--resume auto); fi

cd -- "$project_dir"
"""

_TRAIN_END = r"""
# In a session of its own the launcher does not hear Ctrl-C. SIGTERM goes to every process where Slurm takes a job's machines away: ranks
# finish their step then, but a launcher would end them after half a minute, and itself with an error.
export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT
begun=yes
(trap '' TERM && exec setsid "${command[@]}") &
launcher=$!
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || code=$?; done
# A wait that a signal has cut short told nothing about the launcher.
code=0
wait "$launcher" || code=$?
if [ "$code" -ne 0 ] && [ ! -e "$stop_file" ]; then exit "$code"; fi

# Ended in order: finished, or stopped before the end? The first process writes that last.
for second in {1..60}; do
  case $(tail -n 1 -- "$run_dir/events.jsonl" 2>/dev/null) in
    '{"time": '*', "kind": "finished"'*) exit 0 ;;
    '{"time": '*', "kind": "stopped"'*) exit "$unfinished" ;;
    '{"time": '*', "kind": "failed"'*) break ;;
  esac
  if [ "$second" -eq 60 ]; then echo "the log of the run in $run_dir does not say how it ended" >&2; fi
  sleep 1
done
exit "$((code > 0 ? code : 1))"
"""


def train_script(options: RunOptions, cluster: ClusterSection, run_dir: str) -> str:
    """train.sh: starts the launcher on one machine, passes requests to stop on, and says by its exit code how the run ended.

    Needs MAIN_ADDRESS, and MACHINE_RANK where neither Slurm nor Kubernetes counts the machines. Exit codes: 0 finished, 75 stopped before
    the end, others failed.
    """
    environment: dict[str, str] = {}
    if cluster.gpus_per_machine == 0:
        environment["ACCELERATE_USE_CPU"] = "true"
    if cluster.network_interface:
        environment |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), cluster.network_interface)
    known = {
        "project_dir": _project_dir(cluster),
        "run_dir": run_dir,
        "processes_per_machine": str(cluster.processes_per_machine),
        "unfinished": str(UNFINISHED),
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Trains on one machine of the run; README.md beside it says how it is started.",
            "set -euo pipefail",
            *(f"{name}={shlex.quote(value)}" for name, value in known.items()),
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())),
            _TRAIN.rstrip("\n"),
            "command=(",
            *(f"  {line}" for line in _in_lines(_words(options, cluster))),
            ")",
            _TRAIN_END.lstrip("\n").rstrip("\n"),
            "",
        ]
    )


def _on_machines(options: RunOptions, cluster: ClusterSection) -> RunOptions:
    """The options as the launcher of these machines is to be started with them."""
    several = {"num_machines": cluster.machines, "main_process_ip": _MAIN, "main_process_port": cluster.port}
    alone = {"num_machines": 1, "main_process_ip": "", "main_process_port": 0}
    # Slurm and Kubernetes start a failed job again themselves; hosts that one logs in to have nobody else to do it.
    restarts = options.distributed.max_restarts if cluster.kind == "torchrun" else 0
    changes = {"num_gpus": cluster.processes_per_machine, "max_restarts": restarts, **(several if cluster.machines > 1 else alone)}
    return flat.build(type(options), _given(portable(options, cluster), changes), from_cli=True)


def _project_dir(cluster: ClusterSection) -> str:
    return cluster.project_dir or str(SCRIPTS.parent)


def _words(options: RunOptions, cluster: ClusterSection) -> Iterator[str]:
    """The launcher's command in words of the shell: paths of those machines, and variables for what each machine has for itself."""
    project = _project_dir(cluster)
    python = cluster.python or f"{project}/.venv/bin/python"
    by_flag = {"--machine_rank": "$MACHINE_RANK", "--node_rank": "$MACHINE_RANK", "--num_cpu_threads_per_process": "$OMP_NUM_THREADS"}
    before = ""
    for word in launch_command(_on_machines(options, cluster), Path("RUN_DIR"), Path("CONFIG")):
        flag, equals, _ = word.partition("=")
        if before in by_flag:
            yield f'"{by_flag[before]}"'
        elif equals and flag in by_flag:
            yield f'{flag}="{by_flag[flag]}"'
        elif _MAIN in word:
            first, _, last = word.partition(_MAIN)
            yield f'{shlex.quote(first) if first else ""}"$MAIN_ADDRESS"{shlex.quote(last) if last else ""}'
        elif word in ("RUN_DIR", "CONFIG"):
            yield {"RUN_DIR": '"$run_dir"', "CONFIG": '"$here/config.toml"'}[word]
        elif word == sys.executable:
            yield shlex.quote(python)
        elif word.startswith(str(SCRIPTS) + os.sep):
            yield shlex.quote(f"{project}/sd_scripts/{Path(word).relative_to(SCRIPTS).as_posix()}")
        else:
            yield shlex.quote(word)
        before = word
    yield '"${more[@]}"'


def _in_lines(words: Iterator[str]) -> Iterator[str]:
    """A flag and its value on a line."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield " ".join(line)
            line = []
        line.append(word)
    yield " ".join(line)


# What starts it on each machine.

_SLURM = r"""
set -euo pipefail
# sbatch copies this script to another place: the files lie where it was submitted.
here=${SLURM_SUBMIT_DIR:?is the folder of these files; start this with sbatch}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MAIN_ADDRESS=${hosts%%$'\n'*}
mkdir -p -- "$run_dir"
rm -f -- "$run_dir/stop.request"
export KOHYA_LIKE_RUN_FOLDER=$run_dir

queue_again=no
trap 'queue_again=yes; : >"$run_dir/stop.request"' USR1
trap ': >"$run_dir/stop.request"' TERM
srun --nodes="$machines" --ntasks="$machines" --ntasks-per-node=1 --cpus-per-task="$cpus_per_machine" --kill-on-bad-exit=0 \
  bash "$here/train.sh" &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step" || code=$?; done
# A wait that a signal has cut short told nothing about the step.
code=0
wait "$step" || code=$?

# Slurm tells the step, and not this script, that another job takes the machines; one that was cancelled is not running any more.
job=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null || true)
if [[ $job =~ \ JobState=RUNNING\ .*\ PreemptTime=[0-9] ]]; then queue_again=yes; fi
if [ "$code" -eq "$unfinished" ] && [ "$queue_again" = yes ]; then
  echo "the time is over or others need the machines, and the run is saved; the job goes into the queue again"
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -ne 0 ] && [ "$code" -ne "$unfinished" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
  echo "the run failed with code $code; the job goes into the queue again, to continue from the newest state"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _slurm(options: RunOptions, cluster: ClusterSection, run_dir: str, shared: dict[str, str]) -> dict[str, str]:
    asked = {
        "job-name": _job_name(options),
        "nodes": cluster.machines,
        "ntasks-per-node": 1,
        "cpus-per-task": cluster.cpus_per_machine,
        **({"gpus-per-node": cluster.gpus_per_machine} if cluster.gpus_per_machine else {}),
        **({"mem": f"{cluster.memory_gib}G"} if cluster.memory_gib else {}),
        "time": cluster.time_limit,
        **({"partition": cluster.partition} if cluster.partition else {}),
        **({"account": cluster.account} if cluster.account else {}),
        "signal": f"B:USR1@{SECONDS_TO_SAVE}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    known = {
        "machines": str(cluster.machines),
        "cpus_per_machine": str(cluster.cpus_per_machine),
        "max_restarts": str(options.distributed.max_restarts),
        "unfinished": str(UNFINISHED),
        "run_dir": run_dir,
    }
    job = "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{name}={value}" for name, value in asked.items()),
            "#SBATCH --requeue",
            *(f"#SBATCH {_sbatch_word(text)}" for text in cluster.sbatch_options),
            *(f"{name}={shlex.quote(value)}" for name, value in known.items()),
            _SLURM.strip("\n"),
            "",
        ]
    )
    return {"job.sbatch": job, **shared}


def _sbatch_word(text: str) -> str:
    """A line of #SBATCH is split at spaces, apart from those in double quotes."""
    name, equals, value = text.partition("=")
    return f'{name}="{value}"' if equals and not re.fullmatch(r"[\w.,:/=+@%-]+", value) else text


def _torchrun(options: RunOptions, cluster: ClusterSection, run_dir: str, shared: dict[str, str]) -> dict[str, str]:
    hosts = {}
    for rank in range(cluster.machines):
        hosts[f"host{rank}.sh"] = "\n".join(
            [
                "#!/usr/bin/env bash",
                f"# Start this on {'the first host, ' + (cluster.main_address or 'this one') if rank == 0 else f'host {rank}'}.",
                f"export MACHINE_RANK={rank} MAIN_ADDRESS={shlex.quote(cluster.main_address or 'localhost')}",
                'exec bash "$(dirname -- "${BASH_SOURCE[0]}")/train.sh"',
                "",
            ]
        )
    return {**hosts, **shared}


def _kubernetes(options: RunOptions, cluster: ClusterSection, run_dir: str, shared: dict[str, str]) -> dict[str, str]:
    name = _job_name(options)
    labels = {"app": name}
    limits: dict[str, Any] = {"cpu": str(cluster.cpus_per_machine)}
    limits |= {"memory": f"{cluster.memory_gib}Gi"} if cluster.memory_gib else {}
    limits |= {"nvidia.com/gpu": str(cluster.gpus_per_machine)} if cluster.gpus_per_machine else {}
    container = {
        "name": "train",
        "image": cluster.image or f"{PLACEHOLDER}-IMAGE",
        "command": ["bash", "/export/train.sh"],
        "env": [{"name": "MAIN_ADDRESS", "value": f"{name}-0.{name}"}],
        "ports": [{"containerPort": cluster.port}],
        "resources": {"requests": limits, "limits": limits},
        "volumeMounts": [
            {"name": "export", "mountPath": "/export", "readOnly": True},
            {"name": "shared", "mountPath": cluster.mount_path},
            # What NCCL and workers of torch exchange; a container's own is 64 MiB.
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        "containers": [container],
        "volumes": [
            {"name": "export", "configMap": {"name": name}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": cluster.volume_claim or f"{PLACEHOLDER}-CLAIM"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    # A pod that had to go, and those that stopped with it, come back without counting as failures.
    stopped = {"containerName": "train", "operator": "In", "values": [UNFINISHED]}
    forgiven = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # Before 1.29 a rule must have both keys, and only one of them may say something.
        {"action": "Ignore", "onExitCodes": stopped, "onPodConditions": []},
    ]
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(shared)},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {
                "clusterIP": "None",
                # The machines find each other before any of them is ready.
                "publishNotReadyAddresses": True,
                "selector": labels,
                "ports": [{"name": "rendezvous", "port": cluster.port}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "completionMode": "Indexed",
                "completions": cluster.machines,
                "parallelism": cluster.machines,
                # Once more than asked for: where a machine dies, it does not count, but the pods of all others fail.
                "backoffLimit": (options.distributed.max_restarts + 1) * cluster.machines,
                "podFailurePolicy": {"rules": forgiven},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]
    return {"job.yaml": yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140), **shared}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and everything in full where it stands."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_in_yaml(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_in_yaml)


def _job_name(options: RunOptions) -> str:
    """output_name as a name of jobs and hosts: small letters, digits and -, begun by a letter, at most 40 long."""
    letters = unicodedata.normalize("NFKD", options.output.output_name).encode("ascii", "ignore").decode()
    plain = _JOB_NAME.sub("-", letters.lower()).strip("-")[:40].strip("-")
    return plain if plain and plain[0].isalpha() else f"run-{plain}".strip("-")


def manifest_problems(text: str) -> list[str]:
    """What is wrong with a job.yaml, read back: places that are not filled in, and parts that do not belong together."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as err:
        return [f"this is not valid YAML: {' '.join(str(err).split())}"]
    by_kind = {document.get("kind"): document for document in documents if isinstance(document, dict)}
    missing = [kind for kind in ("ConfigMap", "Service", "Job") if kind not in by_kind]
    if missing:
        return [f"there is no {kind} in it" for kind in missing]
    words = sorted(set(re.findall(rf"{PLACEHOLDER}[A-Z-]*", text)))
    problems = [f"{word} is still to be filled in" for word in words]
    try:
        return problems + _mismatches(by_kind["ConfigMap"], by_kind["Service"], by_kind["Job"])
    except (KeyError, TypeError, IndexError) as err:
        return [*problems, f"a part is missing or is not what it should be: {err}"]


def _mismatches(config: dict[str, Any], service: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Parts of the three that must agree and do not. Raises KeyError, TypeError or IndexError where one is missing."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    name, host = service["metadata"]["name"], job["metadata"]["name"]
    addresses = [item["value"] for item in container["env"] if item["name"] == "MAIN_ADDRESS"]
    mounted = {item["name"] for item in container["volumeMounts"]}
    maps = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    checks = {
        "the Job must have completionMode: Indexed, which counts the machines": spec["completionMode"] == "Indexed",
        "completions and parallelism of the Job must be the same number": spec["completions"] == spec["parallelism"],
        "the Service must have clusterIP: None, so that every machine has a name": service["spec"]["clusterIP"] == "None",
        "subdomain of the pods must be the name of the Service": pod["subdomain"] == name,
        "the Service must select the labels of the pods": service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"],
        f"MAIN_ADDRESS must be {host}-0.{name}": addresses == [f"{host}-0.{name}"],
        "the Job must mount the ConfigMap": maps == [config["metadata"]["name"]],
        "every volume must be mounted": mounted == {volume["name"] for volume in pod["volumes"]},
        "the ConfigMap must have config.toml and train.sh": {"config.toml", "train.sh"} <= set(config["data"]),
    }
    return [sentence for sentence, is_so in checks.items() if not is_so]


# What a person does with them.


def _readme(options: RunOptions, cluster: ClusterSection, run_dir: str) -> str:
    paths = sorted({run_dir, _project_dir(cluster), *_paths(options)})
    steps = {"slurm": _SLURM_STEPS, "torchrun": _TORCHRUN_STEPS, "kubernetes": _KUBERNETES_STEPS}[cluster.kind]
    machines = "one machine" if cluster.machines == 1 else f"{cluster.machines} machines"
    gpus = f"{cluster.gpus_per_machine} GPU{'s' * (cluster.gpus_per_machine != 1)} each" if cluster.gpus_per_machine else "on their CPUs"
    lines = [
        f"# {options.output.output_name} on {machines}, {gpus}",
        "",
        f"{options.label}, with a process for each GPU: {cluster.machines * cluster.processes_per_machine} in all.",
        "",
        *steps,
        "",
        "## Before the first start",
        "",
        "- These paths must mean the same on every machine, on a disk that they share:",
        *(f"  - `{path}`" for path in paths),
        f"- Port {cluster.port} of the first machine must be open to the others, and so must those that NCCL or gloo choose.",
        "- Machines without a way to the internet need the base model as a file or folder on the shared disk, not as a hub id.",
        "- Keys (`HF_TOKEN`, `WANDB_API_KEY`) belong into the environment of the job, not into these files.",
        "",
        "## What happens",
        "",
        f"- The run lies in `{run_dir}`. Every start of these files goes on there from the newest saved state.",
        "- How often a state is saved (`save_state_every_n_steps` in config.toml) is how much a machine that dies can cost.",
        "- A machine that is told to end makes the whole run save after its step.",
        f"- train.sh ends with 0 when the run is finished and with {UNFINISHED} when it stopped before its end.",
        "",
    ]
    return "\n".join(lines)


_SLURM_STEPS = (
    "1. Copy this folder to the shared disk.",
    "2. In it: `sbatch job.sbatch`.",
    "",
    "Five minutes before `--time` is over the run saves, and the job puts itself into the queue again until the run is finished.",
    "The same happens when the job is preempted and its partition gives it time to save (`GraceTime`). Where a machine fails, Slurm",
    "queues the job again by itself, if the cluster allows it (`--requeue`). A job that is cancelled is not queued again.",
)
_TORCHRUN_STEPS = (
    "1. Copy this folder to the shared disk.",
    "2. On each host start its own script: `bash host0.sh` on the first, `bash host1.sh` on the next, and so on.",
    "",
    "The hosts wait for each other. Ctrl-C on any of them saves and stops the run on all.",
)
_KUBERNETES_STEPS = (
    "1. Fill in the image and the volume claim in job.yaml where it says FILL-IN.",
    "2. `python -m sd_scripts.schema cluster --check job.yaml` says whether anything is left.",
    "3. `kubectl apply -f job.yaml`.",
    "",
    "config.toml and train.sh are inside job.yaml (its ConfigMap); beside it they are for reading.",
    "Kubernetes makes a pod that had to go, and those that stopped with it, anew, and train.sh goes on from the newest state. One",
    "machine that dies is forgiven too, and as many more failures of all as `max_restarts` says. `kubectl delete job` ends it; the last",
    "state stays. job.yaml fits the published schemas of Kubernetes 1.26, 1.28 and 1.37, but no real cluster has run it yet: end one pod",
    "by hand before you rely on it.",
)


def _paths(options: RunOptions) -> Iterator[str]:
    """Folders and files of this run that are no built-in names."""
    known = flat.fields(type(options))
    for name, value in flat.flatten(options).items():
        if known[name].show.kind in ("folder", "file"):
            yield from (path for path in (value if isinstance(value, tuple) else (value,)) if path is not None and path.startswith("/"))
