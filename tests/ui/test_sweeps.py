"""Sweeps: what is compared when, which runs go on, and that it goes on whoever looks and whoever is killed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from kohya_like import cli, desk, sweeps
from kohya_like.supervisor import ENDED, JobSupervisor
from sd_scripts.families import RUNS
from sd_scripts.runs.events import RunStopped, Validated
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import toml_files
from sd_scripts.schema.errors import OptionError
from tests.ui.standin_runs import command, options, until

RUN = RUNS["sdxl", "network"]


def test_all_runs_of_a_sweep_together_take_at_most_three_times_the_steps_of_one() -> None:
    for members in range(2, sweeps.MOST_MEMBERS + 1):
        for steps in (81, 300, 1000, 1601, 100_000):
            rungs = sweeps.rungs_of(members, steps)
            before = (0, *rungs.steps)
            trained = sum(count * (step - last) for count, step, last in zip(rungs.counts, rungs.steps, before, strict=False))
            assert trained <= 3 * steps, (members, steps, rungs)
            assert list(rungs.steps) == sorted(set(rungs.steps)) and steps - rungs.steps[0] < rungs.steps[-1] <= steps
            assert all(step % rungs.steps[0] == 0 for step in rungs.steps), "held-out losses are measured at multiples of the first"
            assert rungs.counts[0] == members and 2 <= rungs.counts[-1] <= 3
            assert all(later * 3 >= sooner for sooner, later in zip(rungs.counts, rungs.counts[1:], strict=False))
            assert len(rungs.steps) == len(rungs.counts)
            if len(rungs.steps) > 1:
                longer = sweeps.Rungs((*(2 * step for step in rungs.steps[:-1]), steps), rungs.counts)
                assert rungs.cost > 2.5 or longer.cost > 3, "the first comparison is as late as the cost allows"
    with pytest.raises(OptionError, match="5 steps are too few to compare 27 runs"):
        sweeps.rungs_of(27, 5)


def test_what_cannot_be_swept_over_is_said_with_all_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        sweeps.read_axes(RUN, {"loss_type": "l1 l2", "nonsense": "1", "network_dim": " ", "network_alpha": "1,5"})
    told = [str(problem) for problem in caught.value.problems]
    assert (
        "loss_type cannot be swept over" in told[0] and "nonsense is no option here" in told[1] and told[2].startswith("network_dim: give")
    )
    assert told[3] == 'network_alpha: "1,5" may mean 1.5, or the numbers 1 and 5; write 1.5, or a space between them'
    read = sweeps.read_axes(RUN, {"network_alpha": "0,5 1", "learning_rate": "1e-4,3e-4", "network_dim": "4,8"})
    assert read == {"network_alpha": ("0.5", "1"), "learning_rate": ("1e-4", "3e-4"), "network_dim": ("4", "8")}
    with pytest.raises(OptionError, match="choose a setting"):
        sweeps.read_axes(RUN, {})
    base = options(tmp_path, max_train_steps=90)
    with pytest.raises(OptionError) as caught:
        sweeps.planned(base, sweeps.read_axes(RUN, {"learning_rate": "1e-3 fast", "network_dim": "4 0"}))
    assert {problem.option for problem in caught.value.problems} == {"learning_rate", "network_dim"}
    with pytest.raises(OptionError, match="nothing to compare"):
        sweeps.planned(base, {"learning_rate": (base.optimizer.learning_rate,)})
    with pytest.raises(OptionError, match="these are 31 runs; a sweep has at most 27"):
        sweeps.planned(base, {"network_dim": tuple(range(200, 230))})
    with pytest.raises(OptionError, match="a sweep counts steps"):
        sweeps.planned(options(tmp_path, max_train_epochs=2), {"network_dim": (4,)})
    # All would be the same run.
    rates = {"learning_rate": (1e-3, 2e-3)}
    with pytest.raises(OptionError, match="has no effect, because these are given: unet_lr;"):
        sweeps.planned(options(tmp_path, unet_lr=1e-4), rates)
    assert len(sweeps.planned(options(tmp_path, unet_lr=1e-4), {"unet_lr": (1e-3, 2e-3)}).members) == 3
    both = {"train_text_encoder": True, "cache_text_encoder_outputs": False, "unet_lr": 1e-4}
    assert len(sweeps.planned(options(tmp_path, **both), rates).members) == 3, "the text encoders take it"
    with pytest.raises(OptionError, match="given: unet_lr, text_encoder_lr;"):
        sweeps.planned(options(tmp_path, **both, text_encoder_lr=[5e-5]), rates)


def test_values_that_mean_the_same_are_one_run_and_changes_are_told(tmp_path: Path) -> None:
    base = options(tmp_path, max_train_steps=90, early_stop_patience=3, save_best=True, validation_split=0.2, network_type="lora")
    sweep = sweeps.planned(base, sweeps.read_axes(RUN, {"network_type": "lora lokr", "lokr_factor": "4,8", "rank_stabilized": "on off"}))
    words = [sweep.tried(member).words for member in sweep.members]
    assert len(words) == len(set(words)) == 4, words
    assert words[0] == "Rank-stabilized (rsLoRA) off, Network type lora, LoKr factor -1 (as in the form)"
    assert words[1] == "Rank-stabilized (rsLoRA) on", "which sleeps beside lokr, as its factor does beside lora"
    assert sweep.options(sweep.members[0]).optimizer == base.optimizer
    assert sweep.notes == ("early_stop_patience is left out: the sweep says who goes on.",)
    assert sweep.base.dataset.validate_every_n_steps == sweep.rungs.steps[0] and sweep.base.dataset.validation_split == 0.2
    assert "are held out" in sweeps.planned(options(tmp_path), {"network_dim": (3,)}).notes[0]


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSupervisor]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    supervisor = JobSupervisor(tmp_path / "output", command("tried"))
    yield supervisor
    for job in supervisor.seen():
        supervisor.stop(job, grace_seconds=0)
    supervisor.close()


def through(supervisor: JobSupervisor, name: str) -> sweeps.SweepProgress:
    """Goes on as the studio does until the sweep is through."""
    kept = sweeps.Sweeps(supervisor)

    def is_through() -> bool:
        kept.hear(supervisor.jobs())
        return kept.read(name).is_ended

    until(is_through, 300)
    return sweeps.progress_of(kept.read(name), kept.jobs())


def test_the_better_third_goes_on_and_a_studio_that_was_closed_takes_it_up(supervisor: JobSupervisor) -> None:
    base = options(supervisor.root, max_train_steps=60, learning_rate=1e-5)
    kept = sweeps.Sweeps(supervisor)
    name = kept.begin(sweeps.planned(base, {"learning_rate": (1e-4, 5e-4, 1e-2, 9.0)})).name
    first = [member.run for member in kept.read(name).members]
    assert all(first) and len(set(first)) == 5
    kept.advance(name)
    assert [member.run for member in kept.read(name).members] == first, "looking again starts nothing again"
    supervisor.close()
    after = JobSupervisor(supervisor.root, command("tried"))
    try:
        progress = through(after, name)
        jobs = {job.name: job for job in after.seen()}
    finally:
        after.close()
    rates = {one.member.values.get("learning_rate", 1e-5): one for one in progress.standings}
    assert sorted(jobs) == sorted(first), "each trained in one folder"
    # Of the two at one distance the one goes on, or by rounding the other.
    assert {rate: len(one.losses) for rate, one in rates.items()} in (
        {1e-5: 1, 1e-4: 1, 5e-4: 2, 1e-2: 2, 9.0: 0},
        {1e-5: 1, 1e-4: 2, 5e-4: 2, 1e-2: 1, 9.0: 0},
    )
    step = kept.read(name).rungs.steps[0]
    assert rates[9.0].out.startswith("failed") and rates[1e-5].out == f"higher loss at step {step}"
    won = progress.standings[progress.winner or 0]
    assert won.member.values == {"learning_rate": 5e-4} and jobs[won.member.run].state == "finished"
    assert desk.read(jobs[won.member.run].path).starred and desk.read(jobs[won.member.run].path).called == "Learning rate 0.0005"
    assert sum(job.summary.step for job in jobs.values()) <= 3 * 60
    sweep = kept.read(name)
    said = (
        f"Its held-out loss is lowest at step {sweep.rungs.steps[-1]}, 0.3527; at step {step} it is lower than that of the form's settings"
    )
    assert sweeps.verdict(sweep, progress, jobs).startswith(said)
    assert kept.discard_others(name) == [run for run in first if run != won.member.run]
    assert [job.name for job in supervisor.seen()] == [won.member.run]


def test_the_settings_of_the_form_give_way_only_to_what_is_clearly_better(supervisor: JobSupervisor) -> None:
    """In a campaign of 25 tasks the lowest of losses that differed by chance drew worse than the preset it replaced; so did a lower rate
    that was clearly better half-way, where the form's high rate had not yet decayed."""
    base = options(supervisor.root, max_train_steps=90, learning_rate=2e-3)
    planned = sweeps.planned(base, {"learning_rate": (1e-3, 2e-3), "network_dim": (16, 8)})
    assert [dict(member.values) for member in planned.members] == [
        {},
        {"learning_rate": 1e-3},
        {"learning_rate": 1e-3, "network_dim": 8},
        {"network_dim": 8},
    ]
    rng = random.Random(7)
    half, end = planned.rungs.steps
    easy = [0.1 + 0.1 * each for each in range(16)]

    def around(mean: float, chance: float) -> list[float]:
        """Losses of as many images, some harder than others, with so much chance in each."""
        noise = [rng.uniform(-chance, chance) for _ in easy]
        return [each + mean + off - sum(noise) / len(noise) for each, off in zip(easy, noise, strict=True)]

    def after(
        first: list[list[float]],
        last: Mapping[int, list[float]],
        sent_on: tuple[int, ...] = (),
        gone: tuple[int, ...] = (),
        images: int = 0,
        between: Mapping[int, list[float]] | None = None,
    ) -> sweeps.SweepProgress:
        """Where a sweep stands whose members have these losses at the first rung, between it and the end, and at the end, of so many
        images, which take turns; gone: places of runs whose folders are not there any more."""
        members = []
        for place, member in enumerate(planned.members):
            run = RunDirectory.create(supervisor.root, "tried", planned.options(member))
            for step, losses in ((half, dict(enumerate(first))), (half + 15, between or {}), (end, last)):
                if found := losses.get(place):
                    run.log(Validated(step=step, loss=sum(found) / len(found), samples=[[0.5, loss] for loss in found], images=images))
            run.log(RunStopped(step=end if place in last else half))
            members.append(replace(member, run=run.path.name, rung=int(place in sent_on or place in last)))
        jobs = {job.name: job for job in supervisor.jobs() if job.name not in [members[place].run for place in gone]}
        return sweeps.progress_of(replace(planned, members=tuple(members)), jobs)

    assert planned.rungs.counts == (4, 2) and (half, end) == (45, 90)
    late = "higher loss at step 45"
    # All others are lower, those with a lower rate clearly, the other by chance: the form's own go on beside the best.
    first = [around(3.0, 0.0), around(2.9, 0.01), around(2.7, 0.01), around(2.8, 0.9)]
    progress = after(first, {})
    assert progress.starts == (0, 2) and progress.winner is None
    assert [one.out for one in progress.standings] == ["", late, "", late]
    assert after(first, {}, gone=(0,)).starts == (2, 3), "without them the two best go on"
    # One with the same rate is clearly lower; who goes on is said by the losses alone.
    progress = after([*first[:3], around(2.95, 0.01)], {})
    assert progress.starts == (2, 1) and [one.out for one in progress.standings] == [late, "", "", late]
    # At the end lower by chance, clearly lower, and higher.
    for low, chance, winner in ((0.98, 0.4, 0), (0.98, 0.001, 2), (1.02, 0.001, 0)):
        progress = after(first, {0: around(1.0, 0.0), 2: around(low, chance)})
        assert progress.is_through and progress.winner == winner
    # A good rate is at its best before the end, and learns the images by heart from there; so may the form's own.
    for places, winner in (((2,), 2), ((0, 2), 0)):
        best = {place: around(0.65, 0.001) for place in places}
        assert after(first, {0: around(0.7, 0.0), 2: around(0.72, 0.001)}, between=best).winner == winner
    # Four images, one ten times as hard as another, each with four samples: a tenth less of each is clear, of one alone it is not.
    own = [scale * rng.uniform(0.9, 1.1) for _ in range(4) for scale in (0.1, 0.2, 0.4, 1.0)]
    for factors, winner in (((0.9, 0.91, 0.9, 0.89), 2), ((1.02, 0.99, 1.0, 0.8), 0)):
        lower = [loss * factors[place % 4] for place, loss in enumerate(own)]
        assert sum(lower) < sum(own) and after(first, {0: own, 2: lower}, images=4).winner == winner
    # What was sent on by an earlier rule stays in.
    progress = after(first, {1: around(1.0, 0.0), 3: around(0.99, 0.4)})
    assert progress.winner == 3 and progress.standings[0].out == late
    assert after(first, {}, sent_on=(1, 3)).standings[0].out == late


