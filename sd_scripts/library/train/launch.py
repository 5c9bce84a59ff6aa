"""What a script does: read the options, then train; every error ends as a sentence, an event and an exit code.

Nothing heavy is imported before the options are known to be right: `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sd_scripts import programs
from sd_scripts.families import RUNS
from sd_scripts.library.core.errors import OutOfMemory, TrainingError
from sd_scripts.runs.early_checks import check_early, check_settings, missing_packages
from sd_scripts.runs.events import RunFailed, RunFinished, RunStopped
from sd_scripts.runs.importing import uncollected
from sd_scripts.runs.launcher import REFUSED_FILE
from sd_scripts.runs.rundir import RunDirectory, RunFolderLost
from sd_scripts.runs.stopping import Stopped, StopRequest
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError

if TYPE_CHECKING:
    from sd_scripts.library.parallel.peers import PeerLost

    from .process import Process

log = logging.getLogger("sd_scripts")

OTHER_OPTIONS = "change these options and start again"


def main(family: str, method: str, argv: Sequence[str] | None = None) -> None:
    """Trains what the command line asks for. Ends the process: 0 finished, stopped or nothing to do; 1 failed; 2 wrong options; 130 stopped
    before the answer of --estimate or --dry_run."""
    run = RUNS[family, method]
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        asked = command_line.parse_cli(run, arguments, programs.of_config_file)
        if asked.dry_run:
            check_settings(asked.options)
            asked = replace(asked, notes=(*asked.notes, *map(str, missing_packages(asked.options))))
        else:
            check_early(asked.options, trains_here=not asked.estimate)
        # The configuration that a run folder keeps must mean the same when a studio in another folder goes on with it.
        asked = replace(asked, options=flat.with_absolute_paths(asked.options))
    except OptionError as err:
        _log_refusal(arguments, err)
        if _rank() == 0:
            command_line.fail(err, run.script)
        raise SystemExit(2) from None
    raise SystemExit(start(asked))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _mark_refusal() -> None:
    """Tells a launcher around us that a second start would end the same."""
    file = os.environ.get(REFUSED_FILE)
    if file:
        with suppress(OSError):
            Path(file).touch()


def _log_refusal(arguments: Sequence[str], err: OptionError) -> None:
    """A run folder that was made already gets its last word even when its configuration is refused."""
    _mark_refusal()
    given = [value for name, value in itertools.pairwise(arguments) if name == "--run_dir"]
    if _rank() == 0 and given and Path(given[-1]).is_dir():
        with suppress(OSError):
            RunDirectory(Path(given[-1])).log(RunFailed(step=0, text=str(err), advice=OTHER_OPTIONS, refused=True))


def start(asked: command_line.Invocation) -> int:
    """Trains, and turns whatever happens into a last event and an exit code."""
    # Set before any library reads them. Progress and sentences are ours; a model that must be fetched is still fetched.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # What deterministic cuBLAS asks for; it costs 24 MiB and must be there before CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    logging.basicConfig(level=logging.INFO if _rank() == 0 else logging.ERROR, format="%(message)s", stream=sys.stderr)
    stop = StopRequest()
    process: Process | None = None
    try:
        with stop.listening():
            with uncollected("torch"):
                from sd_scripts.library.memory.forecast.answers import for_estimate

                from . import session
                from .process import Process

            if asked.estimate:
                asked = for_estimate(asked)
            process = Process.begin(asked, stop)
            if asked.estimate or asked.dry_run or asked.cache_only:
                for note in asked.notes:
                    log.warning("%s", note)
            if asked.estimate:
                sys.stdout.write(session.estimate(process, asked) + "\n")
                return 0
            if asked.dry_run:
                sys.stdout.write(session.dry_run(process, asked) + "\n")
                return 0
            if asked.cache_only:
                said = session.fill_caches(process, asked)
                if _rank() == 0:
                    sys.stdout.write(said + "\n")
                process.last_word(RunFinished(text=said))
                return 0
            ending = session.train(process, asked)
            process.last_word((RunFinished if ending.finished else RunStopped)(text=ending.text))
            return 0
    except Stopped:
        return _stopped(process, asked)
    except Exception as err:
        return _failed(process, err, asked)
    finally:
        if process is not None:
            process.close()


def _stopped(process: Process | None, asked: command_line.Invocation) -> int:
    if asked.estimate or asked.dry_run:
        log.error("stopped before there was an answer")
        return 130
    if process is not None:
        lost = process.peers.lost()
        if lost is not None:
            # A launcher asks the others to stop when one process has ended; why that one did is what counts.
            return _failed(process, lost, asked)
        process.peers.tell_end("stopped", stopped=True)
        process.last_word(RunStopped(text="stopped; what is cached and saved stays"))
    elif _rank() == 0 and asked.run_dir is not None and asked.run_dir.is_dir():
        with suppress(OSError):
            RunDirectory(asked.run_dir).log(RunStopped(step=0, text="stopped before the first step"))
    log.info("stopped")
    # PyTorch, stopped while it is imported, says at the end how its caches did.
    logging.getLogger("torch").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request to the hub
    return 0


def _failed(process: Process | None, err: Exception, asked: command_line.Invocation) -> int:
    """The sentence on the console, the `failed` event, and the exit code of an error."""
    text, advice, code = _one_line(err), "the whole error is in console.log; please report it", 1
    lost = _is_lost(err)
    if isinstance(err, OptionError):
        _mark_refusal()
        text, advice, code = str(err), OTHER_OPTIONS, 2
        if _rank() == 0:
            sys.stderr.write(f"{asked.options.script}: nothing was trained:\n" + "".join(f"  - {problem}\n" for problem in err.problems))
    elif isinstance(err, ImportError):
        # Nothing below may be importable then either.
        advice = "bash setup.sh doctor names the package that is wrong, bash setup.sh install brings it back"
        log.error("a package this needs cannot be imported; %s", advice, exc_info=err)
    elif lost is not None:
        assert process is not None
        text, advice = process.about_loss(lost), lost.advice
        if process.peers.speaks:
            sys.stderr.write(f"{text}\n")
    elif isinstance(err, RunFolderLost):
        text, advice = str(err), "bring the folder back and start again, or start a new run"
        log.error("%s; %s", text, advice)
    elif _is_out_of_memory(err):
        text = str(err) if isinstance(err, OutOfMemory) else "the device has no memory left"
        advice = _advice(process, asked)
        sys.stderr.write(f"{text}. What would help most: {advice}\n")
        log.debug("out of memory", exc_info=err)
    elif isinstance(err, TrainingError):
        text, advice = str(err), ""
        sys.stderr.write(f"{text}\n")
    else:
        log.error("unexpected error", exc_info=err)
    if process is not None:
        if lost is None:
            process.peers.tell_end(text, advice)
        if process.peers.speaks or "distributed_timeout" in text:
            process.last_word(RunFailed(text=text, advice=advice, refused=code == 2))
    elif process is None and _rank() == 0 and asked.run_dir is not None and asked.run_dir.is_dir():
        with suppress(OSError):
            RunDirectory(asked.run_dir).log(RunFailed(step=0, text=text, advice=advice, refused=code == 2))
    return code


def _advice(process: Process | None, asked: command_line.Invocation) -> str:
    """What to change after running out of memory."""
    if process is None:
        return "a smaller model"
    from sd_scripts.library.memory.oom_advice import oom_advice

    from .environment import with_global_batch, with_precision

    options = with_global_batch(with_precision(asked.options, process.device), process.peers.world)
    return "; ".join(oom_advice(options, process.device.type == "cuda", process.work))


def _is_lost(err: Exception) -> PeerLost | None:
    if not isinstance(err, TrainingError):
        # The module below needs what may not be importable just now.
        return None
    from sd_scripts.library.parallel.peers import PeerLost

    return err if isinstance(err, PeerLost) else None


def _is_out_of_memory(err: Exception) -> bool:
    from sd_scripts.library.memory.oom_advice import is_out_of_memory

    return is_out_of_memory(err)


def _one_line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[-1] if lines else 'no message'}"
