"""What all tests share: how much of the processors each folder of tests takes, told at the end of a run."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from kohya_like import startup
from tests.trees import ENVIRONMENT

# For whoever calls pytest by hand. Before torch is imported: a process that was forked has one thread of a pool, and another number of
# threads gives other bits.
for _name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "GRADIO_ANALYTICS_ENABLED"):
    os.environ.setdefault(_name, ENVIRONMENT[_name])
# The page is imported while tests are collected.
startup.without_stubs()

CPU_SECONDS = "cpu_seconds"
SECONDS = Path(__file__).with_name("seconds.json")
"""What files of tests took that took long, in seconds of the clock; a run with --note_seconds writes what it finds."""
NOTED_FROM_SECONDS = 5
TOLD_FROM_SECONDS = 10
"""CPU seconds of a file of tests from which the end of a run names it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note_seconds", action="store_true", help=f"write into {SECONDS.name} what each file of tests took")
    parser.addoption("--seed", type=int, help="what tests draw from; 0 without the long tests, another one each time with them")


def pytest_report_header(config: pytest.Config) -> str:
    return f"drawn with --seed {config.option.seed}"


def _seeded(config: pytest.Config, path: Path) -> None:
    """A file's constants, its fixtures and each of its tests begin to draw in the same place, whatever ran before and with which others."""
    random.seed(f"{config.option.seed} {path.name}")
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(random.getrandbits(32))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    _seeded(collector.config, collector.path)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Makes the cases long that `covering` leaves to --all, before those are left out, and has files that take long begin first: of several
    processes each takes the next file, and begun last, a long one would keep one of them busy while the others have ended."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        chosen = covering([{name: id(value) for name, value in case.callspec.params.items()} for case in several])
        for number in set(range(len(several))) - chosen:
            several[number].add_marker("long")
    yield
    if hasattr(config, "workerinput"):
        seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
        items.sort(key=lambda item: -seconds.get(_file(item.nodeid), NOTED_FROM_SECONDS))


def covering(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Numbers of few cases in which each value of each parameter occurs, in the order in which they are found.

    A case is chosen that has most values which no other has yet; of equal ones the one whose values have occurred least.
    """
    left = {value for case in cases for value in case.items()}
    seen: Counter[tuple[str, int]] = Counter()
    chosen: set[int] = set()
    while left:
        best = max(
            range(len(cases)), key=lambda number: (len(left & cases[number].items()), -sum(seen[one] for one in cases[number].items()))
        )
        chosen.add(best)
        seen.update(cases[best].items())
        left -= cases[best].items()
    return chosen


def cpu_seconds() -> float:
    """Of this process, of those it started and that have ended, and of those that are still at work below it."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def pytest_configure(config: pytest.Config) -> None:
    """Without the long tests what is drawn is the same each time, so that no run fails by luck; with them (--all) it is fresh."""
    always = config.option.markexpr == "not long"
    if config.option.seed is None:
        # Here before the processes that run the tests are started, which are given it.
        config.option.seed = 0 if always else random.SystemRandom().getrandbits(32)
    settings.register_profile("same", derandomize=True, deadline=None, print_blob=True)
    settings.register_profile("fresh", deadline=None, print_blob=True)
    settings.load_profile("same" if always else "fresh")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests that are there before the first test runs stay to the end; nobody looks through them for garbage, and through what
    comes later less often than Python does by itself, which took a tenth of the time of tests with models."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Notes what a file of tests takes with its fixtures; the last report of its last test carries it to the process that prints.

    Once for a file: asking the system for all processes takes 3 ms, as long as most tests.
    """
    if _BEFORE not in item.config.stash:
        item.config.stash[_BEFORE] = cpu_seconds()
    item.stash[_IS_LAST] = nextitem is None or nextitem.path != item.path
    _seeded(item.config, item.path)
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "teardown" and item.stash[_IS_LAST]:
        before, now = item.config.stash[_BEFORE], cpu_seconds()
        # A process that a test leaves to the system takes with it what earlier tests were told of it.
        item.user_properties.append((CPU_SECONDS, max(0.0, now - before)))
        item.config.stash[_BEFORE] = now
    return (yield)


_BEFORE = pytest.StashKey[float]()
"""What this process and those below it had taken when the last test of a file had ended."""
_IS_LAST = pytest.StashKey[bool]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CPU seconds by folder, the most expensive first, and the files that take most; where a test failed, how to draw the same again."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(pytest_report_header(terminalreporter.config))
    seconds: dict[str, float] = defaultdict(float)
    of_file: dict[str, float] = defaultdict(float)
    of_clock: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                spent = dict(report.user_properties).get(CPU_SECONDS, 0.0)
                seconds[_folder(report.nodeid)] += spent
                of_file[_file(report.nodeid)] += spent
            of_clock[_file(getattr(report, "nodeid", ""))] += getattr(report, "duration", 0.0)
    if terminalreporter.config.getoption("note_seconds"):
        noted = json.loads(SECONDS.read_text(encoding="utf-8")) | {file: round(took) for file, took in of_clock.items()}
        kept = {file: took for file, took in sorted(noted.items()) if took >= NOTED_FROM_SECONDS and Path(file).is_file()}
        SECONDS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    if sum(seconds.values()) > 10:
        terminalreporter.section("CPU seconds")
        terminalreporter.write_line(f"{_rows(seconds)}; together {sum(seconds.values()):.0f}")
        terminalreporter.write_line(_rows({file: spent for file, spent in of_file.items() if spent >= TOLD_FROM_SECONDS}))


def _rows(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{where} {spent:.0f}" for where, spent in sorted(seconds.items(), key=lambda row: -row[1]))


def _file(test: str) -> str:
    """tests/library/data/test_x.py::y -> tests/library/data/test_x.py."""
    return test.partition("::")[0]


def _folder(test: str) -> str:
    """tests/library/data/test_x.py::y -> tests/library/data."""
    return os.path.dirname(_file(test))
