"""Real small processes: what a person sees of a run agrees with what the process did, whatever happens to the studio."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kohya_like import cleanup, monitor, processes, supervisor
from kohya_like.supervisor import ENDED, Job, JobSupervisor
from sd_scripts.runs import gpus
from sd_scripts.runs.command import OWN_LAUNCHER
from sd_scripts.runs.events import RunStarted
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions
from tests.ui.standin_runs import ROOT, SCRIPT, STANDIN, command, options, until

Supervise = Callable[..., JobSupervisor]


def alive(job: Job) -> list[int]:
    return [process.pid for process in processes.of_runs().get(job.run_id or "", [])]


def zombies() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    made: list[JobSupervisor] = []

    def make(behaviour: str = "train", ranks: int = 1) -> JobSupervisor:
        made.append(JobSupervisor(tmp_path, command(behaviour, ranks)))
        return made[-1]

    yield make
    for each in made:
        each.close()
        for job in each._look():
            each.stop(job, grace_seconds=0)
            assert not alive(job)
        each.close()
    assert not zombies()


def ended(studio: JobSupervisor, job: Job) -> Job:
    until(lambda: studio.find(job.name).state in ENDED)
    return studio.find(job.name)


@pytest.mark.parametrize(
    ("behaviour", "state", "returncode"), [("quick", "finished", 0), ("fail", "failed", 1), ("die", "died", -9), ("raise", "died", 1)]
)
def test_each_way_to_end_is_told_apart(supervise: Supervise, tmp_path: Path, behaviour: str, state: str, returncode: int) -> None:
    studio = supervise(behaviour)
    job = studio.start(SCRIPT, options(tmp_path))
    assert job.state == "running"
    done = ended(studio, job)
    until(lambda: studio.find(job.name).returncode is not None)
    assert (done.state, studio.find(job.name).returncode) == (state, returncode)
    assert JobSupervisor(tmp_path).find(job.name).state == state


def test_run_json_holds_the_start_and_the_environment_the_run_id(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise()
    job = studio.start(SCRIPT, options(tmp_path))
    record = json.loads((job.path / "run.json").read_text())
    assert record["pid"] == job.pid and record["run_id"] == job.run_id and record["argv"][1] == str(STANDIN)
    assert abs(psutil.Process(job.pid).create_time() - record["create_time"]) < 0.05
    until(lambda: len(alive(job)) >= 2)
    environment = next(psutil.Process(pid).environ() for pid in alive(job) if pid != job.pid)
    assert environment["PYTHONUTF8"] == "1" and environment["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_stop_lets_the_run_save_and_leaves_nothing(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow")
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2)
    studio.stop(job, grace_seconds=20)
    assert studio.find(job.name).state == "stopped" and not alive(job)
    assert [event["kind"] for event in monitor.read_events(job.run.events_file).events][-2:] == ["saved", "stopped"]


def test_a_stopped_run_resumes_in_its_folder_and_goes_on_counting(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow")
    job = studio.start(SCRIPT, options(tmp_path, resume="none"))
    until(lambda: studio.find(job.name).summary.step > 2)
    studio.stop(job)
    stopped_at = studio.find(job.name).summary.step
    studio.close()
    studio = supervise("rest")
    again = studio.resume(studio.find(job.name))
    assert again.path == job.path and again.run_id != job.run_id and again.state == "running"
    assert again.run.options().distributed.resume == "auto" and not again.run.stop_requested()
    done = ended(studio, again)
    assert done.state == "finished" and done.summary.step > stopped_at
    with pytest.raises(OptionError, match="not a run folder"):
        studio.start(SCRIPT, options(tmp_path), resume=tmp_path)


def test_a_running_run_cannot_be_resumed(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow")
    job = studio.start(SCRIPT, options(tmp_path))
    with pytest.raises(OptionError, match="has not ended"):
        studio.resume(job)


def test_a_deaf_run_is_ended_by_force_and_counts_as_stopped(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("deaf")
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2)
    studio.stop(job, grace_seconds=0.5)
    assert not alive(job)
    assert studio.find(job.name).state == "stopped" and studio.find(job.name).returncode == -9


def test_ranks_in_sessions_of_their_own_survive_a_group_kill_and_are_still_found_and_ended(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow", ranks=2)
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2, seconds=120)
    os.killpg(job.pid, signal.SIGKILL)
    until(lambda: job.pid not in alive(job))
    assert len(alive(job)) >= 2
    assert studio.find(job.name).state == "running"
    studio.stop(job, grace_seconds=0)
    assert not alive(job) and studio.find(job.name).state == "stopped"


def test_two_ranks_stop_by_the_file(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow", ranks=2)
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2, seconds=120)
    studio.stop(job, grace_seconds=30)
    assert studio.find(job.name).state == "stopped" and studio.find(job.name).returncode == 0 and not alive(job)


def test_a_killed_studio_leaves_the_run_alone_and_the_next_one_finds_it(supervise: Supervise, tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.ui.standin_runs import SCRIPT, command, options
from kohya_like.supervisor import JobSupervisor
print(JobSupervisor(Path({str(tmp_path)!r}), command("slow")).start(SCRIPT, options(Path({str(tmp_path)!r}))).name, flush=True)
time.sleep(600)
"""
    studio_process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    name = studio_process.stdout.readline().strip()
    studio_process.kill()
    studio_process.wait()
    studio_process.stdout.close()
    studio = supervise("slow")
    job = studio.find(name)
    assert job.state == "running"
    step = job.summary.step
    until(lambda: studio.find(name).summary.step > step + 3)
    studio.stop(job)
    assert studio.find(name).state == "stopped" and studio.find(name).returncode == 0


