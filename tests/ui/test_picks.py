"""The pick among the checkpoints of a grid, without a browser: what is known of them, what is proposed, chosen, and deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy import stats
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import comparison_routes, pick_routes
from kohya_like.comparisons import content_hash
from kohya_like.measures import AsAsked, HeldOut, Mean, Nearness, as_asked, by_image, losses_of, mean_of, student
from kohya_like.picks import Candidate, choose, chosen, proposal
from kohya_like.ratings import NAMES
from kohya_like.votes import Vote, ranking
from sd_scripts.dataset import triage
from sd_scripts.families import RUNS
from sd_scripts.runs.events import FileSaved, RunStarted, Validated
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.safetensors_header import CHOSEN, entries_of
from sd_scripts.runs.trash import Trash
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.toy import worlds
from tests import languages, small_segmenters
from tests.full_disk import no_larger_than
from tests.small_raters import arcface, clip, dino
from tests.ui.standin_runs import until
from tests.ui.test_comparisons import ADA, Place, asked

# Numbers


def test_means_and_their_intervals_are_those_of_scipy() -> None:
    for freedom in (1, 2, 3, 4, 7, 20, 300):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)
    rng = np.random.default_rng(1)
    values = rng.gamma(2, size=24)
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    told = mean_of(values.tolist())
    assert told.half is not None and (told.value - told.half, told.value + told.half) == pytest.approx((low, high), rel=1e-3)
    assert mean_of([1.0, 2.0, 3.0]).half is None


def test_intervals_over_images_hold_where_samples_of_one_image_are_alike() -> None:
    """Of 400 drawings of a few images, whose samples differ less from each other than images do, the truth lies inside as often as said."""
    rng = np.random.default_rng(4)
    for images, samples in ((2, 26), (5, 65), (12, 60)):
        inside, plain = 0, 0
        for _ in range(400):
            values = (rng.normal(size=images)[np.arange(samples) % images] + 0.3 * rng.normal(size=samples)).tolist()
            told, each = by_image(values, images), mean_of(values)
            assert told.half is not None and each.half is not None
            inside += abs(told.value) <= told.half
            plain += abs(each.value) <= each.half
        assert plain < 0.75 * 400, "what samples alone tell is too sure"
        assert inside >= 0.92 * 400, (images, inside)
        of_images = np.reshape(values, (-1, images)).mean(axis=0)
        high = stats.ttest_1samp(of_images, 0).confidence_interval().high
        assert (told.value, told.half) == pytest.approx((np.mean(values), high - of_images.mean()), rel=0.01)
    assert by_image(values, 0) == by_image(values, 60) == mean_of(values)
    alone = by_image(values, 1).half
    assert alone is not None and alone == pytest.approx(np.std(values, ddof=1) * stats.t.ppf(0.975, 59), rel=0.01)


def test_checkpoints_are_compared_sample_by_sample_and_by_noise_level() -> None:
    rng = np.random.default_rng(2)
    times, easy = rng.random(40), rng.gamma(2, size=40)
    worse = easy + 0.05 + 0.02 * rng.random(40)
    found = losses_of({name: (step, list(zip(times, of, strict=True))) for name, step, of in (("a", 10, easy), ("b", 20, worse))})
    assert found["a"].step == 10 and found["a"].mean.value == pytest.approx(easy.mean()) and found["a"].behind == Mean(0.0, 0.0, 40)
    behind, mean = found["b"].behind, found["b"].mean
    assert behind is not None and behind.exceeds(1.0) and behind.value == pytest.approx((worse - easy).mean())
    assert mean.half is not None and mean.half > worse.mean() - easy.mean(), "side by side their intervals overlap"
    for band, told in enumerate(found["b"].bands):
        inside = worse[(times >= band / 4) & (times < (band + 1) / 4)]
        assert told is not None and told.count == len(inside) and told.value == pytest.approx(inside.mean())
    other = losses_of({"a": (1, [[0.1, 1.0]]), "b": (2, [[0.2, 2.0]])})["b"]
    assert other.behind is None and other.bands[1:] == (None, None, None), "another noise cannot be compared"


def test_the_nearest_image_is_the_one_that_correlates_most(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    greys = [rng.integers(0, 255, (32, 32, 3), np.uint8) for _ in range(6)]
    greys.append(np.clip(greys[0].astype(int) + 6, 0, 255).astype(np.uint8))
    for number, grey in enumerate(greys):
        Image.fromarray(grey).resize((64, 64), Image.Resampling.NEAREST).save(tmp_path / f"{number}.png")
    signs = [triage.signs_of(tmp_path / f"{number}.png") for number in range(7)]
    found = triage.nearest([signs[6], signs[5]], signs[:5])
    for one, (best, _) in zip((signs[6], signs[5]), found, strict=True):
        wanted = max(np.corrcoef(one.grey.ravel(), other.grey.ravel())[0, 1] for other in signs[:5])
        assert best == pytest.approx(wanted, abs=1e-5)
    assert [is_copy for _, is_copy in found] == [True, False]


# The proposal


def candidate(column: int, loss: float, behind: Mean | None, copies: int = 0) -> Candidate:
    held = HeldOut(column, Mean(loss, 0.1, 20), (None,) * 4, behind)
    return Candidate(column, f"c{column}", held, Nearness(0.5, copies, 8))


def test_each_sentence_of_a_proposal_is_one_of_the_catalogue() -> None:
    lowest, near, far = Mean(0.0, 0.0, 20), Mean(0.01, 0.02, 20), Mean(0.2, 0.05, 20)
    keys = [message.id for message in languages.template() if message.id and isinstance(message.id, str)]
    whole = [re.compile(re.sub(r"\\\{\d\\\}", lambda _hole: r"\S+", re.escape(key))) for key in keys]
    for given in (
        [candidate(1, 0.4, lowest), candidate(2, 0.6, far)],
        [candidate(1, 0.4, lowest), candidate(2, 0.41, near)],
        [candidate(1, 0.4, lowest, 5), candidate(2, 0.41, near, 1), candidate(3, 0.41, near, 5)],
    ):
        for sentence in re.split(r"(?<=\.) (?=\S)", proposal(given, [], None).why):
            assert any(pattern.fullmatch(sentence) for pattern in whole), sentence


def test_of_losses_that_are_not_clearly_higher_the_one_that_trained_longest_is_proposed_unless_it_copies() -> None:
    lowest, near, far = Mean(0.0, 0.0, 20), Mean(0.01, 0.02, 20), Mean(0.2, 0.05, 20)
    plain = [candidate(1, 0.6, far), candidate(2, 0.4, lowest), candidate(3, 0.41, near)]
    told = proposal(plain, [], None)
    said = (
        "c3 is proposed: its held-out loss (0.41) is not clearly above the lowest of 3 (c2, 0.4), and of those it has trained longest. 0 of"
    )
    assert told.column == 3 and said in told.why
    overtrained = [candidate(1, 0.4, lowest), candidate(2, 0.6, far), candidate(3, 0.7, far)]
    assert (
        proposal(overtrained, [], None).column == 1 and "it has the lowest held-out loss (0.4) of 3" in proposal(overtrained, [], None).why
    )
    # Just outside of its 95 % interval; but this is one comparison of several.
    inside, outside = (Mean(value, 0.03, 20) for value in (0.039, 0.041))
    assert proposal([candidate(1, 0.4, lowest), candidate(2, 0.439, inside)], [], None).column == 2
    assert proposal([candidate(1, 0.4, lowest), candidate(2, 0.441, outside)], [], None).column == 1
    unknown = Mean(0.01, None, 3)
    assert proposal([candidate(1, 0.4, lowest), candidate(2, 0.41, unknown)], [], None).column == 1, "of three losses nothing is known"
    copying = [candidate(1, 0.6, far), candidate(2, 0.4, lowest, 1), candidate(3, 0.41, near, 5)]
    told = proposal(copying, [], Nearness(0.5, 1, 8))
    assert told.column == 2 and "1 of its 8 images nearly copy a training image, fewer than of c3" not in told.why
    middle = [candidate(1, 0.4, lowest, 5), candidate(2, 0.41, near, 1), candidate(3, 0.41, near, 5)]
    told = proposal(middle, [], Nearness(0.5, 1, 8))
    assert told.column == 2 and "1 of its 8 images nearly copy a training image, fewer than of c3" in told.why
    assert proposal(copying, [], Nearness(0.5, 5, 8)).column == 3, "so does the base"
    unseen = replace(middle[1], near=None)
    told = proposal([middle[0], unseen, middle[2]], [], None)
    assert told.column == 2 and told.why.endswith("(c1, 0.4)."), "its images were not drawn"
    votes = [Vote(0, 1, other, "left") for other in (0, 2, 3) for _ in range(30)]
    assert proposal(plain, ranking(4, votes), None).column == 1
    assert proposal(plain, ranking(4, votes[:4]), None).column == 3, "a few votes decide nothing"
    unmeasured = [Candidate(1, "a", None, None), Candidate(2, "b", None, None)]
    assert proposal(unmeasured, [], None).column is None and "validation_split" in proposal(unmeasured, [], None).why
    assert proposal(plain[:1], [], None).column is None


# What is chosen, and what is deleted


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with three files that says of two of them how large their held-out losses were, and a data set of two images."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(2):
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)).save(data / f"{number}.png")
    given = {
        "pretrained_model_name_or_path": "toy",
        "train_data_dir": str(data),
        "resolution": [64, 64],
        "min_bucket_reso": 64,
        "output_name": "star",
    }
    made = RunDirectory.create(tmp_path, "star", flat.build(RUNS["sdxl", "network"], {**given, "output_dir": str(tmp_path)}))
    made.log(RunStarted(steps=20))
    for step, offset in ((10, 0.0), (20, 0.3)):
        made.log(Validated(step=step, loss=1.0 + offset, samples=[[place / 16, 1 + 0.1 * place + offset] for place in range(16)]))
        made.log(FileSaved(step=step, what="export", file=f"star-{step}.safetensors"))
        save_file({"weight": torch.full((3,), float(step))}, made.path / f"star-{step}.safetensors", {"ss_seed": "7"})
    save_file({"weight": torch.ones(300)}, made.path / "star-best.safetensors")
    return made


def test_in_a_toy_world_the_exact_reader_says_which_images_show_what_was_asked(tmp_path: Path) -> None:
    rng, paths = worlds.rng_for(3), []
    for number, text in enumerate(("a red star at the top left", "a blue circle in the center", "a red star at the top left")):
        worlds.draw(worlds.scene_of(text), 64, 64, rng).save(tmp_path / f"{number}.png")
        paths.append(tmp_path / f"{number}.png")
    asked = ("a red star at the top left --d 1 --n a circle", "a circle", "a blue star")
    assert as_asked(asked, paths) == AsAsked(2, 3)
    assert as_asked(("a circle", "a red star in the center", "something"), paths) == AsAsked(0, 2)
    assert as_asked(("a cat", "a star and a circle", "x"), paths) is None and as_asked(("a star",), [tmp_path / "none.png"]) is None


def test_a_choice_is_marked_in_the_file_and_moves_and_the_file_stays_what_it_was(run: RunDirectory) -> None:
    first, second = (run.path / f"star-{step}.safetensors" for step in (10, 20))
    before, changed = content_hash(str(first)), first.stat().st_mtime_ns
    choose(first, "It is best")
    assert chosen(run.path) == first.name and entries_of(first)[0]["__metadata__"] == {"ss_seed": "7", CHOSEN: "It is best"}
    assert torch.equal(load_file(first)["weight"], torch.full((3,), 10.0)) and first.stat().st_mtime_ns == changed
    assert content_hash(str(first)) == before != content_hash(str(second)), "images that were drawn with it stay its images"
    choose(second, "chosen by hand")
    assert chosen(run.path) == second.name and entries_of(first)[0]["__metadata__"] == {"ss_seed": "7"}
    save_file({"weight": torch.ones(3)}, second, {"ss_seed": "8"})
    assert content_hash(str(second)) != before
    second.unlink()
    assert chosen(run.path) == ""


@pytest.fixture
def place(tmp_path: Path, run: RunDirectory) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def test_numbers_pick_and_the_end_of_the_others_by_their_routes(place: Place, run: RunDirectory) -> None:
    files = [str(run.path / f"star-{step}.safetensors") for step in (10, 20)]
    known = pick_routes.Picks(place.compared, place.supervisor, place.root, (place.root.parent,))
    with TestClient(Starlette(routes=[*pick_routes.routes(known), *comparison_routes.routes(place.compared)])) as client:
        name = place.compared.start({**asked(files, prompts="a star", seeds="3"), "strengths": "1"}, ADA)
        place.finished(name)
        with no_larger_than(10):
            full = client.post(f"/kl/compare/{name}/rate", json={"clip_model": "a/b"})
        assert "is full; free some space" in full.json()["problems"][0]["message"]

        def numbers() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/kl/compare/{name}/numbers").json()
            return found

        until(lambda: numbers()["ready"], seconds=60)
        told = numbers()
        assert told["rating"] == dict.fromkeys(NAMES, "") and all(column["rated"] is None for column in told["columns"])
        assert [column["label"] for column in told["columns"]] == ["base", "star-10", "star-20"] and told["problems"] == []
        assert [column["held_out"] and column["held_out"]["mean"]["value"] for column in told["columns"]] == [
            None,
            pytest.approx(1.75),
            pytest.approx(2.05),
        ]
        assert all(column["near"]["count"] == 1 and column["near"]["distance"] > 0.5 for column in told["columns"])
        assert told["proposal"]["column"] == 1 and told["chosen"] == "" and str(place.root) not in json.dumps(told)
        assert client.get(f"/kl/compare/{name}/others").json() == {"files": [], "bytes": 0}, "nothing goes before something is chosen"
        assert client.post(f"/kl/compare/{name}/choose", json={"column": 0}).json()["problems"], "the base is no file"
        assert client.post(f"/kl/compare/{name}/choose", json={"column": 1}).json()["chosen"] == "star-10.safetensors"
        assert entries_of(Path(files[0]))[0]["__metadata__"][CHOSEN].startswith("star-10 is proposed: it has the lowest")
        assert client.post(f"/kl/compare/{name}/choose", json={"column": 2}).json()["chosen"] == "star-20.safetensors"
        others = client.get(f"/kl/compare/{name}/others").json()
        gone = [run.path / "star-10.safetensors", run.path / "star-best.safetensors"]
        assert sorted(others["files"]) == [path.name for path in gone] and others["bytes"] == sum(path.stat().st_size for path in gone)
        stale = client.post(f"/kl/compare/{name}/delete-others", json={"files": others["files"][:1]}).json()
        assert "have changed since" in stale["problems"][0]["message"] and all(path.exists() for path in gone)
        assert client.post(f"/kl/compare/{name}/delete-others", json={"files": others["files"]}).json() == {"bytes": others["bytes"]}
        assert [path.name for path in run.path.glob("*.safetensors")] == ["star-20.safetensors"]
        (entry,) = Trash(place.root).entries()
        assert Trash(place.root).bytes_of(entry) >= others["bytes"]
        assert place.compared.one(name)["state"] == "done", "its images stay"
        assert client.get("/kl/compare/none/numbers").status_code == 404
        with pytest.raises(OptionError, match="no file of a run"):
            known.choose(name, 1)
        Trash(place.root).restore(entry.name)
        assert all(path.exists() for path in gone), "they come back"


@pytest.mark.long
def test_models_that_somebody_names_rate_the_images_and_are_kept(place: Place, run: RunDirectory, tmp_path: Path) -> None:
    files = [str(run.path / f"star-{step}.safetensors") for step in (10, 20)]
    raters = {"clip_model": str(clip(tmp_path / "clip")), "image_model": str(dino(tmp_path / "dino"))}
    raters["face_model"] = str(small_segmenters.build("yolos", tmp_path / "yolos"))
    raters["face_likeness_model"] = str(arcface(tmp_path / "w600k.onnx", np.eye(3, dtype=np.float32)))
    known = pick_routes.Picks(place.compared, place.supervisor, place.root, (tmp_path,))
    with TestClient(Starlette(routes=[*pick_routes.routes(known), *comparison_routes.routes(place.compared)])) as client:
        name = place.compared.start({**asked(files, prompts="a star\na circle", seeds="3"), "strengths": "1"}, ADA)
        place.finished(name)

        def rated(given: dict[str, str]) -> dict[str, Any]:
            found: dict[str, Any] = client.post(f"/kl/compare/{name}/rate", json=given).json()
            until(lambda: client.get(f"/kl/compare/{name}/numbers").json()["ready"], seconds=200)
            return found if "problems" in found and "columns" not in found else client.get(f"/kl/compare/{name}/numbers").json()

        wrong = rated({"clip_model": str(tmp_path), "image_model": "/etc"})["problems"]
        assert "has no config.json" in wrong[0]["message"] and "image_model: " in wrong[1]["message"]
        assert "faces need two models" in rated({"face_model": raters["face_model"]})["problems"][0]["message"]
        told = rated(raters)
        # The small detector is sure of no face.
        assert told["problems"] == ["No face was found in 2 of 2 training images."] and told["rating"] == raters
        for column in told["columns"]:
            assert column["rated"]["prompt"]["count"] == 2 and -1 <= column["rated"]["prompt"]["value"] <= 1
            assert column["rated"]["likeness"]["count"] == 2 and -1 <= column["rated"]["likeness"]["value"] <= 1
            assert column["rated"]["face"] is None and column["rated"]["faceless"] == 2
        kept = [path for path in (place.compared.folder / ".ratings").iterdir() if path.name != "models.json"]
        assert len(kept) == 1 and [grid["name"] for grid in client.get("/kl/compare").json()["comparisons"]] == [name]
        written = kept[0].stat().st_mtime_ns
        assert rated(raters)["columns"] == told["columns"] and kept[0].stat().st_mtime_ns == written, "nobody looks twice"
        (tmp_path / "dino" / "model.safetensors").write_bytes(b"")
        (tmp_path / "dino2").mkdir()
        (tmp_path / "dino2" / "config.json").write_text("{}")
        told = rated({"image_model": str(tmp_path / "dino2")})
        assert "were of no help" in told["problems"][0] and "image_model" in told["problems"][0]
        assert all(column["rated"] is None and column["near"] for column in told["columns"])
        assert all(column["rated"] is None for column in rated({})["columns"])
