"""Files that the studio keeps, damaged in every way: it starts, all its lists come, and nothing ends in a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import app, queueing
from kohya_like.answers import JsonAnswer
from kohya_like.supervisor import JobSupervisor
from sd_scripts.dataset.caption_files import HISTORY, Book, CaptionChange, read
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError
from tests.ui.full_studio import verified
from tests.ui.runs_on_disk import made, options
from tests.ui.test_comparisons import Place, asked
from tests.ui.test_tools import lora

BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "deep": lambda _: b"[" * 200_000,
    "not UTF-8": lambda data: b"\xff\xfe\xe9" + data,
    "zeros": lambda data: bytes(len(data)),
    "an older folder's": lambda _: b'{"time": 1}',
    "a list": lambda _: b"[1]",
}
WRONG: list[Any] = [None, 10**400, float("inf"), [{}], "\ud800"]
GRID = ("/kl/compare", *(f"/kl/compare/{{grid}}{rest}" for rest in ("", "/vote", "/numbers", "/others", "/file.html")))
RUN = ("/kl/runs", "/kl/run/{run}", "/kl/run/{run}/report")
FILES = {
    "desk.json": ("*-run/desk.json", RUN),
    "choice.json": ("*-run/choice.json", ("/kl/run/{run}", "/kl/compare/{grid}/others")),
    "queue.json": ("*-waits/queue.json", ("/kl/runs", "/kl/run/{waits}")),
    "run.json": ("*-waits/run.json", ("/kl/runs", "/kl/run/{waits}", "/kl/run/{waits}/machine")),
    "trash": (".trash/*/entry.json", ("/kl/desk/disk", "/kl/desk/restore", "/kl/desk/empty")),
    "notices": (".notices.json", ("/kl/runs", "/kl/notices/known")),
    "folders": (".run_folders.json", ("/kl/runs",)),
    "tool": (".tools/*/tool.json", ("/kl/tools", "/kl/tools/run/{tool}")),
    "grid": ("comparisons/2*/comparison.json", GRID),
}
"""What the studio keeps, and what it asks to show it."""


class Studio:
    """What a studio that starts now answers."""

    def __init__(self, root: Path) -> None:
        self.context = app.make_context(root, (), True)
        self.client = TestClient(Starlette(routes=app.own_routes(self.context)))
        self.client.headers["x-kl-token"] = self.context.token

    def ask(self, path: str, order: dict[str, Any] | None = None) -> Any:
        """The answer, with exceptions as they are."""
        answer = self.client.get(path) if order is None else self.client.post(path, json=order)
        assert answer.status_code < 500, f"{path}: {answer.text[:200]}"
        return answer.json() if answer.headers["content-type"] == "application/json" else answer.text

    def close(self) -> None:
        for end in self.context.at_end:
            end()
        self.context.predictions.close()
        self.context.supervisor.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one of each file that the studio keeps, written by what writes it."""
    root = tmp_path_factory.mktemp("kept") / "output"
    run, gone, waits = (made(root, options(root, output_name=name)) for name in ("run", "gone", "waits"))
    verified(root, run.path / "run.safetensors")
    queueing.write(waits.path, queueing.Waiting(place=0, held=True))
    (waits.path / "run.json").write_text(json.dumps({"run_id": "a" * 32, "queued": 1.0}))
    files = [str(lora(run.path / f"{name}.safetensors")) for name in ("run", "run-000100")]
    drawing = Place(root)
    grid = drawing.compared.start(asked(files), "a" * 32)
    drawing.finished(grid)
    drawing.compared.vote(grid, {**drawing.compared.voting(grid)["pair"], "winner": "left"})
    drawing.close()
    studio = Studio(root)
    studio.ask("/kl/desk/say", {"run": run.name, "label": {"before": "", "after": "mine"}, "tags": {"add": ["a"], "remove": []}})
    studio.ask("/kl/desk/delete", {"run": gone.name})
    studio.ask("/kl/notices/keep", {"url": "http://127.0.0.1:9/a", "kind": "ntfy"})
    studio.ask(f"/kl/compare/{grid}/choose", {"column": 1})
    studio.close()
    (root / ".run_folders.json").write_text(json.dumps({"folders": [str(root)]}))
    return root