def test_a_reused_pid_is_never_taken_for_the_run(supervise: Supervise, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "old", options(tmp_path))
    run.log(RunStarted(steps=10, start_step=0))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        record = {"run_id": "0" * 32, "queued": 1.0, "pid": stranger.pid, "create_time": 12.0, "argv": []}
        (run.path / "run.json").write_text(json.dumps(record))
        studio = supervise()
        assert studio.find(run.name).state == "died"
        studio.stop(studio.find(run.name), grace_seconds=0)
        assert stranger.poll() is None
        stranger.kill()


def test_on_a_cpu_runs_wait_in_line_and_start_in_order_without_anybody_looking(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("quick")
    jobs = [studio.start(SCRIPT, options(tmp_path, output_name=name)) for name in ("b", "a", "c")]
    assert [studio.find(job.name).state for job in jobs[1:]] == ["queued", "queued"]
    until(lambda: all((job.path / "exit.json").exists() for job in jobs))
    starts = [monitor.read_events(job.run.events_file).events[0]["time"] for job in jobs]
    assert starts == sorted(starts)


def test_a_queue_survives_a_studio_restart_and_a_queued_run_can_be_dropped(supervise: Supervise, tmp_path: Path) -> None:
    first = supervise("slow")
    running = first.start(SCRIPT, options(tmp_path, output_name="first"))
    waiting = first.start(SCRIPT, options(tmp_path, output_name="waiting"))
    dropped = first.start(SCRIPT, options(tmp_path, output_name="dropped"))
    first.stop(dropped)
    first.close()
    second = supervise("quick")
    assert {job.name: job.state for job in second.jobs()} == {running.name: "running", waiting.name: "queued", dropped.name: "stopped"}
    second.stop(running)
    second.jobs()
    assert ended(second, waiting).state == "finished"
    assert not dropped.run.events_file.exists()


def test_each_gpu_gets_one_run(supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    studio = supervise("slow")
    jobs = [studio.start(SCRIPT, options(tmp_path, output_name=name)) for name in ("a", "b", "c")]
    assert [studio.find(job.name).state for job in jobs] == ["running", "running", "queued"]
    assert [seen_gpus(studio, job.name) for job in jobs[:2]] == ["3", "5"]


def states(studio: JobSupervisor, *jobs: Job) -> list[str]:
    return [studio.find(job.name).state for job in jobs]


def seen_gpus(studio: JobSupervisor, name: str) -> str:
    """The GPUs that a run's process is shown, once its pid is noted down and it has an environment of its own."""

    def environment() -> dict[str, str]:
        job = studio.find(name)
        return {} if job is None or job.pid is None else psutil.Process(job.pid).environ()

    until(lambda: "CUDA_VISIBLE_DEVICES" in environment())
    return environment()["CUDA_VISIBLE_DEVICES"]


def test_a_run_on_several_gpus_waits_for_all_of_them_and_is_not_overtaken(
    supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    studio = supervise("slow")
    one = studio.start(SCRIPT, options(tmp_path, output_name="one"))
    two = studio.start(SCRIPT, options(tmp_path, output_name="two", multi_gpu=True, num_gpus=2))
    three = studio.start(SCRIPT, options(tmp_path, output_name="three", multi_gpu=True))
    late = studio.start(SCRIPT, options(tmp_path, output_name="late"))
    assert states(studio, one, two, three, late) == ["running", "running", "queued", "queued"]
    assert (seen_gpus(studio, one.name), seen_gpus(studio, two.name)) == ("0", "1,2")
    studio.stop(one, grace_seconds=0)
    studio.jobs()
    assert states(studio, three, late) == ["queued", "queued"], "a run on one GPU does not overtake the one that waits for three"
    studio.stop(two, grace_seconds=0)
    until(lambda: states(studio, three) == ["running"])
    assert seen_gpus(studio, three.name) == "0,1,2" and states(studio, late) == ["queued"]


def test_chosen_gpus_are_honoured_and_others_do_not_wait_for_them(
    supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    studio = supervise("slow")
    chosen = studio.start(SCRIPT, options(tmp_path, output_name="chosen", gpu_ids=["2"]))
    pair = studio.start(SCRIPT, options(tmp_path, output_name="pair", multi_gpu=True, gpu_ids=["3", "0"]))
    waits = studio.start(SCRIPT, options(tmp_path, output_name="waits", multi_gpu=True, gpu_ids=["2", "3"]))
    free = studio.start(SCRIPT, options(tmp_path, output_name="free"))
    assert states(studio, chosen, pair, waits, free) == ["running", "running", "queued", "running"]
    assert [seen_gpus(studio, job.name) for job in (chosen, pair, free)] == ["2", "3,0", "1"]
    job = JobSupervisor(tmp_path).find(pair.name)
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    expected = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "3,0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    assert job.environment == expected, "what stands in front of its command"


def test_two_names_of_one_gpu_are_one_gpu_for_the_queue(supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gpus, "uuids", lambda: ["GPU-aaaa-1", "GPU-bbbb-2"])
    studio = supervise("slow")
    first = studio.start(SCRIPT, options(tmp_path, output_name="first", gpu_ids=["GPU-bbbb-2"]))
    again = studio.start(SCRIPT, options(tmp_path, output_name="again", gpu_ids=["1"]))
    free = studio.start(SCRIPT, options(tmp_path, output_name="free"))
    assert states(studio, first, again, free) == ["running", "queued", "running"]
    assert (seen_gpus(studio, first.name), seen_gpus(studio, free.name)) == ("GPU-bbbb-2", "0")
    assert sorted(studio.at_work()) == sorted([(first.name, ["cuda:1"]), (free.name, ["cuda:0"])]), "as a drawing process calls them"


@pytest.mark.parametrize(
    ("visible", "values", "says"),
    [
        ("0,1", {"gpu_ids": ["5"]}, "gpu_ids: 5 is not here; the studio may use 0, 1"),
        ("0,1", {"multi_gpu": True, "num_gpus": 4}, "num_gpus: 4 GPUs asked, 2 here"),
        ("", {"gpu_ids": ["0"]}, "gpu_ids: 0 asked, but this machine shows no NVIDIA GPU"),
    ],
)
def test_gpus_that_will_never_be_free_are_refused(
    supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, values: dict[str, object], says: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(OptionError, match=says):
        supervise("slow").start(SCRIPT, options(tmp_path, **values))
    assert not list(tmp_path.iterdir())


def test_processes_on_the_cpu_are_as_many_as_asked_and_one_run_at_a_time(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow")
    jobs = [studio.start(SCRIPT, options(tmp_path, output_name=name, multi_gpu=True, num_gpus=2)) for name in "ab"]
    assert states(studio, *jobs) == ["running", "queued"]
    assert seen_gpus(studio, jobs[0].name) == ""


def with_own_launcher(*flags: str) -> Callable[[RunOptions, Path], list[str]]:
    launcher = [sys.executable, str(OWN_LAUNCHER), "--num_processes", "2", *flags]
    return lambda _options, run: [*launcher, str(STANDIN), str(run), "slow", "--run_dir", str(run)]


def process_of(job: Job, condition: Callable[[psutil.Process], bool]) -> psutil.Process:
    found = [psutil.Process(pid) for pid in alive(job)]
    return min((process for process in found if condition(process)), key=lambda process: process.create_time())


def launcher_of(studio: JobSupervisor, job: Job) -> psutil.Process:
    noted = json.loads((job.path / "launcher.json").read_text())
    assert noted["run_id"] == job.run_id
    return psutil.Process(noted["pid"])


def test_a_killed_rank_is_named_in_the_list_and_ends_the_run(tmp_path: Path) -> None:
    studio = JobSupervisor(tmp_path, with_own_launcher("--grace", "0.5"))
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2)
    process_of(job, lambda process: process.environ().get("RANK") == "1").kill()
    done = ended(studio, job)
    assert done.state == "failed" and "process 2 of 2 (rank 1) was killed (signal 9)" in done.summary.farewell.text
    assert json.loads((job.path / "exit.json").read_text())["returncode"] == 128 + 9
    until(lambda: not alive(job))
    studio.close()


@pytest.mark.parametrize("launcher", ["own", pytest.param("torchrun", marks=pytest.mark.long)])
def test_a_killed_launcher_leaves_no_rank(launcher: str, tmp_path: Path) -> None:
    studio = JobSupervisor(tmp_path, with_own_launcher() if launcher == "own" else command("slow", ranks=2))
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2, seconds=120)
    assert len(alive(job)) >= 4
    launcher_of(studio, job).kill()
    state = studio.find(job.name).state
    # The runner, which writes down the end, lives a moment longer.
    assert state == "running" or set(alive(job)) <= {job.pid}, "its ranks are being ended"
    until(lambda: not alive(job))
    # A process that is ending has given up its environment, by which `alive` knows it, before it is gone.
    done = ended(studio, job)
    assert (done.state, done.returncode) == ("died", -9)
    studio.close()


def cleaned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cleanup.main(["cleanup", *arguments])
    return capsys.readouterr().out


def test_cleanup_ends_ranks_whose_launcher_is_gone_and_nothing_else(
    supervise: Supervise, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, other = tmp_path / "runs", tmp_path / "others"
    studio, others = JobSupervisor(root, command("slow", ranks=2)), JobSupervisor(other, command("slow"))
    orphaned, foreign = studio.start(SCRIPT, options(root)), others.start(SCRIPT, options(other))
    until(lambda: studio.find(orphaned.name).summary.step > 2, seconds=120)
    assert "No orphaned process" in cleaned(capsys, "--yes", str(root)), "a run that is watched"
    runner = psutil.Process(orphaned.pid)
    launcher = launcher_of(studio, orphaned)
    runner.kill()
    until(lambda: orphaned.pid not in alive(orphaned))
    said = cleaned(capsys, "--yes", str(root))
    assert "its launcher lives" in said and "No orphaned process" in said, "its launcher still watches it"
    assert studio.find(orphaned.name).state == "running"
    launcher.kill()
    until(lambda: launcher.pid not in alive(orphaned))
    ranks = alive(orphaned)
    assert len(ranks) >= 2
    said = cleaned(capsys, str(root))
    assert f"orphaned: {orphaned.path}: its launcher is gone" in said and "rank 0" in said and "rank 1" in said
    assert f"left alone: {foreign.path}: not in these folders" in said and "Nothing was ended" in said
    assert alive(orphaned) == ranks
    assert f"Ended: {len(ranks)} processes." in cleaned(capsys, "--yes", str(root))
    assert not alive(orphaned) and studio.find(orphaned.name).state == "died"
    assert others.find(foreign.name).state == "running"
    others.stop(foreign, grace_seconds=0)
    studio.close()
    others.close()


def test_cleanup_finds_what_an_earlier_start_has_left(supervise: Supervise, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    studio = supervise("slow")
    job = studio.start(SCRIPT, options(tmp_path))
    until(lambda: studio.find(job.name).summary.step > 2)
    os.killpg(job.pid, signal.SIGSTOP)
    trainer = launcher_of(studio, job)
    psutil.Process(job.pid).kill()
    until(lambda: alive(job) == [trainer.pid])
    for name in ("run.json", "launcher.json"):
        noted = json.loads((job.path / name).read_text())
        (job.path / name).write_text(json.dumps({**noted, "run_id": "f" * 32}))
    assert f"orphaned: {job.path}: left by an earlier start of this run" in cleaned(capsys, str(tmp_path))
    assert "Ended: 1 process." in cleaned(capsys, "--yes", str(tmp_path))
    assert not alive(job)


def test_cleanup_from_a_terminal_needs_a_folder_of_runs(tmp_path: Path) -> None:
    for folder, code, says in ((tmp_path, 0, "No orphaned process"), (tmp_path / "absent", 2, "there is no folder")):
        done = subprocess.run(
            [sys.executable, "-m", "kohya_like.supervisor", "cleanup", str(folder)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code and says in done.stdout + done.stderr


def test_a_run_begun_in_a_terminal_is_shown_with_its_state(supervise: Supervise, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "cli", options(tmp_path))
    studio = supervise()
    with subprocess.Popen([sys.executable, str(STANDIN), str(run.path), "slow"], stderr=subprocess.DEVNULL) as process:
        until(lambda: studio.find(run.name).summary.step > 1)
        assert studio.find(run.name).state == "running" and studio.find(run.name).run_id is None
        studio.stop(studio.find(run.name))
        process.wait()
    assert studio.find(run.name).state == "stopped"
    assert studio.resume(studio.find(run.name)).run_id is not None


def test_a_killed_terminal_run_has_died(supervise: Supervise, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "cli", options(tmp_path))
    with subprocess.Popen([sys.executable, str(STANDIN), str(run.path), "slow"], stderr=subprocess.DEVNULL) as process:
        until(lambda: monitor.summary(run.events_file).step > 1)
        process.kill()
    assert supervise().find(run.name).state == "died"


def test_a_studio_that_died_between_start_and_note_does_not_start_the_run_twice(supervise: Supervise, tmp_path: Path) -> None:
    studio = supervise("slow")
    job = studio.start(SCRIPT, options(tmp_path))
    record = json.loads((job.path / "run.json").read_text())
    (job.path / "run.json").write_text(json.dumps({**record, "pid": None, "create_time": None}))
    (job.path / "start.claim").touch()
    again = supervise("slow")
    assert again.find(job.name).state == "running"
    again.jobs()
    assert again.find(job.name).run_id == job.run_id and again.find(job.name).pid == job.pid
    again.stop(again.find(job.name))
    assert again.find(job.name).state == "stopped" and not alive(job)


def test_a_command_that_cannot_start_is_told(supervise: Supervise, tmp_path: Path) -> None:
    studio = JobSupervisor(tmp_path, lambda _options, _run: ["/nonexistent/python"])
    job = ended(studio, studio.start(SCRIPT, options(tmp_path)))
    assert job.state == "died" and job.returncode == 127
    assert "cannot be started" in job.run.console.read_text()
    studio.close()


def test_runs_in_other_output_folders_are_found_after_a_restart(supervise: Supervise, tmp_path: Path) -> None:
    elsewhere = tmp_path / "deep" / "elsewhere"
    job = supervise("quick").start(SCRIPT, options(elsewhere))
    assert job.path.parent == elsewhere
    assert JobSupervisor(tmp_path).find(job.name).path == job.path


def test_a_wrong_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not train these options"):
        JobSupervisor(tmp_path).start("other.py", options(tmp_path))
    assert not list(tmp_path.iterdir())


def test_devices_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in (("", ["cpu"]), ("-1", ["cpu"]), ("0, 2", ["0", "2"]), ("MIG-abc", ["MIG-abc"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert supervisor.devices() == expected
