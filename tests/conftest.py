"""What all tests share: how much of the processors each folder of tests takes, told at the end of a run."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterator

import psutil
import pytest

CPU_SECONDS = "cpu_seconds"


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes what a test takes with its fixtures; the last report of a test carries it to the process that prints."""
    item.stash[_BEFORE] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "teardown":
        # A process that a test leaves to the system takes with it what earlier tests were told of it.
        item.user_properties.append((CPU_SECONDS, max(0.0, cpu_seconds() - item.stash[_BEFORE])))
    return (yield)


_BEFORE = pytest.StashKey[float]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CPU seconds by folder, the most expensive first."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                seconds[_folder(report.nodeid)] += dict(report.user_properties).get(CPU_SECONDS, 0.0)
    if sum(seconds.values()) > 10:
        rows = sorted(seconds.items(), key=lambda row: -row[1])
        terminalreporter.section("CPU seconds")
        terminalreporter.write_line(
            ", ".join(f"{folder} {spent:.0f}" for folder, spent in rows) + f"; together {sum(seconds.values()):.0f}"
        )


def _folder(test: str) -> str:
    """tests/library/data/test_x.py::y -> tests/library/data."""
    return os.path.dirname(test.partition("::")[0])