@pytest.fixture(scope="module")
def studio(kept: Path) -> Iterator[Studio]:
    studio = Studio(kept)
    yield studio
    studio.close()


@pytest.fixture(params=FILES.values(), ids=FILES)
def file(request: pytest.FixtureRequest, kept: Path, studio: Studio) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """One of the files, which is there again afterwards, and whether all comes that shows it and the runs beside it."""
    pattern, places = request.param
    (found,) = kept.glob(pattern)
    data = found.read_bytes()
    names = {name: next(path.name for path in kept.glob(f"*-{name}")) for name in ("run", "waits")}
    names |= {"grid": next(kept.glob("comparisons/2*")).name, "tool": next(kept.glob(".tools/*")).name}
    runs = {path.name for path in kept.iterdir() if (path / "config.toml").is_file()}

    def shown() -> bool:
        for place in places:
            studio.ask(place.format(**names), {"entries": ["none"], "entry": "none"} if place.startswith(("/kl/desk", "/kl/not")) else None)
        return {row["name"] for row in studio.ask("/kl/runs")["runs"]} == runs

    yield found, shown
    remove(found)
    found.write_bytes(data)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def test_a_damaged_file_keeps_nothing_else_from_being_shown(file: tuple[Path, Callable[[], bool]], kept: Path) -> None:
    path, shown = file
    data = path.read_bytes()
    for name, damage in BYTES.items():
        path.write_bytes(damage(data))
        assert shown(), name
    path.unlink()
    path.symlink_to(path)
    assert shown(), "a link to itself"
    path.unlink()
    path.mkdir()
    assert shown(), "a folder"
    # So that a studio starts.
    Studio(kept).close()


def test_a_value_that_cannot_be_keeps_nothing_else_from_being_shown(file: tuple[Path, Callable[[], bool]]) -> None:
    path, shown = file
    said = json.loads(path.read_bytes())
    for name in said:
        for wrong in WRONG:
            path.write_bytes(json.dumps({**said, name: wrong}).encode())
            assert shown(), (name, wrong)


def test_a_damaged_grid_says_so_and_can_be_deleted(kept: Path, studio: Studio) -> None:
    (grid,) = kept.glob("comparisons/2*")
    copy = kept / "comparisons" / "20250101-000000-copy"
    shutil.copytree(grid, copy)
    (copy / "comparison.json").write_text("{")
    lines = {line["name"]: line for line in studio.ask("/kl/compare")["comparisons"]}
    assert "damaged" in lines[copy.name]["said"] and lines[grid.name]["said"] == ""
    assert "damaged" in studio.ask(f"/kl/compare/{copy.name}")["said"]
    studio.ask(f"/kl/compare/{copy.name}/delete", {})
    assert not copy.exists() and grid.exists()


def test_an_answer_has_null_for_no_number_and_no_half_characters() -> None:
    answer = JsonAnswer({"loss": float("nan"), "all": [float("-inf"), 1.5], "text": "a\ud800b"})
    assert json.loads(answer.body) == {"loss": None, "all": [None, 1.5], "text": "a?b"}


def test_a_damaged_history_of_captions_is_told_and_undoes_nothing(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    Image.new("RGB", (64, 64)).save(image)
    file = tmp_path / "a.txt"
    file.write_text("first")
    book = Book(tmp_path)
    book.write("edited", [CaptionChange(file, read(file).version, "second")])
    (line,) = (tmp_path / HISTORY).read_text().splitlines()
    said = json.loads(line)
    for name in said:
        for wrong in WRONG:
            (tmp_path / HISTORY).write_text(json.dumps({**said, name: wrong}) + "\n")
            book.undo()
            file.write_text("second")
    (tmp_path / HISTORY).write_text(line[: len(line) // 2] + "\n" + line + "\n" + "[" * 100_000 + "\n")
    assert [each.text for each in book.undo()[1].values()] == ["first"] and file.read_text() == "first"
    (tmp_path / HISTORY).unlink()
    (tmp_path / HISTORY).mkdir()
    with pytest.raises(OptionError, match=r"captions.jsonl cannot be read: Is a directory"):
        book.undo()


def test_a_link_to_itself_among_the_runs_is_no_run(tmp_path: Path) -> None:
    run: RunDirectory = made(tmp_path, options(tmp_path))
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    assert [path.name for path in JobSupervisor(tmp_path).run_folders()] == [run.name]
