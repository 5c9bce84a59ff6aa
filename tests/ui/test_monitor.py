"""The event log as a person sees it: whole, half-written, replaced, damaged or a million lines long."""

from __future__ import annotations

import itertools
import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_like import causes, monitor
from kohya_like.console import OPEN_BYTES, TAIL_BYTES, last_lines, plain, read_console
from kohya_like.monitor import GPU_SECTIONS, SECTIONS, Curve, Progress, read_events, summary
from sd_scripts.runs.events import RunFailed, RunFinished, number, read

JSON = st.sampled_from(
    [None, True, False, 0, -3, 7, 10**12, 0.5, -1e30, 1e-300, "", "train", "cache", "é\u2028", [], [1.0, "x"], {}, {"unet": 1e-4}]
)
quick = settings(max_examples=40, deadline=None)
KINDS = ("started", "phase", "cached", "step", "validation", "saved", "sample", "warning", "finished", "stopped", "failed", "unheard of")
NAMES = (
    "step",
    "steps",
    "start_step",
    "loss",
    "lr",
    "seconds",
    "data_fetch",
    "fwd_bwd",
    "opt_step",
    "step_total",
    "fwd_bwd_gpu",
    "opt_step_gpu",
    "step_total_gpu",
    "eta_seconds",
    "time",
    "name",
    "what",
    "done",
    "total",
    "text",
    "index",
    "file",
)
EVENT = st.builds(
    lambda kind, fields: {**fields, "kind": kind}, st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
)


def steps(first: int, last: int, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "time": 100.0 + step, "step": step, "loss": 1 / step, "lr": 1e-4, "seconds": 0.5, **fields}
        for step in range(first, last)
    ]


def lines(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)


# Reading


@quick
@given(events=st.lists(EVENT, max_size=12), cut=st.integers(0, 4000), limit=st.integers(200, 4000))
def test_reading_in_pieces_of_any_size_gives_every_event_once(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]], cut: int, limit: int
) -> None:
    file = tmp_path_factory.mktemp("log") / "events.jsonl"
    whole = lines(events)
    longest = max((len(line) for line in whole.splitlines(True)), default=0)
    found, offset = [], 0
    for content in (whole[:cut], whole):
        file.write_bytes(content)
        complete = False
        while not complete:
            chunk = read_events(file, offset, max(limit, longest + 1))
            assert not chunk.reset and chunk.offset >= offset
            assert chunk.offset == 0 or content[chunk.offset - 1 : chunk.offset] == b"\n"
            found += chunk.events
            offset, complete = chunk.offset, chunk.complete
    assert found == events and offset == len(whole)


