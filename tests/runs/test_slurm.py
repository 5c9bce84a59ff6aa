"""The exported job on a real Slurm: a controller and two nodes, all on this machine, with Debian's packages slurmctld and slurmd."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.families import RUNS
from sd_scripts.runs.cluster import ClusterOptions, files
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, flat

PATIENCE_SECONDS = 400.0
NODES = ("127.0.0.2", "127.0.0.3")
CONFIGURATION = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=2 RealMemory=1000
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """A cluster of two nodes in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def begin(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        text = CONFIGURATION.format(host=platform.node(), folder=self.folder, ports=free_ports(3), nodes=NODES)
        (self.folder / "slurm.conf").write_text(text)
        for command in (["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-c", "-N", node] for node in NODES)):
            silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.started.append(subprocess.Popen(command, env=self.environment, **silent))
        self.until(lambda: self.said("sinfo", "-h", "-N", "-t", "idle", "-p", "low", "-o", "%N").split() == list(NODES))

    def said(self, *words: str, folder: Path | None = None) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, cwd=folder or self.folder)
        return done.stdout

    def submit(self, *words: str, folder: Path | None = None) -> str:
        """Number of the job."""
        return self.said("sbatch", "--parsable", *words, folder=folder).strip()

    def told(self, job: str, name: str) -> str:
        """A field of a job, such as JobState."""
        fields = dict(word.partition("=")[::2] for word in self.said("scontrol", "--oneliner", "show", "job", job).split())
        return fields.get(name, "")

    def until(self, seen: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not seen():
            assert time.monotonic() < end, self.said("squeue") + "".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))
            time.sleep(0.2)

    def end(self) -> None:
        self.said("scancel", "--me", "--signal=KILL", "--full")
        self.said("scancel", "--me")
        for process in reversed(self.started):
            process.terminate()
            process.wait(30)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if missing := [program for program in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol") if shutil.which(program) is None]:
        pytest.skip(f"needs Slurm (Debian's slurmctld, slurmd and slurm-client): {', '.join(missing)} not found")
    if os.geteuid() != 0:
        pytest.skip("needs Slurm started as root")
    made = Slurm(tmp_path / "slurm")
    try:
        made.begin()
        yield made
    finally:
        made.end()


@pytest.mark.long
def test_a_job_that_is_preempted_or_out_of_time_goes_on_and_one_that_is_cancelled_does_not(slurm: Slurm, runs: Any, tmp_path: Path) -> None:
    folder, run = tmp_path / "export", RunDirectory(tmp_path / "run")
    folder.mkdir()
    options = command_line.parse_cli(RUNS["sdxl", "network"], runs.arguments(max_train_steps=5000, multi_gpu=True)).options
    where = {"project_dir": str(SCRIPTS.parent), "python": sys.executable, "run_dir": str(run.path), "network_interface": "lo"}
    wanted = {"machines": 2, "gpus_per_machine": 0, "cpus_per_machine": 2, "partition": "low", "port": free_ports(1)[0], **where}
    for name, text in files(options, flat.build(ClusterOptions, wanted).cluster).items():
        (folder / name).write_text(text)
    (folder / "urgent.sh").write_text("#!/bin/sh\nsleep 1\n")

    def kinds(*wanted: str) -> list[dict[str, Any]]:
        return [event for event in run.events()[0] if event["kind"] in wanted]

    def trains(starts: int) -> None:
        """Waits for some steps of a start, which begins after some seconds, not after the two minutes that Slurm gives a requeued job.

        At once will not do: a node takes orders that were signed in the second in which it ended the job for its last ones, and ends it.
        """
        slurm.said("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        slurm.until(lambda: len(kinds("started")) == starts and kinds("started", "step")[-1]["kind"] == "step")

    def queued_again(times: int) -> None:
        slurm.until(lambda: (slurm.told(job, "JobState"), slurm.told(job, "Restarts")) == ("PENDING", str(times)))
        assert [event["kind"] for event in kinds("finished", "stopped", "failed")] == ["stopped"] * times

    job = slurm.submit("job.sbatch", folder=folder)
    trains(1)
    urgent = slurm.submit("-p", "high", "-N", "2", "--exclusive", "-o", "urgent.log", "urgent.sh", folder=folder)
    queued_again(1)
    slurm.until(lambda: slurm.told(urgent, "JobState") == "COMPLETED")
    trains(2)
    slurm.said("scancel", "--signal=USR1", "--batch", job)  # What Slurm sends five minutes before the end of --time.
    queued_again(2)
    trains(3)
    begun = [event["start_step"] for event in kinds("started")]
    assert begun == [0, *(event["step"] for event in kinds("stopped"))] and begun[1] > 0
    slurm.said("scancel", job)
    slurm.until(lambda: slurm.told(job, "JobState") == "CANCELLED")
    slurm.until(lambda: len(kinds("finished", "stopped", "failed")) == 3)
    assert kinds("finished", "stopped", "failed")[-1]["kind"] == "stopped" and slurm.told(job, "Restarts") == "2"
