"""train_multi_gpu.py with real processes: whatever dies, the exit code says so and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sd_scripts.runs import process_trees
from sd_scripts.runs.command import OWN_LAUNCHER
from sd_scripts.runs.process_trees import LAUNCH_ID, carried
from sd_scripts.runs.rundir import RunDirectory

MARK = "TEST_LAUNCHERS_MARK"
HEAD = """
import os, signal, sys, time
rank, here = int(os.environ["RANK"]), os.path.dirname(os.path.abspath(__file__))
def note(name): open(os.path.join(here, f"{name}-{rank}"), "a").write("x")
def noted(name): return os.path.exists(os.path.join(here, f"{name}-{rank}"))
def number_of(name): return os.path.getsize(os.path.join(here, f"{name}-{rank}"))
note("started")
"""
WORK = "\nwhile True: time.sleep(0.05)\n"
"""What a rank does that nobody disturbs."""
SAVES = """
def save(number, frame):
    time.sleep(0.3)
    note("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
note("ready")
"""


class Launched:
    """A launcher under test, in a folder with spaces and letters beyond ASCII."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a b ü 画"
        self.folder.mkdir()
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.process: subprocess.Popen[str] | None = None

    def begin(self, body: str, *flags: str, processes: int = 2, arguments: tuple[str, ...] = (), head: str = HEAD) -> None:
        (self.folder / "train it.py").write_text(head + body)
        self.begin_command("--num_processes", str(processes), *flags, "train it.py", *arguments)

    def begin_command(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(OWN_LAUNCHER), *words],
            cwd=self.folder,
            env={**os.environ, MARK: str(self.folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self) -> tuple[int, str]:
        """Exit code, and all that was said."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out + err

    def wait(self, *names: str) -> None:
        """Until all of these notes are there."""
        self.until(lambda: all((self.folder / name).exists() for name in names))

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"waited too long; there are {sorted(path.name for path in self.folder.iterdir())}"
            time.sleep(0.02)

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def alive(self) -> list[psutil.Process]:
        """Everything that descends from the launcher, and the launcher."""
        return [process for process in psutil.process_iter() if carried(process, MARK) == str(self.folder)]

    def rank(self, number: int) -> psutil.Process:
        found = [process for process in self.alive() if carried(process, "RANK") == str(number)]
        return min(found, key=lambda process: process.create_time())


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    made = Launched(tmp_path)
    yield made
    left = made.alive()
    for process in left:
        process.kill()
    if made.process is not None:
        made.process.communicate()
    assert not left, "the launcher has left processes behind"
    assert not list(made.temporary.iterdir()), "the launcher has left its folder behind"


@pytest.mark.parametrize("processes", [2, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 4))])
def test_ranks_know_their_place_and_get_their_arguments(launched: Launched, processes: int) -> None:
    body = """
import json
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
store = os.environ["KOHYA_LIKE_INIT_FILE"]
said = {**{name: os.environ[name] for name in names}, "argv": sys.argv[1:], "store": store, "there": os.path.exists(store)}
open(os.path.join(here, f"said-{rank}"), "w").write(json.dumps(said))
"""
    launched.begin(body, processes=processes, arguments=("--num_processes", "9", "é b", ""))
    assert launched.ended() == (0, "")
    said = [json.loads((launched.folder / f"said-{rank}").read_text()) for rank in range(processes)]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in said] == [(str(rank), str(rank)) for rank in range(processes)]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["OMP_NUM_THREADS"]) for each in said} == {
        (str(processes), str(processes), "1")
    }
    assert all(each["argv"] == ["--num_processes", "9", "é b", ""] and not each["there"] for each in said)
    assert len({each["store"] for each in said}) == 1 and Path(said[0]["store"]).is_absolute()


@pytest.mark.long
def test_a_foreign_script_finds_its_partners_through_the_file(launched: Launched) -> None:
    body = """
import os, torch, torch.distributed as dist
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.environ['KOHYA_LIKE_INIT_FILE']}", rank=rank, world_size=world)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
print("the sum is", value.item())
dist.destroy_process_group()
"""
    launched.begin(body, head="")
    code, said = launched.ended()
    assert code == 0, said
    assert sorted(said.splitlines()) == ["[rank 1] the sum is 3.0", "the sum is 3.0"]


def test_the_first_failure_decides_and_a_hanging_rank_is_ended(launched: Launched) -> None:
    # Rank 0 hangs, deaf to SIGTERM, with a worker of its own; rank 1 fails at once.
    body = """
import subprocess
if rank == 1:
    while not os.path.exists(os.path.join(here, "deaf-0")): time.sleep(0.01)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
note("deaf")
"""
    launched.begin(body + WORK, "--grace", "0.5")
    code, said = launched.ended()
    assert code == 7
    assert said == "train_multi_gpu: process 2 of 2 (rank 1) ended with exit code 7\n"


def test_the_others_may_use_the_grace_period_to_end_by_themselves(launched: Launched) -> None:
    body = "\nif rank == 0: sys.exit(5)\ntime.sleep(1)\nnote('own end')\nsys.exit(6)\n"
    launched.begin(body, "--grace", "30")
    assert launched.ended()[0] == 5, "the code of the first that failed"
    launched.wait("own end-1")


def test_a_killed_rank_is_named(launched: Launched) -> None:
    launched.begin(WORK, "--grace", "0", processes=4)
    launched.wait(*(f"started-{rank}" for rank in range(4)))
    launched.rank(2).kill()
    code, said = launched.ended()
    assert code == 128 + 9
    assert "process 3 of 4 (rank 2) was killed (signal 9)" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_ranks_save_and_the_second_ends_them(launched: Launched, number: signal.Signals) -> None:
    launched.begin(SAVES + WORK)
    launched.wait("ready-0", "ready-1")
    launched.process.send_signal(number)
    assert launched.ended() == (0, "")
    assert launched.size("saved-0") == launched.size("saved-1") == 1, "each is asked once"


def test_a_second_signal_ends_ranks_that_do_not_obey(launched: Launched) -> None:
    launched.begin("\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('ready')\n" + WORK)
    launched.wait("ready-0", "ready-1")
    launched.process.terminate()
    time.sleep(0.1)
    launched.process.terminate()
    time.sleep(1.2)
    assert launched.process.poll() is None, "the first signal asks, and the same one passed on twice is one"
    launched.process.terminate()
    assert launched.ended()[0] == 128 + 15


def test_a_script_that_does_not_listen_ends_by_the_signal(launched: Launched) -> None:
    launched.begin(WORK)
    launched.wait("started-0", "started-1")
    launched.process.terminate()
    assert launched.ended()[0] == 128 + 15


def test_a_killed_launcher_lets_ranks_save_and_leaves_none(launched: Launched) -> None:
    # Rank 1 does not listen; it goes when the grace period is over.
    body = SAVES + "\nif rank == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('set')\n"
    launched.begin(body + WORK, "--grace", "1.5")
    launched.wait("set-0", "set-1")
    launched.process.kill()
    launched.until(lambda: not launched.alive())
    assert (launched.folder / "saved-0").exists() and not (launched.folder / "saved-1").exists()


def test_restarts_are_counted_and_each_has_a_file_of_its_own(launched: Launched) -> None:
    body = """
open(os.path.join(here, f"store {number_of('started')}"), "w").write(os.environ["KOHYA_LIKE_INIT_FILE"])
open(os.path.join(here, f"argv {number_of('started')} {rank}"), "w").write(" ".join(sys.argv[1:]))
open(os.environ["KOHYA_LIKE_INIT_FILE"], "w").write("left over")
# Rank 0, which is ended at once when rank 1 fails, has written its lines by then.
while rank == 1 and not os.path.exists(os.path.join(here, f"argv {number_of('started')} 0")): time.sleep(0.01)
if rank == 1: sys.exit(3)
"""
    launched.begin(body + WORK, "--max_restarts", "2", "--grace", "0", "--restart_with=--resume auto", arguments=("--resume", "none"))
    code, said = launched.ended()
    assert code == 3
    assert launched.size("started-0") == launched.size("started-1") == 3
    sentence = "train_multi_gpu: process 2 of 2 (rank 1) ended with exit code 3"
    restarts = [f"{sentence}; all are started again from the newest state (restart {number} of 2)" for number in (1, 2)]
    assert said.splitlines() == [*restarts, sentence]
    assert len({(launched.folder / f"store {number}").read_text() for number in (1, 2, 3)}) == 3
    assert [(launched.folder / f"argv {number} 1").read_text() for number in (1, 2)] == ["--resume none", "--resume none --resume auto"]


def test_a_run_that_recovers_ends_well(launched: Launched) -> None:
    launched.begin("\nif rank == 0 and number_of('started') == 1: os.kill(os.getpid(), 9)\n", "--max_restarts", "5", "--grace", "0")
    code, said = launched.ended()
    assert code == 0 and said.count("restart 1 of 5") == 1 and launched.size("started-0") == 2


def test_wrong_options_are_not_tried_again(launched: Launched) -> None:
    launched.begin("\nsys.exit(2)\n", "--max_restarts", "5")
    assert launched.ended() == (2, "")
    assert launched.size("started-0") == 1


def test_a_stop_between_two_starts_is_followed(launched: Launched) -> None:
    launched.begin("\nif rank == 0: sys.exit(4)\n" + WORK, "--max_restarts", "100", "--grace", "0")
    launched.wait("started-0", "started-1")
    launched.until(lambda: launched.size("started-0") >= 2)
    launched.process.terminate()
    launched.ended()
    assert launched.size("started-0") < 5


def test_the_run_folder_gets_a_last_word_only_where_the_ranks_left_none(launched: Launched) -> None:
    run = RunDirectory(launched.folder / "run")
    run.path.mkdir()
    body = """
import json
if rank == 0 and number_of("started") == 1:
    line = json.dumps({"time": time.time(), "kind": "step", "step": 12})
    open(os.path.join(sys.argv[2], "events.jsonl"), "a").write(line + "\\n")
    os.kill(os.getpid(), 9)
if rank == 0:
    line = json.dumps({"time": time.time(), "kind": "failed", "step": 3, "text": "own words"})
    open(os.path.join(sys.argv[2], "events.jsonl"), "a").write(line + "\\n")
    sys.exit(1)
"""
    launched.begin(body + WORK, "--grace", "0", arguments=("--run_dir", "run"))
    assert launched.ended()[0] == 128 + 9
    last = run.events()[0][-1]
    assert (last["kind"], last["step"]) == ("failed", 12) and "process 1 of 2 (rank 0) was killed (signal 9)" in last["text"]
    launched.begin(body + WORK, "--grace", "0", "--max_restarts", "1", arguments=("--run_dir", "run"))
    assert launched.ended()[0] == 1
    assert [event["kind"] for event in run.events()[0]] == ["step", "failed", "failed", "warning", "failed"]
    assert [event["text"] for event in run.events()[0] if event["kind"] == "failed"][1:] == ["own words", "own words"]


def test_who_is_suspended_goes_on_to_end_as_it_is_asked() -> None:
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGSTOP)
        assert process_trees.end([psutil.Process(process.pid)], patience_seconds=60) == [] and process.wait() == 7


OTHER = """
import os, signal, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
open(os.path.join(here, "launches"), "a").write("x")
ranks = [
    subprocess.Popen([sys.executable, "train it.py", *sys.argv[1:]], env={**os.environ, "RANK": str(rank)}, start_new_session=True)
    for rank in range(2)
]
sys.exit(int(any(rank.wait() != 0 for rank in ranks)))
"""
"""A launcher that puts its ranks into sessions of their own and turns each exit code into 1, as torchrun does."""


def begin_other(launched: Launched, body: str, *flags: str) -> None:
    (launched.folder / "train it.py").write_text(HEAD + body)
    (launched.folder / "other.py").write_text(OTHER)
    launched.begin_command("--command", *flags, sys.executable, "other.py", "--config_file", "x")


def test_another_launcher_is_started_again_from_outside_and_its_ranks_are_ended(launched: Launched) -> None:
    begin_other(launched, "\nif number_of('started') == 1 and rank == 1: sys.exit(3)\nif number_of('started') == 2: sys.exit(0)\n" + WORK)
    launched.wait("started-0", "started-1")
    # It waits for rank 0, which waits for ever: a launcher that was killed leaves it behind.
    launcher = next(child for child in psutil.Process(launched.process.pid).children() if "other.py" in child.cmdline())
    launcher.kill()
    assert launched.ended()[0] == 128 + 9
    assert launched.size("launches") == 1


def test_another_launcher_with_restarts_arrives(launched: Launched) -> None:
    # By the launch and not by the start of a rank, which may come so late that its first start is in the second launch.
    body = "\nif os.path.getsize(os.path.join(here, 'launches')) == 1: sys.exit(3)\n"
    body += "assert sys.argv[1:] == ['--config_file', 'x', '--resume', 'auto'], sys.argv\n"
    begin_other(launched, body, "--max_restarts", "3", "--restart_with=--resume auto")
    code, said = launched.ended()
    assert code == 0 and launched.size("launches") == 2
    assert said == "train_multi_gpu: the launcher ended with exit code 1; all are started again from the newest state (restart 1 of 3)\n"


def test_a_refusal_inside_another_launcher_is_not_tried_again(launched: Launched) -> None:
    begin_other(launched, "\nopen(os.environ['KOHYA_LIKE_REFUSED_FILE'], 'w').close()\nsys.exit(2)\n", "--max_restarts", "3")
    assert launched.ended()[0] == 2
    assert launched.size("launches") == 1


def test_a_signal_reaches_the_ranks_of_another_launcher_and_not_the_launcher(launched: Launched) -> None:
    begin_other(launched, SAVES + WORK)
    launched.wait("ready-0", "ready-1")
    launched.process.terminate()
    assert launched.ended() == (0, ""), "all ranks saved and ended with 0, and so did their launcher"
    assert launched.size("saved-0") == launched.size("saved-1") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_processes", "0", "there.py"], "--num_processes is 0; give 1 or more"),
        (["--num_processes", "2", "--grace", "-1", "missing.py"], "there is no script missing.py"),
        (["--num_processes", "2", "--grace", "-1", "missing.py"], "--grace is -1 seconds"),
        (["there.py"], "--num_processes"),
        (["--num_processes", "2", "--command", "there.py"], "not allowed with"),
    ],
)
def test_a_wrong_call_is_refused(launched: Launched, words: list[str], says: str) -> None:
    (launched.folder / "there.py").write_text("")
    launched.begin_command(*words)
    code, said = launched.ended()
    assert code == 2 and says in said and not launched.alive()


def test_a_command_that_cannot_be_started_is_told(launched: Launched) -> None:
    launched.begin_command("--command", "/nonexistent/launcher")
    code, said = launched.ended()
    assert code == 127 and "/nonexistent/launcher cannot be started: No such file" in said


def test_the_environment_of_ranks_names_the_launch(launched: Launched) -> None:
    launched.begin(WORK)
    launched.wait("started-0", "started-1")
    assert carried(launched.rank(0), LAUNCH_ID) == carried(launched.rank(1), LAUNCH_ID) is not None
    assert carried(psutil.Process(launched.process.pid), LAUNCH_ID) is None
    launched.process.terminate()
    launched.ended()
