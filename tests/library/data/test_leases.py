"""Several processes fill one cache: each thing is encoded once, and what a dead process had begun is done by another."""

from __future__ import annotations

import json
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from sd_scripts.library.data import leases
from sd_scripts.library.data.cache import Cache
from sd_scripts.library.data.leases import Leases, leases_in
from tests.forked import forked
from tests.library.data.filler import fill_cache, job


def told_by(filler: BaseProcess, folder: Path) -> int:
    """How many things a process says that it has made, once it is done."""
    filler.join(120)
    assert filler.exitcode == 0
    return int((folder / f"made-{filler.pid}").read_text())


def encoded(folder: Path) -> list[tuple[int, int]]:
    """(process, group) of every encoding, in order."""
    lines = (folder / "log").read_text().splitlines() if (folder / "log").is_file() else []
    return [(int(process), int(group)) for process, group in (line.split() for line in lines)]


def is_whole(folder: Path, num_groups: int) -> bool:
    cache = Cache(folder / "cache")
    work = job(num_groups, folder / "nothing")
    return all(float(cache.get(work.entry_of(member).key)["latents"][0]) == member for group in work.groups for member in group)


def test_two_processes_share_the_work_and_encode_everything_once(tmp_path: Path) -> None:
    fillers = [forked(fill_cache, tmp_path, 60) for _ in range(2)]
    told = [told_by(filler, tmp_path) for filler in fillers]
    assert sorted(group for _, group in encoded(tmp_path)) == list(range(60)), "each group once"
    assert sum(told) == 180 and is_whole(tmp_path, 60)
    assert list((tmp_path / "cache" / leases.FOLDER).iterdir()) == []


def test_what_a_killed_process_had_begun_is_done_by_the_other(tmp_path: Path) -> None:
    fillers = [forked(fill_cache, tmp_path, 80) for _ in range(2)]
    end = time.monotonic() + 120
    while len({process for process, _ in encoded(tmp_path)}) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    victim, other = fillers
    victim.kill()
    victim.join(120)
    made = told_by(other, tmp_path)
    assert is_whole(tmp_path, 80)
    times = Counter(group for _, group in encoded(tmp_path))
    by_the_dead = [group for process, group in encoded(tmp_path) if process == victim.pid]
    assert set(times) == set(range(80))
    # Encoded and not written yet when it died: done again by the other. Everything else once.
    again = [group for group, count in times.items() if count > 1]
    assert set(again) <= set(by_the_dead) and len(again) <= 8
    assert made == 3 * (80 - len(by_the_dead) + len(again))
    assert not list((tmp_path / "cache" / leases.FOLDER).glob("[0-9a-f]*")), "no lease is left"


def owner_elsewhere(place: Path, beat: int) -> None:
    """A process of another machine, which nobody here can look at."""
    identity = {"owner": "owner-far", "host": "elsewhere", "boot": 1.0, "pid": 7, "born": 2.0}
    (place / "group").write_text(json.dumps(identity))
    (place / "owner-far").write_text(f"{json.dumps(identity)} {beat}")


def test_a_lease_is_held_by_one_and_is_free_afterwards(tmp_path: Path) -> None:
    with leases_in(tmp_path) as mine, leases_in(tmp_path) as other:
        assert mine.take("group") and not other.take("group") and not mine.take("group")
        mine.release("group")
        assert other.take("group") and not mine.take("group")
    with leases_in(tmp_path) as mine:
        assert mine.take("group")
    with leases_in(None) as nobody:
        assert nobody.take("group") and nobody.take("group")


def test_leases_are_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError), leases_in(tmp_path) as mine:
        assert mine.take("group")
        raise ValueError
    assert list((tmp_path / leases.FOLDER).iterdir()) == []


def test_an_owner_on_another_machine_is_dead_when_it_is_silent_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: clock[0])
    owner_elsewhere(tmp_path, 1)
    mine = Leases(tmp_path, "owner-me", json.dumps({"owner": "owner-me"}))
    for beat in range(2, 6):
        assert not mine.take("group")
        clock[0] += leases.SILENCE_SECONDS - 1
        owner_elsewhere(tmp_path, beat)
    assert not mine.take("group")
    clock[0] += leases.SILENCE_SECONDS - 1
    assert not mine.take("group"), "it may still be about to say something"
    clock[0] += 2
    assert mine.take("group"), "silent for more than a minute"
    assert json.loads((tmp_path / "group").read_text()) == {"owner": "owner-me"}


def test_a_lease_whose_owner_died_before_it_wrote_its_name_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: clock[0])
    (tmp_path / "group").touch()
    mine = Leases(tmp_path, "owner-me", "me")
    assert not mine.take("group")
    clock[0] += leases.SILENCE_SECONDS + 1
    assert mine.take("group")
