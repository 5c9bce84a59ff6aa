"""Where a run begins, and on which GPUs and machines it runs."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Count, Section, Show, WholeNumber, raise_all

_SEVERAL = Show(needs="multi_gpu")
_ON_MACHINES = Show(needs="num_machines!=1")

GPU = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-zA-Z/-]+")
"""How CUDA_VISIBLE_DEVICES names a GPU: its number in the order of the PCI bus, or its UUID."""


class DistributedOptions(Section):
    """Resume, several GPUs, several machines. Nothing here changes what a step of the global batch trains."""

    title: ClassVar[str] = "Resume & Distributed"

    resume: Annotated[str, Show(kind="start")] = "auto"
    """Where to start: auto continues the newest run with this output_name and the same settings, and starts a new one where there is none;
    latest insists on the newest state of this output_name; none starts afresh; a folder is a state or run folder to continue from; a number
    is a step of the run, and epoch:N the end of its Nth epoch. Whatever is named here is used, also where newer states are."""
    multi_gpu: bool = False
    """Train with several processes, one for each GPU (on a machine without a GPU, on the CPU)."""
    num_gpus: Annotated[WholeNumber, Field(le=1024), _SEVERAL] = 0
    """Processes on this machine; 0 takes one for each GPU that is there, or for each one in gpu_ids."""
    gpu_ids: Annotated[tuple[str, ...], Show(kind="gpus")] = ()
    """GPUs to use, by number (in the order of the PCI bus) or by UUID such as GPU-1a2b...; without multi_gpu, one. Empty takes those that
    are free."""
    global_batch_size: Count | None = None
    """Samples of an optimizer step over all processes: gradient_accumulation_steps then follows from it, from train_batch_size and from the
    number of processes, so that the run stays the same on any number of GPUs. None means train_batch_size x processes x accumulation."""
    launcher: Annotated[Literal["accelerate", "torchrun", "filestore"], _SEVERAL] = "accelerate"
    """What starts the processes. filestore is this program's own launcher, whose processes find each other through a file instead of a
    network port: for Windows and closed networks, on one machine."""
    distributed_backend: Annotated[Literal["auto", "nccl", "gloo"], _SEVERAL] = "auto"
    """How processes talk: auto is nccl between GPUs on Linux, gloo on Windows and on CPUs."""
    distributed_strategy: Annotated[Literal["ddp", "fsdp2"], _SEVERAL] = "ddp"
    """What each process holds. ddp: everything. fsdp2: its share of the network, of its gradients and of its optimizer's state, and the
    others lend theirs block by block, so that models fit which fit no single GPU, more slowly."""
    num_machines: Annotated[Count, Field(le=65536), _SEVERAL] = 1
    """Machines that train together. The same command runs on each, with its own machine_rank, and output_dir is on a disk they share."""
    machine_rank: Annotated[WholeNumber, _ON_MACHINES] = 0
    """Number of this machine, from 0; 0 is the one at main_process_ip."""
    main_process_ip: Annotated[str, _ON_MACHINES] = ""
    """Address of machine 0 for the others."""
    main_process_port: Annotated[int, Field(ge=0, le=65535), _SEVERAL] = 0
    """Port on machine 0 over which the processes find each other; 0 takes a free one, on one machine."""
    max_restarts: WholeNumber = 0
    """When a process dies, end the others and start all again from the newest saved state, at most this often."""
    distributed_timeout: Annotated[Count, Field(le=100_000), Show(unit="minutes", needs="multi_gpu")] = 30
    """A process that waits this long for another gives up: one that hangs ends the run with a sentence instead of blocking it for ever."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        wrong = [name for name in self.gpu_ids if not GPU.fullmatch(name)]
        if wrong:
            problems.append(f"gpu_ids: {', '.join(wrong)} is no GPU; give numbers such as 0 1, or UUIDs such as GPU-1a2b3c4d-...")
        twice = sorted({name for name in self.gpu_ids if self.gpu_ids.count(name) > 1})
        if twice:
            problems.append(f"gpu_ids names {', '.join(twice)} more than once; each GPU runs one process")
        if len({name.isdigit() for name in self.gpu_ids}) > 1:
            problems.append("gpu_ids mixes numbers with UUIDs, and CUDA reads one kind only; write all as numbers or all as UUIDs")
        if self.multi_gpu:
            if self.gpu_ids and self.num_gpus not in (0, len(self.gpu_ids)):
                problems.append(f"num_gpus is {self.num_gpus}, but gpu_ids names {len(self.gpu_ids)} GPUs; set num_gpus to 0")
        elif len(self.gpu_ids) > 1:
            problems.append(f"gpu_ids names {len(self.gpu_ids)} GPUs, which takes a process for each; turn multi_gpu on, or name one")
        if self.num_machines > 1:
            if self.launcher == "filestore":
                problems.append("launcher filestore works on one machine; with num_machines above 1 take accelerate or torchrun")
            if not self.main_process_ip:
                problems.append("num_machines is above 1, so main_process_ip must be the address of machine 0")
            if self.main_process_port == 0:
                problems.append("num_machines is above 1, so main_process_port must be a port that is free on machine 0, such as 29500")
            if self.machine_rank >= self.num_machines:
                problems.append(
                    f"machine_rank is {self.machine_rank}; with {self.num_machines} machines it is 0 to {self.num_machines - 1}"
                )
        raise_all(problems)
        return self
