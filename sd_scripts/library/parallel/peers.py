"""The processes of one run: how they find each other, wait for each other, and notice that one is gone. One process waits for nobody.

Sums of tensors go through `processes`. What is said here goes through the store in which the processes found each other, so that waiting
may take hours, on any device, as long as whoever is waited for lives and gets on.

The store is one process, and with hundreds of others it must not be asked by each about each. So everybody waits for the first process
alone, and the first one for all; who finds that a process has ended writes it down once, and everybody reads that one list. A process looks
after those on its own machine without the store, and the first one after those elsewhere.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from sd_scripts.library.core.errors import TrainingError
from sd_scripts.runs.launcher import INIT_FILE
from sd_scripts.runs.stopping import Stopped
from sd_scripts.schema.distributed import DistributedOptions

LOOK_SECONDS = 0.5
"""How often each process looks after the others."""
BEAT_SECONDS, SILENCE_SECONDS = 5.0, 60.0
"""A process on another machine is taken for dead when it has not said anything for so long; it does so every few seconds."""
GRACE_SECONDS = 5.0
"""So long an exchange with a dead process may take to fail by itself; then the process that waits is ended."""
COMMUNICATION = ("gloo", "nccl", "connection", "broken pipe", "socket")
"""Words of errors that say that an exchange with another process failed."""


class PeerLost(TrainingError):
    """Another process of the run has ended, or does not answer."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