@quick
@given(junk=st.binary(max_size=300))
def test_damaged_lines_are_left_out_and_the_rest_is_read(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    file = tmp_path_factory.mktemp("log") / "events.jsonl"
    file.write_bytes(lines(steps(1, 3)) + junk + b"\n" + lines(steps(3, 5)))
    found = [event for event in read_events(file).events if event["kind"] == "step" and event.get("seconds") == 0.5]
    assert [event["step"] for event in found] == [1, 2, 3, 4]


def test_a_replaced_shorter_file_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(lines(steps(1, 50)))
    offset = read_events(file).offset
    file.write_bytes(lines(steps(1, 3)))
    chunk = read_events(file, offset)
    assert chunk.reset and [event["step"] for event in chunk.events] == [1, 2]
    file.unlink()
    assert read_events(file, chunk.offset).reset


def test_an_endless_line_does_not_stop_the_reading(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"x" * 5000 + b"\n" + lines(steps(1, 3)))
    found, offset = [], 0
    for _ in range(20):
        chunk = read_events(file, offset, limit=1000)
        found, offset = found + chunk.events, chunk.offset
    assert [event["step"] for event in found] == [1, 2]


# Folding


@quick
@given(st.lists(EVENT, max_size=30))
def test_no_event_however_strange_breaks_the_view(events: list[dict[str, Any]]) -> None:
    progress = Progress()
    progress.fold(events)
    json.dumps([point.row() for point in progress.curve.points], allow_nan=False)
    fraction = progress.fraction()
    assert fraction is None or fraction <= 1
    assert progress.eta_seconds(1e9) is None or progress.eta_seconds(1e9) >= 0


@quick
@given(st.lists(EVENT, max_size=30), st.integers(0, 30))
def test_folding_in_two_parts_is_folding_at_once(events: list[dict[str, Any]], cut: int) -> None:
    once, twice = Progress(), Progress()
    once.fold(events)
    twice.fold(events[:cut])
    twice.fold(events[cut:])
    assert once == twice or (vars(once) | {"curve": 0}) == (vars(twice) | {"curve": 0})
    assert once.curve.points == twice.curve.points and once.curve.generation == twice.curve.generation


def test_phases_follow_the_log_and_the_last_word_counts() -> None:
    progress = Progress()
    seen = []
    for event in [
        {"kind": "started", "time": 1.0, "steps": 10},
        {"kind": "phase", "name": "scan", "time": 2.0},
        {"kind": "cached", "what": "latents", "done": 3, "total": 12, "time": 3.0},
        {"kind": "phase", "name": "train", "time": 4.0},
        *steps(1, 4),
        {"kind": "phase", "name": "sample", "time": 104.0},
        {"kind": "finished", "step": 10, "time": 120.0},
    ]:
        progress.fold([event])
        seen.append((progress.phase, progress.fraction()))
    assert seen[0] == ("load", 0.0) and seen[2] == ("cache", 0.25)
    assert seen[6] == ("train", pytest.approx(0.3)) and seen[-1][0] == "finished" and progress.farewell is not None
    assert progress.eta_seconds(200.0) is None


def test_the_eta_counts_down_between_log_lines_and_is_made_from_the_median_where_the_log_has_none() -> None:
    progress = Progress()
    progress.fold([{"kind": "started", "steps": 100}, *steps(1, 11)])
    assert progress.eta_seconds(110.0) == pytest.approx(45.0) and progress.eta_seconds(113.0) == pytest.approx(42.0)
    progress.fold(steps(11, 12, eta_seconds=7.0))
    assert progress.eta_seconds(112.0) == pytest.approx(6.0) and progress.eta_seconds(900.0) == 0.0
    # How long a run is paused nobody knows.
    progress.fold([{"kind": "phase", "name": "pause", "time": 112.0}])
    assert progress.eta_seconds(115.0) is None
    progress.fold([{"kind": "phase", "name": "train", "time": 900.0}, *steps(12, 13, eta_seconds=5.0)])
    assert progress.eta_seconds(112.0) is not None


def test_the_eta_and_the_bar_count_to_the_step_after_which_somebody_has_asked_it_to_stop() -> None:
    progress = Progress()
    progress.fold([{"kind": "started", "steps": 100}, *steps(1, 11)])
    assert progress.eta_seconds(110.0, 40) == pytest.approx(15.0) and progress.fraction(40) == pytest.approx(0.25)
    # What the trainer tells has the pauses that are still to come in it; they come evenly.
    progress.fold(steps(11, 21, eta_seconds=160.0))
    assert progress.eta_seconds(120.0, 40) == pytest.approx(40.0) and progress.fraction(40) == pytest.approx(0.5)
    assert progress.eta_seconds(120.0, 20) == 0.0 and progress.fraction(20) == 1.0
    progress.fold([{"kind": "phase", "name": "cache"}, {"kind": "cached", "what": "latents", "done": 3, "total": 12}])
    assert progress.fraction(40) == 0.25, "of the caches"


def test_a_resumed_run_forgets_what_it_will_do_again_and_its_old_farewell() -> None:
    progress = Progress()
    progress.fold(
        [{"kind": "started", "steps": 100}, *steps(1, 60), {"kind": "validation", "step": 50, "loss": 0.3}, {"kind": "failed", "step": 59}]
    )
    generation = progress.curve.generation
    progress.fold([{"kind": "started", "steps": 100, "start_step": 40}])
    assert progress.farewell is None and progress.step == 40 and progress.validation == []
    assert progress.curve.points[-1].step == 40 and progress.curve.generation > generation
    progress.fold(steps(41, 45))
    assert [point.step for point in progress.curve.points] == list(range(1, 45))


def test_the_speed_and_the_end_of_a_resumed_run_are_those_of_its_new_session() -> None:
    progress = Progress()
    told = {"step_in_session": 59, "trained_seconds": 590.0, "paused_seconds": 9.0, "seconds_per_step": 10.0, "eta_seconds": 410.0}
    progress.fold([{"kind": "started", "steps": 100}, *steps(1, 60, **told), {"kind": "stopped", "step": 59, "time": 160.0}])
    # It stopped in good order, so it goes on from exactly the last step that was logged.
    progress.fold([{"kind": "started", "steps": 100, "start_step": 59, "time": 5000.0}])
    assert progress.step == 59 and progress.eta_seconds(5000.0) is None and progress.seconds_per_step is None
    told = {"step_in_session": 1, "trained_seconds": 0.5, "paused_seconds": 0.0, "seconds_per_step": 0.5, "eta_seconds": 20.0}
    progress.fold(steps(60, 61, **told))
    assert progress.eta_seconds(160.0) == 20.0 and progress.seconds_per_step == 0.5
    assert (progress.sessions.present.trained_seconds, progress.sessions.total.trained_seconds, progress.sessions.count) == (0.5, 590.5, 2)


def test_a_repeated_preview_replaces_the_older_one_and_equal_warnings_are_counted() -> None:
    progress = Progress()
    progress.fold({"kind": "sample", "step": 5, "index": 0, "file": name} for name in ("a.png", "b.png"))
    progress.fold({"kind": "warning", "text": "hot"} for _ in range(3))
    assert [event.file for event in progress.samples.values()] == ["b.png"] and progress.warnings == {"hot": 3}


# The curve


@quick
@given(st.floats(1e-6, 1e6))
def test_the_smoothed_curve_of_a_constant_is_the_constant(value: float) -> None:
    curve = Curve()
    for step in range(1, 200):
        curve.add(step, value, 0.0)
    assert all(point.smooth == pytest.approx(value) for point in curve.points)


def test_smoothing_removes_noise_and_keeps_the_level() -> None:
    rng, curve = random.Random(random.getrandbits(64)), Curve()
    for step in range(1, 3000):
        curve.add(step, 1.0 + rng.gauss(0, 0.3), 0.0)
    tail = [point.smooth for point in curve.points[-1000:]]
    spread = math.sqrt(sum((value - 1.0) ** 2 for value in tail) / len(tail))
    # An exponential average of weight w has the variance w / (2 - w) of what it averages.
    assert spread < 1.8 * 0.3 * math.sqrt(0.02 / 1.98)


@quick
@given(st.integers(1, 700), st.integers(4, 60))
def test_thinning_keeps_the_mean_the_extremes_and_the_ends(count: int, room: int) -> None:
    rng, curve = random.Random(count), Curve(room)
    losses = [rng.random() for _ in range(count)]
    for step, loss in enumerate(losses, 1):
        curve.add(step, loss, 0.0)
    points = curve.points
    assert len(points) <= 2 * room and sum(point.count for point in points) == count
    assert sum(point.loss * point.count for point in points) / count == pytest.approx(sum(losses) / count)
    assert min(point.low for point in points) == min(losses) and max(point.high for point in points) == max(losses)
    assert points[-1].step == count and [point.step for point in points] == sorted({point.step for point in points})


@pytest.mark.parametrize("count", [60_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_log_of_any_length_stays_small_in_memory_and_is_read_in_bounded_pieces(tmp_path: Path, count: int) -> None:
    file = tmp_path / "events.jsonl"
    with file.open("wb") as stream:
        for first in range(0, count, 10_000):
            stream.write(b"".join(b'{"kind":"step","step":%d,"loss":0.5}\n' % step for step in range(first + 1, first + 10_001)))
    progress, offset, complete, pieces = Progress(), 0, False, 0
    # Memory is measured at the beginning, since measuring is slow; a piece is as large there as anywhere.
    tracemalloc.start()
    while not complete:
        chunk = read_events(file, offset, limit=1 << 18)
        progress.fold(chunk.events)
        offset, complete, pieces = chunk.offset, chunk.complete, pieces + 1
        if pieces == 3:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert progress.step == count and 2000 <= len(progress.curve.points) <= 4000
    assert peak < 12 << 20


# The list of runs


@quick
@given(count=st.integers(1, 80), room=st.integers(2, 12), seed=st.integers(0, 2**32))
def test_the_times_of_merged_points_are_the_means_of_theirs(count: int, room: int, seed: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.random() for _ in (*SECTIONS, *GPU_SECTIONS)] for _ in range(count)]
    progress = Progress(curve=Curve(max_points=room))
    for step, row in enumerate(rows, 1):
        told = dict(zip((*SECTIONS, *GPU_SECTIONS), row, strict=True))
        progress.fold([{"kind": "step", "step": step, "loss": 1.0, "lr": 1e-4, **told}])
    points = progress.curve.points
    assert sum(point.count for point in points) == count
    for column, values in enumerate(zip(*rows, strict=True)):
        total = sum(point.seconds[column] * point.count for point in points)
        assert total == pytest.approx(sum(values))


def test_a_step_that_does_not_tell_all_its_times_tells_none() -> None:
    told = {"data_fetch": 0.1, "fwd_bwd": 0.5, "opt_step": 0.2, "step_total": 0.9}

    def sections(line: dict[str, Any]) -> tuple[float, ...]:
        (event,) = read([{"kind": "step", **line}])
        return monitor.sections(event)  # type: ignore[arg-type]

    assert sections(told) == (0.1, 0.5, 0.2, 0.9)
    assert sections({**told, "fwd_bwd_gpu": 0.4}) == (0.1, 0.5, 0.2, 0.9)
    assert sections({**told, "fwd_bwd_gpu": 0.4, "opt_step_gpu": 0.1, "step_total_gpu": 0.6}) == (0.1, 0.5, 0.2, 0.9, 0.4, 0.1, 0.6)
    assert sections({**told, "opt_step": None}) == ()
    curve = Curve(max_points=1)
    for step, seconds in enumerate([(), (1.0, 2.0, 3.0, 7.0), (3.0, 4.0, 5.0, 13.0), ()], 1):
        curve.add(step, 1.0, 1e-4, seconds)
    assert all(len(point.seconds) == 4 for point in curve.points), "a line without times takes nothing from its neighbour"


def test_the_summary_of_a_long_log_reads_its_ends_only(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(lines([{"kind": "started", "time": 5.0, "steps": 90_000, "pid": 77}, *steps(1, 80_000)]))
    process = psutil.Process()
    before = process.io_counters().read_chars
    brief = summary(file)
    assert file.stat().st_size > 5_000_000 and process.io_counters().read_chars - before < 500_000
    assert (brief.step, brief.steps, brief.pid, brief.started_at, brief.farewell) == (79_999, 90_000, 77, 5.0, None)
    assert brief.loss == pytest.approx(1 / 79_999, rel=0.01)


def test_a_log_is_read_again_only_when_it_has_grown(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(lines([{"kind": "started", "steps": 9_000, "pid": 77}, *steps(1, 5_000)]))
    process = psutil.Process()
    first = summary(file)
    before = process.io_counters().read_chars
    assert summary(file) == first
    assert process.io_counters().read_chars - before < 10_000
    with file.open("ab") as stream:
        stream.write(lines(steps(5_000, 5_010)))
    assert summary(file).step == first.step + 10


def test_a_farewell_before_the_start_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    old = lines([{"kind": "started", "steps": 9}, *steps(1, 5), {"kind": "stopped", "step": 4}])
    file.write_bytes(old)
    assert summary(file).farewell is not None and summary(file, since=len(old)).farewell is None
    file.write_bytes(old + lines([{"kind": "started", "steps": 9, "start_step": 4}, {"kind": "finished", "step": 9}]))
    assert isinstance(summary(file, since=len(old)).farewell, RunFinished)
    assert summary(tmp_path / "missing").step == 0


# The console


def show(file: Path, pieces: list[bytes]) -> list[str]:
    """What the page shows when the console grows piece by piece."""
    shown: list[str] = []
    offset, written, open_line = -1, b"", ""
    for piece in pieces:
        written += piece
        file.write_bytes(written)
        chunk = read_console(file, offset)
        shown = list(chunk.lines) if chunk.reset else shown + list(chunk.lines)
        offset, open_line = chunk.offset, chunk.open
    return [*shown, open_line]


@quick
@given(
    parts=st.lists(st.sampled_from(["a", "é", "日本", "\r", "\n", "\r\n", " 10%", "\x1b[31mred\x1b[0m", "x" * 50]), max_size=40),
    cuts=st.lists(st.integers(1, 200), max_size=6),
)
def test_the_console_reads_the_same_in_any_pieces(tmp_path_factory: pytest.TempPathFactory, parts: list[str], cuts: list[int]) -> None:
    file = tmp_path_factory.mktemp("run") / "console.log"
    data = "".join(parts).encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert show(file, pieces) == show(file, [data])


def test_a_carriage_return_takes_the_line_back(tmp_path: Path) -> None:
    assert show(tmp_path / "c", [b"start\r\n 10%\r 20", b"%\r 30%", b"\ndone\n"]) == ["start", " 30%", "done", ""]
    assert show(tmp_path / "c", [b"\r 10%\r 20%\r"]) == [" 20%"]


def test_a_progress_bar_of_megabytes_is_read_from_its_end_each_time(tmp_path: Path) -> None:
    file = tmp_path / "console.log"
    file.write_bytes(b"begin\n")
    offset = read_console(file).offset
    with file.open("ab") as stream:
        for step in range(0, 20_000, 500):
            stream.write(b"".join(b"\r%6d/20000 [=====>      ]" % each for each in range(step, step + 500)))
            stream.flush()
            chunk = read_console(file, offset)
            assert chunk.open.startswith(f"{step + 499:6d}/20000") and not chunk.lines and not chunk.reset
            offset = chunk.offset
            assert stream.tell() - offset <= OPEN_BYTES


def test_a_long_console_shows_its_tail_and_a_replaced_one_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "console.log"
    file.write_text("".join(f"línea {index}\n" for index in range(100_000)), encoding="utf-8")
    chunk = read_console(file)
    assert chunk.reset and chunk.lines[-1] == "línea 99999" and sum(map(len, chunk.lines)) < TAIL_BYTES
    assert all(line.startswith("línea ") for line in chunk.lines)
    assert last_lines(file, 2) == ["línea 99998", "línea 99999"]
    file.write_text("new\n")
    again = read_console(file, chunk.offset)
    assert again.reset and again.lines == ("new",)
    assert read_console(tmp_path / "missing", 5).reset


def test_colours_cursor_moves_and_access_tokens_never_reach_the_page() -> None:
    assert plain("\x1b[1;32mok\x1b[0m\x1b[A \x1b]0;title\x07 done\x00") == "ok  done"
    assert plain("token hf_abcdefghijklmnopqrstuvwxyz123456 used") == "token hf_*** used"


# Causes


@pytest.mark.parametrize(
    ("line", "returncode", "word", "advice"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 1, "GPU ran out", "train_batch_size"),
        ("RuntimeError: HIP out of memory", 1, "GPU ran out", "train_batch_size"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", 1, "RAM", "memory"),
        ("ModuleNotFoundError: No module named 'bitsandbytes'", 1, "bitsandbytes is not installed", "setup.sh install"),
        ("OSError: [Errno 28] No space left on device: 'x'", 1, "disk is full", "output_dir"),
        ("RuntimeError: Found no NVIDIA driver on your system", 1, "driver", "TORCH_SPEC"),
        ("CUDA error: no kernel image is available for execution on the device", 1, "no code for your GPU", "TORCH_SPEC"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", 1, "NCCL", "rank"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", 1, "failed computation", "Resume"),
        ("The server socket has failed to bind: EADDRINUSE", 1, "port", "other run"),
        ("RuntimeError: DataLoader worker (pid 3) is killed by signal: Bus error", 1, "data worker", "shm"),
        ("NonFiniteLoss: step 7", 1, "not a number", "learning_rate"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", 1, "damaged", "Download"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error", 1, "licence", "HF_TOKEN"),
        ("subprocess.CalledProcessError: Command died with <Signals.SIGKILL: 9>.", 1, "SIGKILL", "memory"),
        ("exitcode  : -9 (pid: 55)", 1, "SIGKILL", "memory"),
        ("E1122 api.py:1002] failed (exitcode: -9) local_rank: 3 (pid: 13819) of binary: python", 1, "local rank 3 was killed", "memory"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", 1, "/data/x", "permissions"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/gone.png'", 1, "/gone.png", "path"),
        ("", -9, "SIGKILL", "memory"),
        ("", 137, "SIGKILL", "memory"),
        ("", -11, "segmentation fault", "doctor"),
        ("", 143, "SIGTERM", "Resume"),
        ("", None, "disappeared", "Resume"),
        ("", 2, "refused its settings", "Train tab"),
        ("", 127, "could not be started", "doctor"),
        ("", 55, "code 55", "log"),
    ],
)
def test_known_causes_are_told_with_what_to_change(line: str, returncode: int | None, word: str, advice: str) -> None:
    cause = causes.diagnose(["loading", line, "  File x, line 3"], returncode, None)
    assert word in cause.text and advice in cause.advice
    assert cause.text.endswith((".", line.split("'")[-2] if "'" in line else "."))


_ACCELERATE = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/site-packages/accelerate/commands/launch.py", line 1419, in main
    launch_command(args)
  File "/site-packages/accelerate/commands/launch.py", line 999, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1."""
_TORCHRUN = """Traceback (most recent call last):
  File "/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 4518)
============================================================"""


def test_what_a_launcher_says_of_the_end_is_left_out_of_the_last_lines() -> None:
    """As accelerate 1.15 and torchrun of torch 2.13 write it; tests/ui/test_journey.py has accelerate itself."""
    own = ["loading", "Traceback (most recent call last):", "ZeroDivisionError: division by zero"]
    for said in (_ACCELERATE, _TORCHRUN, ""):
        assert causes.without_launcher([*own, *said.splitlines()]) == own


def test_the_words_of_the_training_itself_come_first() -> None:
    said = RunFailed(text="12 images cannot be read.", advice="Replace them.")
    assert causes.diagnose(["CUDA out of memory"], 1, said) == causes.Cause("12 images cannot be read.", "Replace them.")
    silent = causes.diagnose([], 1, RunFailed(text="OSError: [Errno 28] No space left on device"))
    assert silent.text.startswith("OSError") and "output_dir" in silent.advice


@quick
@given(
    st.lists(st.sampled_from(["", "{0}", "Traceback", "No module named 'x'", "ModuleNotFoundError: No module named 'a.b'"]), max_size=5),
    st.none() | st.integers(-70, 300),
)
def test_every_end_gets_a_sentence(log: list[str], returncode: int | None) -> None:
    cause = causes.diagnose(log, returncode, None)
    assert len(cause.text) > 10 and "{" not in cause.text


def test_a_number_is_finite_and_no_truth_value() -> None:
    assert [number(value) for value in (1, 2.5, True, "3", None, math.inf, math.nan)] == [1.0, 2.5, None, None, None, None, None]
