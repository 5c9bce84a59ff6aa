"""Grids of checkpoints and prompts without a browser: drawn in the background, gone on with, shared, saved as files."""

from __future__ import annotations

import errno
import io
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import comparison_routes, comparisons, predict_routes, vote_links
from kohya_like.comparisons import Comparisons, axes
from kohya_like.context import Context
from kohya_like.inference import WorkerBackend
from kohya_like.predictions import PredictionOrder, PredictionQueue
from kohya_like.supervisor import JobSupervisor
from kohya_like.vote_links import VoteLinks
from kohya_like.votes import Vote, Z, is_clear, next_pair, ranking, wilson
from sd_scripts.dataset import table
from sd_scripts.families import RUNS
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.ui.standin_runs import until

STANDIN = Path(__file__).with_name("standin_worker.py")
ADA = "a" * 32


class Place:
    """A studio over a run with two LoRA files, and its worker, which paints in the colour of the seed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hurry = root / "hurry"
        """While it is there, nothing is slow."""
        self.queue = PredictionQueue(WorkerBackend([sys.executable, str(STANDIN), str(self.hurry)]), root)
        self.supervisor = JobSupervisor(root)
        menu = predict_routes.studio_menu(Context(self.supervisor, "token", root, (root,), self.queue))
        self.compared = Comparisons(menu, self.queue, root)

    def close(self) -> None:
        self.compared.close()
        self.queue.close()
        self.supervisor.close()

    def finished(self, name: str) -> dict[str, Any]:
        until(lambda: self.compared.one(name)["state"] in ("done", "stopped"), seconds=60)
        return self.compared.one(name)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    given = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": str(tmp_path), "output_name": "star"}
    run = RunDirectory.create(tmp_path, "star", flat.build(RUNS["sdxl", "network"], given))
    for name, rest in (("star-1", b"1"), ("star-2", b"22")):
        (run.path / f"{name}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + rest)
    return [str(run.path / f"{name}.safetensors") for name in ("star-1", "star-2")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def asked(files: list[str], prompts: str = "a red star\na cat --s 4", seeds: str = "3 4", **more: Any) -> dict[str, Any]:
    columns = [{"label": "base", "loras": [], "is_base": True}]
    columns += [{"label": Path(file).stem, "loras": [{"name": file, "weight": "1"}], "varied": 0} for file in files]
    texts = {"draw_with": next(iter(files), "toy"), "family": "sdxl", "steps": "3", "prompt": "something else", "seed": "9"}
    return {"texts": texts, "images": [], "columns": columns, "prompts": prompts, "strengths": "0.5 1", "seeds": seeds, **more}


def test_columns_have_strengths_and_rows_have_seeds_and_all_that_is_wrong_is_said_at_once() -> None:
    columns, rows = axes(asked(["one.safetensors"], prompts="# a note\na cat\n\na dog --d 8", seeds="1, 5-6"))
    assert [(column.label, column.loras, column.strength) for column in columns] == [
        ("base", (), None),
        ("one 0.5", (("one.safetensors", 0.5),), 0.5),
        ("one 1", (("one.safetensors", 1.0),), 1.0),
    ]
    assert [row.line for row in rows] == ["a cat --d 1", "a cat --d 5", "a cat --d 6", "a dog --d 8"]
    assert rows[-1].seed == 8
    # With spaces between them a comma can only be the decimal sign; commas between points part.
    for text in ("0,5 1", "0,5; 1", "0.5,1", "0.5, 1"):
        columns, _rows = axes(asked(["one.safetensors"], strengths=text))
        assert [column.strength for column in columns] == [None, 0.5, 1.0], text
    with pytest.raises(OptionError) as caught:
        axes(asked([], prompts="#", strengths="0,5", seeds="x 9-1"))
    said = [(problem.option, problem.message) for problem in caught.value.problems]
    assert [option for option, _ in said] == ["prompts", "strengths", "seeds", "seeds"]
    assert "'0,5' is not a number" in said[1][1] and "'9-1'" in said[3][1]
    for more, words in (({"columns": []}, "nothing to compare"), ({"seeds": "1-400"}, "more than 600")):
        with pytest.raises(OptionError, match=words):
            axes(asked(["one.safetensors"], **more))


def test_a_grid_whose_prompts_cannot_be_drawn_is_not_begun(place: Place, files: list[str]) -> None:
    (place.root / "there.png").write_bytes(b"x")
    with pytest.raises(OptionError) as caught:
        place.compared.start(asked(files, prompts="fine --s 4\na cat --d\na dog --w x --w 64\na fox --w 100"), ADA)
    assert {problem.option for problem in caught.value.problems} == {"prompts"}
    told = str(caught.value)
    assert "prompts: line 2: seed (--d) ''" in told and "line 3: --w stands twice" in told
    assert "prompts: line 4: width (--w) 100 is not a multiple of 8; the nearest are 96 and 104" in told
    edits = {"texts": {"draw_with": "toy", "family": "kontext", "steps": "3"}}
    for file, said in (
        (place.root / "gone.png", "there is no file"),
        ("/nowhere/at/all.png", "outside the folders"),
        ("/etc/passwd", "outside"),
    ):
        with pytest.raises(OptionError, match=said):
            place.compared.start(asked(files, prompts=f"a cat --ci {place.root / 'there.png'} --ci {file}", **edits), ADA)
    with pytest.raises(OptionError, match="takes no control images"):
        place.compared.start(asked(files, prompts=f"a cat --ci {place.root / 'there.png'}"), ADA)
    with pytest.raises(OptionError, match="size: 100x64 is off the model's grid"):
        place.compared.start(asked(files) | {"texts": asked(files)["texts"] | {"size": "100,64"}}, ADA)
    assert place.compared.listed() == [], "nothing is kept"


def test_a_grid_is_drawn_in_the_background_and_what_another_one_has_is_not_drawn_again(place: Place, files: list[str]) -> None:
    name = place.compared.start(asked(files), ADA)
    found = place.finished(name)
    assert found["state"] == "done" and (found["done"], found["total"], found["said"], found["family"]) == (20, 20, "", "sdxl")
    assert [column["label"] for column in found["columns"]] == ["base", "star-1 0.5", "star-1 1", "star-2 0.5", "star-2 1"]
    assert [(row["prompt"], row["seed"]) for row in found["rows"]] == [(p, s) for p in ("a red star", "a cat --s 4") for s in (3, 4)]
    assert len({key for row in found["keys"] for key in row}) == 20
    assert place.queue.history(ADA) == [], "a grid's images are in the grid"
    drawn = {path: path.stat().st_mtime_ns for path in place.compared.cells.iterdir()}
    # Of another grid what is there for the same prompt is taken.
    other = place.finished(place.compared.start(asked(files, prompts="a red star\na dog"), ADA))
    assert other["keys"][:2] == found["keys"][:2] and other["state"] == "done"
    assert len(list(place.compared.cells.iterdir())) == 30 and all(path.stat().st_mtime_ns == time for path, time in drawn.items())
    # A file that was written anew is another column; its name alone is not.
    Path(files[1]).write_bytes((2).to_bytes(8, "little") + b"{}333")
    third = place.finished(place.compared.start(asked(files), ADA))
    same = [all(a == b for a, b in zip(before, after, strict=True)) for before, after in zip(zip(*found["keys"]), zip(*third["keys"]))]
    assert same == [True, True, True, False, False]
    place.compared.delete(name)
    assert [each["name"] for each in place.compared.listed()] == [third["name"], other["name"]]
    left = {path.stem for path in place.compared.cells.iterdir()}
    assert left == {key for grid in (other, third) for row in grid["keys"] for key in row}


def test_a_grid_that_was_stopped_goes_on_in_another_studio_and_orders_of_people_come_first(files: list[str], tmp_path: Path) -> None:
    first = Place(tmp_path)
    name = first.compared.start(asked(files, prompts="a slow star\na slow cat"), ADA)
    until(lambda: first.compared.one(name)["done"] >= 1, seconds=60)
    between = first.queue.submit(PredictionOrder({"prompt": "x", "steps": 1}, (), {"texts": {}}), ADA)
    assert between.over.wait(60) and between.state == "done" and first.compared.one(name)["state"] == "running"
    first.compared.stop(name)
    stopped = first.finished(name)
    assert stopped["state"] == "stopped" and 1 <= stopped["done"] < 20 and stopped["said"] == ""
    first.close()
    first.hurry.touch()
    second = Place(tmp_path)
    assert second.compared.one(name)["state"] == "stopped"
    second.compared.go_on(name)
    until(lambda: second.compared.one(name)["state"] == "done", seconds=120)
    # What it needs is gone: a sentence, and what is drawn stays.
    Path(files[0]).unlink()
    with pytest.raises(OptionError, match=r"star-1 0.5: .*star-1"):
        second.compared.go_on(name)
    assert second.compared.one(name)["done"] == 20
    second.close()


def test_a_worker_that_fails_or_dies_is_a_sentence_at_the_grid(place: Place, files: list[str]) -> None:
    found = place.finished(place.compared.start(asked(files, prompts="fine\nplease fail"), ADA))
    assert found["state"] == "stopped" and found["done"] == 2 and "base, 'please fail': steps: 0 is too few" in found["said"]
    died = place.finished(place.compared.start(asked(files, prompts="die"), ADA))
    assert "was ended by signal 9" in died["said"] and "A new worker is started" in died["said"]


def test_a_grid_is_shown_and_saved_by_its_routes_without_any_path(place: Place, files: list[str]) -> None:
    with TestClient(Starlette(routes=comparison_routes.routes(place.compared))) as client:
        answer = client.post(f"/kl/compare/start?session={ADA}", json=asked(files, prompts="a <b>star</b>", seeds="3")).json()
        name = answer["name"]
        place.finished(name)
        shown = client.get(f"/kl/compare/{name}").json()
        key = shown["keys"][0][0]
        assert client.get(f"/kl/compare/{name}/cell/{key}").content[1:4] == b"PNG"
        assert client.get(f"/kl/compare/{name}/cell/{key}?size=thumb").headers["content-type"] == "image/webp"
        page = client.get(f"/kl/compare/{name}/file.html")
        assert "attachment" in page.headers["content-disposition"]
        assert page.text.count("data:image/webp;base64,") == 5 and "&lt;b&gt;star" in page.text and "<b>" not in page.text
        assert not re.search(r"(?:src|href)=.?(?!data:)[a-z/]", page.text), "it needs nothing else"
        with Image.open(io.BytesIO(client.get(f"/kl/compare/{name}/file.png").content)) as image:
            assert image.width == 5 * 64 + 4 * 8 and image.height > 64
        assert str(place.root) not in page.text and str(place.root) not in str(shown)
        for path in ("/kl/compare/..", f"/kl/compare/{name}/cell/{'0' * 40}", f"/kl/compare/{name}/cell/x", "/kl/compare/.cells"):
            assert client.get(path).status_code == 404
        wrong = client.post(f"/kl/compare/start?session={ADA}", json=asked(["/etc/passwd"])).json()
        assert "outside the folders" in str(wrong["problems"])
        assert client.post("/kl/compare/start", json=asked(files)).status_code == 400
        assert client.post(f"/kl/compare/{name}/delete").json() == {"comparisons": []}


def test_whole_models_of_a_run_stand_beside_the_base_that_they_came_from(place: Place, tmp_path: Path) -> None:
    given = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": str(tmp_path), "output_name": "whole"}
    run = RunDirectory.create(tmp_path, "whole", flat.build(RUNS["sdxl", "full"], given))
    models = [run.path / f"whole-{number}" for number in (1, 2)]
    for number, model in enumerate(models):
        model.mkdir()
        (model / "model_index.json").write_text(f'{{"_class_name": "StableDiffusionXLPipeline", "n": {number}}}')
    columns: list[dict[str, Any]] = [{"label": "base", "draw_with": str(models[0]), "is_base": True}]
    columns += [{"label": model.name, "draw_with": str(model)} for model in models]
    texts = {"draw_with": str(models[0]), "family": "sdxl", "pretrained_model_name_or_path": str(models[0])}
    name = place.compared.start({"texts": texts, "columns": columns, "prompts": "a star", "seeds": "1", "strengths": "0.5 1"}, ADA)
    found = place.finished(name)
    assert found["state"] == "done" and len(set(found["keys"][0])) == 3
    order, told = place.compared._orders(name, place.compared.told(name)), place.compared.told(name)
    made, (row,) = axes(told["asked"])
    bases = [order(column, row).request["pretrained_model_name_or_path"] for column in made]
    assert bases == ["toy", *map(str, models)]


# Blind votes


def test_bounds_of_a_share_are_the_roots_of_their_definition() -> None:
    rng = np.random.default_rng(3)
    for votes in (1, 2, 7, 40, 1000):
        for share in (0.0, 1.0, *rng.random(5)):
            low, high = wilson(share, votes)
            assert 0 <= low <= share <= high <= 1
            # (share - p)^2 = Z^2 p (1 - p) / votes, as numpy finds its roots.
            square = [1 + Z**2 / votes, -2 * share - Z**2 / votes, share**2]
            assert np.allclose([low, high], np.sort(np.roots(square).real).clip(0, 1), atol=1e-7)
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_every_pair_is_asked_equally_often_on_either_side_and_the_better_column_is_found() -> None:
    there, given = [[True, True, True], [True, True, False]], []
    rng = np.random.default_rng(5)
    for number in range(300):
        pair = next_pair(there, given, "a grid")
        assert pair is not None and pair == next_pair(there, given, "a grid"), "it waits for its answer"
        row, left, right = pair
        # The middle one is better four times in five; the others are alike.
        odds = {1: 0.8}.get(left, 0.2 if right == 1 else 0.5)
        given.append(Vote(row, left, right, "left" if rng.random() < odds else "right"))
        assert number > 3 or not is_clear(ranking(3, given)), "a few votes are not enough"
    asked = {frozenset((vote.left, vote.right)): 0 for vote in given}
    for vote in given:
        asked[frozenset((vote.left, vote.right))] += 1
    assert sorted(asked.values()) == [100, 100, 100]
    assert 100 < sum(vote.left < vote.right for vote in given) < 200
    assert sum(vote.row == 1 for vote in given) == 50 and all(vote.row == 0 for vote in given if 2 in (vote.left, vote.right))
    best, *others = ranking(3, given)
    assert best.column == 1 and 0.7 < best.share < 0.9 and best.votes == 200 and is_clear([best, *others])
    assert ranking(2, [Vote(0, 0, 1, "none")])[0].share == 0.5
    assert next_pair([[True, False], [False, False]], [], "x") is None


def test_votes_are_kept_with_the_grid_and_an_answer_counts_once(place: Place, files: list[str]) -> None:
    with TestClient(Starlette(routes=comparison_routes.routes(place.compared))) as client:
        name = place.compared.start(asked(files, prompts="a star --s 4"), ADA)
        place.finished(name)
        first = client.get(f"/kl/compare/{name}/vote").json()
        assert first["prompt"] == "a star", "what was to be drawn is no secret, and what it is judged by"
        assert first["votes"] == 0 and not first["clear"] and set(first["pair"]) == {"row", "left", "right"}
        second = client.post(f"/kl/compare/{name}/vote", json={**first["pair"], "winner": "right"}).json()
        assert second["votes"] == 1 and second["ranking"][0]["column"] == first["pair"]["right"]
        again = client.post(f"/kl/compare/{name}/vote", json={**first["pair"], "winner": "left"})
        assert again.status_code == 409 and "answered already" in again.json()["detail"]
        assert client.post(f"/kl/compare/{name}/vote", json={**second["pair"], "winner": "both"}).status_code == 409
        assert Comparisons(place.compared._menu, place.queue, place.root).voting(name)["votes"] == 1
        place.compared.go_on(name)
        assert place.compared.voting(name)["votes"] == 1
        Path(files[1]).write_bytes((2).to_bytes(8, "little") + b"{}333")
        place.compared.go_on(name)
        assert place.compared.voting(name)["votes"] == 0, "they were about other images"


def test_somebody_with_a_link_sees_pixels_alone_and_votes_once_a_question_in_one_browser(place: Place, files: list[str]) -> None:
    clock = [0.0]
    links = VoteLinks(place.compared, clock=lambda: clock[0])
    name = place.compared.start({**asked(files, prompts="a star"), "strengths": "1"}, ADA)
    place.finished(name)
    app = Starlette(routes=[*comparison_routes.routes(place.compared, links), *vote_links.routes(links)])
    with TestClient(app) as owner, TestClient(app) as guest, TestClient(app) as other:
        assert owner.get(f"/kl/compare/{name}/vote").json()["invites"]
        link = owner.post(f"/kl/compare/{name}/invite").json()["path"]
        page = guest.get(link)
        assert "guest.js" in page.text and name not in page.text and str(place.root) not in page.text
        assert guest.get(f"{link}/question").status_code == 403, "nobody has entered yet"
        wanted, seen = ["inference/guest.js"], set()
        while wanted:
            module = guest.get(f"{link}/web/{wanted[-1]}")
            assert module.status_code == 200 and module.headers["content-type"].startswith("text/javascript"), wanted[-1]
            place_of = PurePosixPath(wanted.pop()).parent
            seen.add(place_of)
            named = re.findall(r"""^import .*"(\..+)";$""", module.text, re.M)
            wanted += [posixpath.normpath(place_of / name) for name in named]
        assert len(seen) > 2 and guest.get(f"{link}/web/languages/de.json").status_code == 200
        for other_one in (f"{link}/web/main.js", f"{link}/web/schema.js", "/vote/guess/web/inference/guest.js", "/vote/guess"):
            assert guest.get(other_one).status_code == 404, other_one
        assert guest.post(f"{link}/enter", json={}).json() == {"number": 0, "there": True}
        refused = other.post(f"{link}/enter", json={})
        assert refused.status_code == 403 and "opens once" in refused.json()["detail"]
        assert other.get(f"{link}/image/0/left").status_code == other.post(f"{link}/answer", json={"number": 0}).status_code == 403
        shown = guest.get(f"{link}/image/0/left")
        with Image.open(io.BytesIO(shown.content)) as image:
            assert image.format == "WEBP" and not image.info.get("exif") and not getattr(image, "text", {})
        assert b"star" not in shown.content and guest.get(f"{link}/image/1/left").status_code == 404
        fast = guest.post(f"{link}/answer", json={"number": 0, "winner": "left"})
        assert fast.status_code == 429 and place.compared.voting(name)["votes"] == 0
        clock[0] += 1
        assert guest.post(f"{link}/answer", json={"number": 0, "winner": "both"}).status_code == 400
        assert guest.post(f"{link}/answer", json={"number": 0, "winner": "right"}).json() == {"number": 1, "there": True}
        assert guest.post(f"{link}/answer", json={"number": 0, "winner": "right"}).status_code == 409
        assert place.compared.voting(name)["votes"] == 1
        # The images are drawn anew while somebody looks at them.
        for file in files:
            Path(file).write_bytes((2).to_bytes(8, "little") + b"{}" + file.encode())
        place.compared.go_on(name)
        place.finished(name)
        clock[0] += 1
        changed = guest.post(f"{link}/answer", json={"number": 1, "winner": "left"})
        assert changed.status_code == (409 if place.compared.voting(name)["votes"] == 0 else 200)
        for _ in range(vote_links.MAX_LINKS):
            links.invite(name)
        assert guest.get(f"{link}/question").status_code == 404, "the oldest link ends"
        last = owner.post(f"/kl/compare/{name}/invite").json()["path"]
        assert guest.post(f"{last}/enter", json={}).status_code == 200
        place.compared.delete(name)
        assert guest.get(f"{last}/question").status_code == 404
        assert guest.post("/vote/guess/enter", json={}).status_code == 404
        clock[0] += vote_links.LASTS_SECONDS
        assert "any more" in guest.get(f"{last}/question").json()["detail"]


def test_a_studio_that_answers_this_computer_alone_has_no_links(place: Place, files: list[str]) -> None:
    with TestClient(Starlette(routes=comparison_routes.routes(place.compared))) as client:
        name = place.compared.start({**asked(files, prompts="a star", seeds="1"), "strengths": "1"}, ADA)
        assert client.get(f"/kl/compare/{name}/vote").json()["invites"] is False
        assert "--listen" in client.post(f"/kl/compare/{name}/invite").json()["problems"][0]["message"]


def test_the_label_of_each_checkpoint_can_be_told_apart_in_the_saved_image() -> None:
    cell = Image.new("RGB", (64, 64), "red")
    for name in ("toy-star", "a-run-with-a-name-that-has-a-great-many-words-in-it-and-no-end"):
        labels = [f"{name}-{step:06}" for step in (4, 8)]
        drawn = np.asarray(table.drawn([[cell, cell]], labels))
        top = int(np.argmax((drawn == (255, 0, 0)).all(-1).any(1)))
        first, second = drawn[:top, :64], drawn[:top, 72:]
        assert (first != second).any() and (drawn[: top - 1, 66:71] == 255).all(), "they end within their columns"
        assert drawn.shape == (top + 64, 136, 3)


def test_a_full_disk_is_a_sentence_at_the_page_and_at_the_grid(place: Place, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with TestClient(Starlette(routes=comparison_routes.routes(place.compared))) as client:
        order = {**asked(files, prompts="a star", seeds="1"), "strengths": "1"}
        name = client.post(f"/kl/compare/start?session={ADA}", json=order).json()["name"]
        place.finished(name)
        pair = client.get(f"/kl/compare/{name}/vote").json()["pair"]

        def full(path: Path, _data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(comparisons, "write_atomically", full)
        begun = client.post(f"/kl/compare/start?session={ADA}", json=order)
        gone_on = client.post(f"/kl/compare/{name}/continue")
        for answer in (begun, gone_on):
            assert "No space left on device; free some space" in answer.json()["problems"][0]["message"]
        assert "free some space" in client.post(f"/kl/compare/{name}/vote", json={**pair, "winner": "left"}).json()["detail"]
        assert [each["name"] for each in client.get("/kl/compare").json()["comparisons"]] == [name]
        # It fills up while images are drawn.
        (place.compared.cells / f"{place.compared.one(name)['keys'][0][0]}.png").unlink()
        monkeypatch.setattr(place.compared, "_draw", lambda _: "the disk is full")
        place.compared._begin(name)
        until(lambda: place.compared.one(name)["said"] == "the disk is full")