def test_a_sweep_that_is_ended_starts_nothing_more(supervisor: JobSupervisor) -> None:
    kept = sweeps.Sweeps(supervisor)
    name = kept.begin(sweeps.planned(options(supervisor.root, max_train_steps=5000), {"learning_rate": (1e-3, 2e-3, 3e-3)})).name
    kept.end(name)
    until(lambda: all(job.state in ENDED or job.stopping for job in supervisor.jobs()))
    kept.hear(supervisor.jobs())
    assert sum(member.rung > 0 for member in kept.read(name).members) == 0
    assert not [job for job in supervisor.seen() if job.state == "queued"]


@pytest.mark.parametrize("damage", ["[" * 200_000, "", "{}", '{"members": 3}', "\xff"])
def test_a_damaged_sweep_is_a_sentence_and_keeps_nobody_from_anything(damage: str, supervisor: JobSupervisor) -> None:
    folder = supervisor.root / sweeps.FOLDER / "one"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_bytes(damage.encode("latin-1"))
    kept = sweeps.Sweeps(supervisor)
    kept.hear(supervisor.jobs())
    with pytest.raises(OptionError, match=r"one: .* cannot be read"):
        kept.read("one")
    assert kept.names() == ["one"] and "cannot be read" in kept.trouble("one")[0]