def world_size() -> int:
    """How many processes the launcher says it has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def backend_of(asked: str, cuda: bool, system: str = sys.platform) -> str:
    """How processes talk: auto is nccl between GPUs on Linux, gloo elsewhere. Raises TrainingError for nccl where there is none."""
    fits = cuda and system == "linux"
    if asked == "nccl" and not fits:
        raise TrainingError("distributed_backend: nccl needs Linux and GPUs, which this process does not have; use auto or gloo")
    return asked if asked != "auto" else "nccl" if fits else "gloo"


def join(options: DistributedOptions) -> None:
    """Brings the processes of a launch together; does nothing in a process that was started alone, or when a launcher has done it.

    They meet through a file when KOHYA_LIKE_INIT_FILE names one, else at MASTER_ADDR and MASTER_PORT. Raises TrainingError for a backend
    that this machine does not have.
    """
    file = os.environ.get(INIT_FILE)
    if dist.is_initialized() or (world_size() == 1 and not file):
        return
    if os.name == "nt":
        # torch for Windows is built without libuv, and asks for it all the same.
        os.environ.setdefault("USE_LIBUV", "0")
    backend = backend_of(options.distributed_backend, torch.cuda.is_available())
    limit = timedelta(minutes=options.distributed_timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if backend == "nccl":
        # nccl ends the process without a word when its time is over; Peers does so before, with one.
        limit += timedelta(minutes=1)
    if file:
        # A file is for one machine, which accelerate wants to be told.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(world_size()))
        store = dist.FileStore(file, world_size())
        dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=world_size(), timeout=limit)
    else:
        dist.init_process_group(backend, timeout=limit)


class Peers:
    """The other processes of the run, as one of them sees them. Made after `join`."""

    def __init__(self, patience_seconds: float = 1800.0, last_words: Callable[[PeerLost], None] = lambda err: None) -> None:
        """patience_seconds: who has not got on for so long hangs.

        last_words is called before the process is ended in an exchange that will never return.
        """
        together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if together else 0
        self.world: int = dist.get_world_size() if together else 1
        self.everybody: list[dict[str, Any]] = []
        """Host, pid and moment of birth of each process of a run of several."""
        self.last_words = last_words
        self._patience = patience_seconds
        self._calls = 0
        self._progress, self._told = 0, 0.0
        self._exchanging_since: float | None = None
        self._gone: dict[int, str] = {}
        self._gone_since = 0.0
        self._ending = threading.Event()
        self._heard = 0
        self._hearing = threading.Lock()
        if self.world > 1:
            self._store = dist.PrefixStore("kohya_like", _get_default_store())
            self._others = [rank for rank in range(self.world) if rank != self.rank]
            self._meet()

    def _meet(self) -> None:
        """Learns which process has which number, and begins to look after them."""
        me = psutil.Process()
        mine = {"host": platform.node(), "boot": psutil.boot_time(), "pid": me.pid, "born": me.create_time()}
        self._store.set(f"progress/{self.rank}", "0")
        self._store.set(f"process/{self.rank}", json.dumps(mine))
        if self.is_first:
            self.everybody = [json.loads(self._store.get(f"process/{rank}")) for rank in range(self.world)]
            self._store.set("processes", json.dumps(self.everybody))
        else:
            self.everybody = json.loads(self._store.get("processes"))
        home = (mine["host"], mine["boot"])
        self._here = {rank: (one["pid"], one["born"]) for rank, one in enumerate(self.everybody) if (one["host"], one["boot"]) == home}
        del self._here[self.rank]
        listened_to = self._others if self.is_first else [0]
        self._there = {rank: (b"", time.monotonic()) for rank in listened_to if rank not in self._here}
        self._asking_since: float | None = None
        threading.Thread(target=self._look_after, name="peers", daemon=True).start()
        if self._there:
            threading.Thread(target=self._watch_the_network, name="network", daemon=True).start()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether it is up to this process to say why the run ended: to the first one that did not die without a word."""
        return all(self._gone.get(rank) == "" for rank in range(self.rank))

    # Waiting.

    def barrier(self) -> None:
        """Returns when all processes have come here. Raises PeerLost for one that ended or hangs, Stopped for one that was stopped."""
        if self.world == 1:
            return
        self._calls += 1
        key = f"barrier/{self._calls}"
        if self.is_first:
            self._wait_for({rank: f"{key}/{rank}" for rank in self._others})
            self._store.set(key, "1")
        else:
            self._store.set(f"{key}/{self.rank}", "1")
            self._wait_for({0: key})

    def same_text(self, text: str) -> str:
        """The first process's text, in all processes."""
        if self.world == 1:
            return text
        self._calls += 1
        if self.is_first:
            self._store.set(f"text/{self._calls}", text)
            return text
        self._wait_for({0: f"text/{self._calls}"})
        return bytes(self._store.get(f"text/{self._calls}")).decode()

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The first process runs the block, then the others do."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    def progress(self) -> None:
        """Shows those who may be waiting that this process gets on; cheap enough to be called for every image."""
        self._progress += 1
        if self._exchanging_since is not None:
            self._exchanging_since = time.monotonic()
        if self.world > 1 and time.monotonic() - self._told > BEAT_SECONDS:
            self._told = time.monotonic()
            with self._translated():
                self._store.set(f"progress/{self.rank}", str(self._progress))

    def _wait_for(self, keys: dict[int, str]) -> None:
        """Waits until the processes of `keys` have said what they name, as long as those that have not get on."""
        pause, since, looked, seen = 0.002, time.monotonic(), time.monotonic(), ""
        with self._translated():
            while not self._store.check(list(keys.values())):
                self._raise_if_gone()
                if time.monotonic() - looked > LOOK_SECONDS:
                    late = [rank for rank, key in keys.items() if not self._store.check([key])]
                    progress = ",".join(self._store.get(f"progress/{rank}").decode() for rank in late)
                    looked = time.monotonic()
                    if progress != seen:
                        # Those who wait for this process wait for whom it waits for, too.
                        since, seen = looked, progress
                        self.progress()
                    if looked - since > self._patience:
                        raise PeerLost(self._hangs(late))
                time.sleep(pause)
                pause = min(2 * pause, 0.1)

    # Exchanging tensors.

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around whatever all processes must take part in. Raises PeerLost, or Stopped, when one of them is gone or hangs."""
        if self.world == 1:
            yield
            return
        self._raise_if_gone()
        self._exchanging_since = time.monotonic()
        try:
            with self._translated():
                yield
        finally:
            self._exchanging_since = None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """An error of an exchange becomes a sentence about the process that caused it; other errors pass."""
        try:
            yield
        except RuntimeError as err:
            text = str(err).lower()
            if isinstance(err, TrainingError) or not (isinstance(err, dist.DistError) or any(word in text for word in COMMUNICATION)):
                raise
            if "timed out" in text or "timeout" in text:
                raise PeerLost(self._hangs(self._others)) from err
            end = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < end:
                self._raise_if_gone()
                time.sleep(0.05)
            raise PeerLost(f"the connection to another process of the run broke: {str(err).strip().splitlines()[0]}") from err

    def _hangs(self, ranks: Collection[int]) -> str:
        names = ", ".join(str(rank + 1) for rank in sorted(ranks)) if len(ranks) <= 8 else f"one of {len(ranks)}"
        return (
            f"process {names} of {self.world} has not answered for {self._patience / 60:g} minutes (distributed_timeout), so this one does "
            "not wait any longer"
        )

    # Ends.

    def tell_end(self, text: str, advice: str = "", stopped: bool = False) -> None:
        """Tells the others, before this process ends early, why it does; stopped means that somebody asked it to."""
        if self.world > 1:
            with suppress(RuntimeError):
                self._store.set(f"end/{self.rank}", json.dumps({"text": text, "advice": advice, "stopped": stopped}))
                self._announce(self.rank)

    def lost(self) -> PeerLost | None:
        """The loss of another process, if there is one that nobody asked for."""
        try:
            if self.world > 1:
                with self._translated():
                    self._raise_if_gone()
        except Stopped:
            return None
        except PeerLost as err:
            return err
        return None

    def leave(self) -> None:
        """Says that this process is done, so that nobody misses it. The first one, which may hold the store, leaves last."""
        if self.world == 1 or self._ending.is_set():
            return
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "1")
            left = self._store.add("left", 1)
            end = time.monotonic() + 2 * GRACE_SECONDS
            while self.is_first and time.monotonic() < end and left + len(self._gone) < self.world:
                time.sleep(0.02)
                left = self._store.add("left", 0)
        self._ending.set()

    def _raise_if_gone(self) -> None:
        """Raises PeerLost or Stopped when a process has ended or said that it will."""
        self._look_for_ends()
        for rank, said in self._gone.items():
            end: dict[str, Any] = json.loads(said) if said else {"text": "", "advice": "", "stopped": False}
            if end["stopped"]:
                raise Stopped
            if end["text"]:
                raise PeerLost(f"process {rank + 1} of {self.world} failed: {end['text']}", end["advice"])
            raise PeerLost(f"process {rank + 1} of {self.world} ended without a word: it was killed, or it crashed")

    def _look_for_ends(self) -> None:
        """Brings _gone up to date: what each process that ended has said, nothing where it could not."""
        with self._hearing:
            for rank in (*self._here, *self._there):
                if rank not in self._gone and not self._lives(rank) and not self._store.check([f"left/{rank}"]):
                    if not self._store.check([f"end/{rank}"]):
                        self._store.set(f"end/{rank}", "")
                    self._announce(rank)
            while self._store.check([f"ended/{self._heard}"]):
                rank = int(self._store.get(f"ended/{self._heard}"))
                self._heard += 1
                if rank != self.rank and rank not in self._gone:
                    self._gone_since = self._gone_since or time.monotonic()
                    self._gone[rank] = self._store.get(f"end/{rank}").decode()

    def _announce(self, rank: int) -> None:
        """Puts a process that ended, or is about to, on the list that everybody reads; twice does no harm."""
        self._store.set(f"ended/{self._store.add('endings', 1) - 1}", str(rank))

    def _lives(self, rank: int) -> bool:
        """Whether a process that this one looks after is there, as far as can be told."""
        if rank in self._there:
            return time.monotonic() - self._there[rank][1] < SILENCE_SECONDS
        pid, born = self._here[rank]
        try:
            process = psutil.Process(pid)
            return abs(process.create_time() - born) < 1 and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True

    def _look_after(self) -> None:
        """The watching thread: hears the others' hearts, and ends this process when it waits for one that will never come."""
        beat, beaten = 0, 0.0
        while not self._ending.wait(LOOK_SECONDS):
            now = time.monotonic()
            self._asking_since = now
            try:
                if self._there and now - beaten > BEAT_SECONDS:
                    beat, beaten = beat + 1, now
                    self._store.set(f"beat/{self.rank}", str(beat))
                    for rank, (last, _) in self._there.items():
                        heard = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
                        if heard != last:
                            self._there[rank] = (heard, now)
                self._look_for_ends()
            except RuntimeError:
                # The store is gone: its process held it, and that is the first one, or its launcher.
                if not self._ending.is_set() and not self._gone:
                    self._gone, self._gone_since = {0: ""} if not self.is_first else {}, now
            finally:
                self._asking_since = None
            since = self._exchanging_since
            if since is None:
                continue
            if self._gone and now - max(since, self._gone_since) > GRACE_SECONDS:
                self._end_hard()
            elif now - since > self._patience + 2 * GRACE_SECONDS:
                self._end_hard(PeerLost(self._hangs(self._others)))

    def _watch_the_network(self) -> None:
        """Ends this process when the first machine does not answer: a wire that was cut tells nobody for a quarter of an hour."""
        while not self._ending.wait(LOOK_SECONDS):
            since = self._asking_since
            if since is not None and time.monotonic() - since > SILENCE_SECONDS:
                # On the console alone: the shared disk may be behind the same wire, and the first process tells the log.
                sys.stderr.write(
                    f"process {self.rank + 1} of {self.world}: the first machine has not answered for {SILENCE_SECONDS:g} s, so this "
                    "process ends. Start again to go on from the last saved state\n"
                )
                os._exit(1)

    def _end_hard(self, why: PeerLost | None = None) -> None:
        """Ends this process, whose main thread waits in a library and hears nothing. What is saved on disk is whole."""
        try:
            why = why or self.lost()
            if why is not None:
                self.last_words(why)
        finally:
            os._exit(1)
