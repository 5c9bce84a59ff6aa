"""The folder of one run: the whole truth about it, readable with cat."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.runs import RunOptions

from .events import Event, Line, lines_of, read
from .orders import Asked, Orders


class RunFolderLost(OSError):
    """The folder of a run is gone or can no longer be written."""

    def __init__(self, folder: Path, cause: OSError) -> None:
        why = f"cannot be written ({cause.strerror or cause})" if folder.is_dir() else "is gone"
        super().__init__(cause.errno, f"the run's folder {folder} {why}, and training cannot go on without it")

    def __str__(self) -> str:
        return str(self.strerror)


class RunDirectory:
    """Config, event log, console, states, samples and results of one run. Knows files, not training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.events_file = path / "events.jsonl"
        self.console = path / "console.log"
        self.meta = path / "run_meta.json"
        self.state = path / "state"
        self.samples = path / "samples"
        self.epochs = path / "epochs.csv"
        self.inference = path / "inference"
        self.stop_file = path / "stop.request"
        self.orders = Orders(path)

    @classmethod
    def create(cls, parent: Path, name: str, options: RunOptions | str) -> RunDirectory:
        """Makes `<parent>/<date>-<time>-<name>/` with config.toml in it; two starts in one second get different folders.

        options may be the text of config.toml, for runs of other programs.
        """
        from sd_scripts.schema.toml_files import to_toml

        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(1000):
            path = parent / (f"{stamp}-{name}" if attempt == 0 else f"{stamp}_{attempt}-{name}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as err:
                raise OptionError(f"output_dir: cannot make the folder {path}: {err.strerror}; choose a folder you may write to") from err
            run = cls(path)
            write_atomically(run.config, options if isinstance(options, str) else to_toml(options))
            return run
        raise OptionError(f"output_dir: {parent} holds too many runs of the same second")

    @property
    def name(self) -> str:
        return self.path.name

    def options(self) -> RunOptions:
        """The effective options, from config.toml. Raises OptionError when it is missing or does not fit this version."""
        from sd_scripts.schema.flat import build, run_of
        from sd_scripts.schema.toml_files import read_toml

        values = read_toml(self.config)
        return build(run_of(values), values, origin=self.config.name)

    def log(self, event: Event) -> None:
        """Appends one event, with the time. Raises RunFolderLost."""
        try:
            handle = os.open(self.events_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # One write: two processes may append, and a reader must never meet half a line.
                os.write(handle, event.line(time.time()).encode())
            finally:
                os.close(handle)
        except OSError as err:
            raise RunFolderLost(self.path, err) from err

    def events(self, offset: int = 0) -> tuple[list[Line], int]:
        """Whole lines after a byte offset, and the next offset. A half-written last line waits; a damaged one is left out.

        An offset beyond the end (the file was replaced) starts again at 0. Of a log that cannot be read there are none.
        """
        try:
            with self.events_file.open("rb") as file:
                if offset > file.seek(0, os.SEEK_END):
                    offset = 0
                file.seek(offset)
                data = file.read()
        except OSError:
            return [], 0
        end = data.rfind(b"\n") + 1
        return lines_of(data[:end]), offset + end

    def history(self) -> list[Event]:
        """All events so far."""
        return read(self.events()[0])

    def stop_requested(self) -> bool:
        return os.path.exists(self.stop_file)

    def request_stop(self) -> None:
        """Asks the training to finish its step, save and end."""
        write_atomically(self.stop_file, "stop\n")

    def clear_stop(self) -> None:
        """Takes a request back; a resumed run starts with it."""
        self.stop_file.unlink(missing_ok=True)

    def evaluation_requested(self) -> bool:
        return Asked.SAMPLES in self.orders.asked()

    def request_evaluation(self) -> None:
        """Asks the training to evaluate after the step it is at."""
        self.orders.ask(Asked.SAMPLES)

    def clear_evaluation(self) -> None:
        """Takes a request back; an evaluation that begins does."""
        self.orders.take_back(Asked.SAMPLES)