def test_a_value_that_cannot_be_in_a_sweep_is_a_sentence(supervisor: JobSupervisor) -> None:
    kept = sweeps.Sweeps(supervisor)
    folder = supervisor.root / sweeps.FOLDER / "one"
    folder.mkdir(parents=True)
    (folder / "base.toml").write_text(toml_files.to_toml(options(supervisor.root)))
    member = {"values": {"learning_rate": 1e-3}, "run": "", "rung": 0, "losses": []}
    whole = {"members": [member], "steps": [5, 20], "counts": [3, 1], "notes": [], "is_ended": True}
    damages = [{"members": [{**member, **wrong}]} for wrong in ({"values": [1]}, {"values": {"nonsense": 1}}, {"rung": 9}, {"rung": 1e999})]
    for damage in (*damages, {"steps": [1e999, 2]}, {"counts": [1]}, {"is_ended": "x"}, {"members": []}):
        (folder / "sweep.json").write_text(json.dumps({**whole, **damage}))
        with pytest.raises(OptionError, match=r"one: .* cannot be read"):
            kept.read("one")
        kept.hear(supervisor.jobs())
    (folder / "sweep.json").write_text(json.dumps(whole))
    assert kept.read("one").members[0].values == {"learning_rate": 1e-3}


def test_a_sweep_in_a_terminal_says_its_plan_and_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    words = ["sweep", RUN.script, "--pretrained_model_name_or_path", "toy", "--train_data_dir", "toy:star", "--output_dir", str(tmp_path)]
    assert cli.main([*words, "--max_train_steps", "900", "--vary", "learning_rate=1e-4,1e-3", "--vary", "network_dim=4,8", "--plan"]) == 0
    assert "5 runs, compared at steps 300, the better third goes on: at most 3.0" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a plan writes nothing"
    assert cli.main([*words, "--vary", "learning_rate"]) == 1 and "--vary learning_rate: write option=value" in capsys.readouterr().err
    assert cli.main(["sweep", "train.py"]) == 1 and "train.py: name the script that trains" in capsys.readouterr().err
    assert cli.main(["sweep", "--end", "x", "--output_dir", str(tmp_path)]) == 1 and "there is no sweep x" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_a_sweep_is_planned_beside_the_form_and_its_table_leads_to_its_runs(
    supervisor: JobSupervisor, studios: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    kept = sweeps.Sweeps(supervisor)
    name = kept.begin(sweeps.planned(options(supervisor.root, max_train_steps=30), {"learning_rate": (1e-3,)})).name
    through(supervisor, name)
    visited = visit(studios(output_dir=supervisor.root).url)
    page = visited.page
    page.locator("summary", has_text="Sweep").click()
    page.get_by_label("Values of setting 1").fill("1e-4 2e-4")
    expect(page.locator(".kl-sweeping [role=alert]").last).to_contain_text("pretrained_model_name_or_path is missing")
    expect(page.get_by_role("button", name="Start sweep")).to_be_disabled()
    page.get_by_label("Base model", exact=True).fill("toy")
    page.get_by_label("Training image folder", exact=True).fill("toy:star")
    expect(page.locator(".kl-sweep-runs li")).to_have_count(2)
    expect(page.get_by_role("button", name="Start sweep")).to_be_enabled()
    page.get_by_role("tab", name="Runs").click()
    page.get_by_role("button", name="Sweeps", exact=True).click()
    table = page.get_by_role("region", name="Table of the sweep")
    expect(table.locator("tbody tr")).to_have_count(2)
    expect(page.locator(".kr-compare .kr-caption")).to_contain_text("Learning rate 0.001 wins. Its held-out loss is lowest at step ")
    assert page.url.endswith(f"#sweep={name}")
    rows = page.locator("#kl-runs .kr-row")
    expect(rows).to_have_count(2)
    expect(page.locator("#kl-runs .kr-row[aria-current=true]")).to_have_count(0)
    # The winner has a star, and the lowest loss in bold, which is the one that was measured.
    losses = {one.member.values.get("learning_rate"): one.losses for one in sweeps.progress_of(kept.read(name), kept.jobs()).standings}
    assert min(losses, key=lambda rate: losses[rate][-1]) == 1e-3
    best = table.get_by_role("row", name="The best")
    expect(best).to_have_count(1)
    expect(best).to_contain_text("Learning rate 0.001")
    expect(best.locator("strong")).to_have_text([f"{loss:.4g}" for loss in losses[1e-3]])
    expect(table.locator("strong")).to_have_count(len(losses[1e-3]))
    expect(table.locator("tbody td:last-child")).to_contain_text(["Finished", "Finished"])
    page.reload()
    expect(table.locator("tbody tr")).to_have_count(2)
    (won,) = (member.run for member in kept.read(name).members if member.values.get("learning_rate") == 1e-3)
    table.get_by_role("button", name="Learning rate 0.001", exact=True).click()
    expect(page).to_have_url(re.compile(f"#run={won}$"))
    # All of it is told in the reader's language, stored names too.
    page.go_back()
    page.locator(".kl-language").select_option("de")
    expect(page.locator(".kr-compare .kr-caption")).to_have_text(
        re.compile(
            r"Lernrate 0\.001 gewinnt\. Der zurückgehaltene Loss ist bei Schritt \d+ am niedrigsten, 0\.\d+, "
            r"und damit um [\d.]+ ± [\d.]+ % \(95 %\) niedriger als mit den Einstellungen des Formulars\."
        )
    )
    for told in ("Lernrate 0.001", "(wie im Formular)", f"Reihenversuch {name}"):
        expect(rows.filter(has_text=told).first).to_be_visible()
    page.locator(".kl-language").select_option("en")
    page.get_by_role("button", name="Delete the others").click()
    page.get_by_role("button", name="Move 1 run to the trash").click()
    expect(page.locator("[aria-label=Sweep] .kr-status")).to_contain_text("Moved to the trash: 1 run")
    assert [job.name for job in supervisor.seen()] == [won]
    assert json.loads((supervisor.root / sweeps.FOLDER / name / "sweep.json").read_text())["is_ended"]
    page.get_by_role("button", name="Use the winner's settings").click()
    expect(page.locator(".kl-answer")).to_have_text(f"Settings loaded: {won}")
    expect(page.locator("#kl-learning_rate")).to_have_value("0.001")
    assert visited.complaints.found == []
