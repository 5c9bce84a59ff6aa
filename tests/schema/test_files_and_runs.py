"""Files that are whole or absent, run folders, the reference."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.runs.events import Cached, StepDone
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.__main__ import PAGES
from sd_scripts.schema.files import TEMPORARY_MARK, folder_aside, write_atomically, written_aside
from sd_scripts.schema.flat import build

OPTIONS = build(SdxlNetwork, {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_name": "my cat's lora"})


def test_a_file_takes_the_place_of_another_at_once_and_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, reader, real = tmp_path / "a.txt", tmp_path / "held by a reader", os.fsync
    write_atomically(file, "old")
    os.link(file, reader)
    done: list[str] = []

    def fsync(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else os.pread(handle, 9, 0).decode())
        done.append(file.read_text())
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(file, "new")
    assert reader.read_text() == "old", "who has the old file open reads on in it"
    assert done == ["new", "old", "folder", "new"], "what is synced, and what stands under the name at that time"


def test_a_folder_takes_the_place_of_another_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = tmp_path / "state", os.fsync
    (folder / "old").mkdir(parents=True)
    synced: list[tuple[int, bool]] = []

    def fsync(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, (folder / "old").exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with folder_aside(folder) as aside:
        (aside / "part").mkdir()
        (aside / "part" / "a").write_text("a")
        (aside / "b").write_text("b")
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "b", folder / "part", folder / "part" / "a"]
    inside = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
    assert {number for number, was_old in synced if was_old} == inside, "before anybody sees it"
    assert synced[-1] == (tmp_path.stat().st_ino, False)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_atomically(file, "old")
    with pytest.raises(RuntimeError, match="halfway"), written_aside(file) as aside:
        aside.write_text("half")
        assert TEMPORARY_MARK in aside.name
        raise RuntimeError("halfway")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    write_atomically(tmp_path / "ours", b"x")
    assert (tmp_path / "ours").stat().st_mode == plain.stat().st_mode


def test_two_runs_of_one_second_get_two_folders_and_keep_their_options(tmp_path: Path) -> None:
    runs = [RunDirectory.create(tmp_path, "lora", OPTIONS) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.options() == OPTIONS for run in runs)


def test_events_are_read_by_offset_and_half_a_line_waits(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.events() == ([], 0)
    run.log(StepDone(step=1, loss=float("nan"), parts={"edge": float("inf")}))
    events, offset = run.events()
    assert events[0]["kind"] == "step" and events[0]["loss"] is None and events[0]["parts"] == {"edge": None} and events[0]["time"] > 1.6e9
    with run.events_file.open("a") as file:
        file.write('{"kind": "st')
    assert run.events(offset) == ([], offset)
    with run.events_file.open("a") as file:
        file.write('ep"}\nnot json\n[1]\n')
    assert [event["kind"] for event in run.events(offset)[0]] == ["step"]
    run.events_file.write_text("")
    assert run.events(offset) == ([], 0), "a replaced file is read from its start"


def append(path: str, name: str) -> None:
    run = RunDirectory(Path(path))
    for number in range(300):
        run.log(Cached(what=name * 200, done=number, total=300))


def test_two_processes_may_write_events_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append, args=(str(tmp_path), name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events, _ = RunDirectory(tmp_path).events()
    for name in "ab":
        assert [event["done"] for event in events if event["what"] == name * 200] == list(range(300))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_is_made_of_the_documents_is_fresh(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path](), "run `python -m sd_scripts.schema docs`"


def test_help_and_a_wrong_option_need_nothing_heavy() -> None:
    code = (
        "import sys\nfrom sd_scripts.schema.command_line import parse_cli\nfrom sd_scripts.schema.errors import OptionError\n"
        "from sd_scripts.families.sdxl.options import SdxlNetwork\n"
        "try:\n    parse_cli(SdxlNetwork, ['--network_dim', '0'])\nexcept OptionError as err:\n    print(len(err.problems))\n"
        "print(sorted({'torch', 'numpy', 'PIL', 'gradio', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert out.splitlines() == ["3", "[]"]


FIRST_IMPORTS = """
import gc
from sd_scripts.runs.importing import uncollected
try:
    with uncollected("colorsys"):
        assert not gc.isenabled()
        import colorsys
        raise ImportError
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count() > 1000
gc.unfreeze()
with uncollected("colorsys"):
    assert gc.isenabled()
assert gc.get_freeze_count() == 0
"""


def test_only_the_first_import_of_a_library_does_without_looking_for_garbage() -> None:
    assert subprocess.run([sys.executable, "-c", FIRST_IMPORTS], cwd=Path(__file__).parents[2]).returncode == 0


def test_the_config_file_of_a_run_names_its_script(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "lora", OPTIONS)
    text = run.config.read_text()
    assert 'script = "sdxl_train_network.py"' in text
    run.config.write_text(text.replace("sdxl_train_network.py", "nothing.py"))
    with pytest.raises(ValueError, match="is not one of this version's scripts"):
        run.options()
