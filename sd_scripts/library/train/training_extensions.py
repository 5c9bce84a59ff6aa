"""Run folders, states, several processes and a log for a training loop that is not ours; see docs/training-extensions.md.

States are those of our own trainers (safetensors and JSON, written aside and renamed, checked by hash), and so is the run folder, which
the studio shows. All processes make the same calls; only the first writes and speaks.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import extract_model_from_parallel
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.rng import seed_for
from sd_scripts.library.parallel.peers import Peers, join
from sd_scripts.library.parallel.sharding import gathered, own, sharded, sharded_optimizer_state
from sd_scripts.runs.events import Event, FileSaved, RunFinished, RunStarted, StepDone, Warned
from sd_scripts.runs.resume import RunLock, runs_named
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.states import newest_whole, state_folders
from sd_scripts.schema.distributed import DistributedOptions
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.output import OutputOptions

from .checkpoint import Checkpointer, Identity, State, read_state, remove_leftovers, room_for

log = logging.getLogger("sd_scripts")

CONFIG = "# This run belongs to a training loop of its own, with TrainingExtensions; it is continued by starting that loop again.\n"


class TrainingExtensions:
    """What a training loop calls to be resumed to the same bits, to run on several processes, and to be seen in the studio."""

    def __init__(self, output_dir: Path | str, output_name: str, accelerator: Accelerator | None = None, keep_states: int = 2) -> None:
        """accelerator: of loops that have one; its gradient scaler is part of the state. keep_states: how many newest states stay.

        Raises OptionError for a name that cannot be one of a file.
        """
        self._options = OutputOptions(output_dir=str(output_dir), output_name=output_name, save_last_n_states=keep_states)
        self._accelerator = accelerator
        self._peers = Peers()
        self._run: RunDirectory | None = None
        self._lock: RunLock | None = None
        self._checkpointer: Checkpointer | None = None
        self._seed = 0
        self._epoch, self._step, self._last = 0, 0, time.perf_counter()

    @staticmethod
    def setup_distributed(backend: str = "auto", timeout_minutes: int = 30) -> str | None:
        """Brings the processes of a launch together, before the Accelerator is made; the backend in use, None in a process alone.

        backend: auto (nccl between GPUs on Linux, gloo elsewhere), nccl or gloo. Each process gets the GPU of its own number.
        """
        join(DistributedOptions.model_validate({"distributed_backend": backend, "distributed_timeout": timeout_minutes}))
        return torch.distributed.get_backend() if torch.distributed.is_initialized() else None

    @property
    def run_dir(self) -> Path:
        """Folder of the run; known after load_resume_state."""
        return self._opened().path

    @property
    def is_main_process(self) -> bool:
        return self._peers.is_first

    # Begin.

    def load_resume_state(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, resume: bool = True
    ) -> tuple[int, int]:
        """(epoch to begin with, steps done): those of the newest whole state of the newest run of this name, which then goes on.

        (0, 0) without a state, in a new folder, and always with resume off. Raises TrainingError when the state belongs to another
        network, optimizer or scheduler; nothing is changed then, neither on disk nor in memory.
        """
        # The seed that the loop has set by now, at the latest for its network.
        self._seed = torch.initial_seed()
        run, path, broken = self._newest() if self.is_main_process and resume else (None, None, [])
        told = self._peers.same_text(str(path or ""))
        state = self._fitting(Path(told), network, optimizer, scheduler) if told else None
        self._open(run if path is not None else None)
        for text in broken:
            self.log_warning(text)
        if state is None:
            self._draw_anew()
            return 0, 0
        self._restore(state, network, optimizer, scheduler)
        if self.is_main_process:
            assert self._checkpointer is not None
            self._checkpointer.drop_states_after(self._step)
        self._peers.barrier()
        return self._epoch, self._step

    def is_training_complete(self, start_epoch: int, total_epochs: int) -> bool:
        """Whether all epochs are done already; says so, and how to make the run longer."""
        complete = start_epoch >= total_epochs
        if complete:
            self._say(f"all {total_epochs} epochs were done already; more epochs make the run longer, resume = False starts a new one")
        return complete

    # Log. What the first process writes; the others are silent.

    def log_training_start(self, total_epochs: int, total_steps: int) -> None:
        """The loop begins; total_steps counts from the first start of the run."""
        self._event(
            RunStarted(
                steps=total_steps,
                start_step=self._step,
                epochs=total_epochs,
                pid=os.getpid(),
                script=Path(sys.argv[0]).name,
            )
        )
        self._say(f"{self.run_dir}: steps {self._step} to {total_steps}, epochs {self._epoch} to {total_epochs}")
        self._last = time.perf_counter()

    def log_epoch(self, epoch: int, total_epochs: int) -> None:
        """An epoch begins; epoch counts from 0."""
        self._epoch = epoch
        self._say(f"epoch {epoch + 1} of {total_epochs}")

    def print_step(self, step: int, total_steps: int, loss: float, lr: float | None = None) -> None:
        """A step is done; step counts from 1. A point of the curve, with the time since the last one."""
        now = time.perf_counter()
        seconds = (now - self._last) / max(1, step - self._step)
        self._step, self._last = step, now
        left = seconds * (total_steps - step)
        self._event(StepDone(step=step, epoch=self._epoch, loss=loss, lr=lr, step_total=round(seconds, 5), eta_seconds=round(left, 1)))

    def log_warning(self, text: str) -> None:
        """Something that a person should know."""
        if self.is_main_process:
            log.warning("%s", text)
            self._event(Warned(text=text))

    def log_training_complete(self, step: int) -> None:
        """The loop has come to its end. The others may leave now; the folder is free for another start."""
        self._peers.barrier()
        self._event(RunFinished(step=step, text=f"{step} steps are done"))
        self._say(f"finished after {step} steps: {self.run_dir}")
        self.close()

    def close(self) -> None:
        """Gives the folder free for another start in this process; the end of the process does so too."""
        if self._lock is not None:
            self._lock.release()
        self._peers.leave()

    # Save.

    def save_epoch_checkpoint(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        epoch: int,
        global_step: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Saves the training state after an epoch (from 0), and the trained weights as a file for users, in dtype (None: their own).

        From here on random numbers follow from the step and the process, not from what was drawn before: so a start that resumes here
        draws the same, on any number of processes. Raises NoRoomLeft, with everything saved earlier intact.
        """
        scaler = getattr(self._accelerator, "scaler", None)
        state: State = {
            "weights": _kept(network),
            "optimizer": {"class": _class_of(optimizer), "state": optimizer.state_dict()},
            "scheduler": None if scheduler is None else {"class": _class_of(scheduler), "state": scheduler.state_dict()},
            "loop": {
                "epoch": epoch,
                "step": global_step,
                "seed": self._seed,
                "scaler": None if scaler is None else scaler.state_dict(),
            },
        }
        state = {name: gathered(group, keep=self.is_main_process) for name, group in state.items()}
        if self.is_main_process:
            assert self._checkpointer is not None
            self._checkpointer.save_state(global_step, state)
            path = self._checkpointer.export_path(global_step)
            self._write(path, state["weights"], dtype, global_step)
        self._peers.barrier()
        self._step = global_step
        self._draw_anew()

    def save_final_checkpoint(self, network: nn.Module, global_step: int, dtype: torch.dtype | None = None) -> Path:
        """Writes the trained weights to `<output_name>.safetensors`, in dtype (None: their own); states stay as they are."""
        weights = gathered(_kept(network), keep=self.is_main_process)
        path = self.run_dir / f"{self._options.output_name}{self._options.ending}"
        if self.is_main_process:
            self._write(path, weights, dtype, global_step)
        self._peers.barrier()
        return path

    def _write(self, path: Path, weights: dict[str, Tensor], dtype: torch.dtype | None, step: int) -> None:
        def converted(tensor: Tensor) -> Tensor:
            plain = tensor.detach().to("cpu", copy=True).contiguous()
            return plain.to(dtype) if dtype is not None and plain.is_floating_point() else plain

        with room_for(path.name, path.parent), written_aside(path) as aside:
            save_file({name: converted(tensor) for name, tensor in weights.items()}, aside, metadata={"format": "pt"})
        self._event(FileSaved(step=step, what="export", file=path.name))

    # Inside.

    def _newest(self) -> tuple[RunDirectory | None, Path | None, list[str]]:
        """The newest run of exactly this name that has a whole state, that state, and sentences about newer ones that are broken."""
        broken: list[str] = []
        for run in runs_named(Path(self._options.output_dir), self._options.output_name):
            path, texts = newest_whole(run.state)
            broken += texts
            if path is not None:
                return run, path, broken
            if state_folders(run.state):
                raise TrainingError(f"{run.path} holds no whole state ({'; '.join(texts)}); resume = False starts a new run beside it")
        return None, None, broken

    def _fitting(self, path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> State:
        """A state that fits. Raises TrainingError with everything that does not, before anything is touched."""
        state, _ = read_state(path)
        problems = []
        there, wanted = state["weights"], _kept(network)
        for text, names in (("missing", wanted.keys() - there.keys()), ("unknown", there.keys() - wanted.keys())):
            if names:
                problems.append(
                    f"{text} weights: {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                )
        problems += [
            f"{name} is {tuple(there[name].shape)} in the state, {tuple(tensor.shape)} in the network"
            for name, tensor in wanted.items()
            if name in there and there[name].shape != tensor.shape
        ]
        for kind, now in (("optimizer", optimizer), ("scheduler", scheduler)):
            saved = state[kind]
            named = "none" if saved is None else saved["class"]
            if named != ("none" if now is None else _class_of(now)):
                problems.append(f"its {kind} is {named}, this run's is {'none' if now is None else _class_of(now)}")
        groups = [[len(group["params"]) for group in one["param_groups"]] for one in (state["optimizer"]["state"], optimizer.state_dict())]
        if groups[0] != groups[1]:
            problems.append(f"its optimizer has groups of {groups[0]} weights, this run's has {groups[1]}")
        if problems:
            raise TrainingError(
                f"the state {path} does not fit: {'; '.join(problems)}. Nothing was changed. Use the settings it was made with, another "
                "output_name, or resume = False for a new run"
            )
        return state

    @torch.no_grad()
    def _restore(self, state: State, network: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        for name, tensor in _kept(network).items():
            own(tensor).copy_(own(sharded(state["weights"][name], tensor)))
        optimizer.load_state_dict(sharded_optimizer_state(optimizer, state["optimizer"]["state"]))
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"]["state"])
        loop = state["loop"]
        scaler = getattr(self._accelerator, "scaler", None)
        if scaler is not None and loop["scaler"]:
            scaler.load_state_dict(loop["scaler"])
        self._epoch, self._step, self._seed = loop["epoch"] + 1, loop["step"], loop["seed"]
        self._draw_anew()

    def _open(self, run: RunDirectory | None) -> None:
        """The first process takes the folder, or makes one; all know it."""
        if self.is_main_process:
            run = run or RunDirectory.create(Path(self._options.output_dir), self._options.output_name, CONFIG)
            self._lock = RunLock(run)
            self._lock.take()
            remove_leftovers(run)
        self._run = RunDirectory(Path(self._peers.same_text(str(run.path) if run is not None else "")))
        identity = Identity("training extensions", "", self._peers.world)
        self._checkpointer = Checkpointer(self._run, self._options, identity, lambda step: 0, sys.maxsize)

    def _opened(self) -> RunDirectory:
        if self._run is None:
            raise TrainingError("call load_resume_state first: it chooses the folder of the run, also with resume = False")
        return self._run

    def _draw_anew(self) -> None:
        """Random numbers from here on follow from the step and the process alone."""
        self._seed = int(self._peers.same_text(str(self._seed)))
        seed = seed_for(self._seed, self._step, f"training extensions/{self._peers.rank}")
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)

    def _event(self, event: Event) -> None:
        if self.is_main_process:
            with suppress(OSError):
                self._opened().log(event)

    def _say(self, text: str) -> None:
        if self.is_main_process:
            log.info("%s", text)


def _kept(network: nn.Module) -> dict[str, Tensor]:
    """What is trained, and the buffers that training may change, by name; the network itself, not what runs it on several processes."""
    plain = extract_model_from_parallel(network)
    trained = {name for name, weight in plain.named_parameters() if weight.requires_grad}
    frozen = {name for name, _ in plain.named_parameters()} - trained
    return {name: tensor for name, tensor in plain.state_dict(keep_vars=True).items() if name not in frozen}


def _class_of(thing: Any) -> str:
    """Name of an optimizer's or scheduler's class, without what accelerate puts around it."""
    if isinstance(thing, AcceleratedOptimizer):
        thing = thing.optimizer
    elif isinstance(thing, AcceleratedScheduler):
        thing = thing.scheduler
    return type(thing).__name__
