"""What is known of the checkpoints of a grid, the choice among them, and the end of the others: JSON routes, and the thread that measures.
web/inference/pick.js draws them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.runs import drawing
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError, of_disk

from . import measures, picks
from .answers import JsonAnswer, order_of
from .comparison_routes import gone
from .comparisons import Comparisons
from .data_room.thumbnails import Thumbnails
from .predict_routes import problems_of
from .ratings import FOLDER, Ratings
from .supervisor import JobSupervisor


@dataclass
class _Work:
    """Numbers of one grid, as they are being found."""

    cells: int
    """Images that were drawn when it began."""
    says: str = "Reads the logs of the runs"
    is_over: bool = False
    held_out: dict[str, measures.HeldOut] = field(default_factory=dict)
    near: list[measures.Nearness | None] = field(default_factory=list)
    as_asked: list[measures.AsAsked | None] = field(default_factory=list)
    """By the exact reader, in toy worlds; shown, and not used for the proposal."""
    rated: list[measures.Rated | None] = field(default_factory=list)
    """By models that somebody named; shown, and not used for the proposal."""
    problems: list[str] = field(default_factory=list)


class Picks:
    """What a studio knows of the checkpoints of its grids."""

    def __init__(self, compared: Comparisons, supervisor: JobSupervisor, output_dir: Path, roots: tuple[Path, ...] | None) -> None:
        """roots: folders in which models may lie that rate images."""
        self.compared, self.supervisor = compared, supervisor
        self.ratings = Ratings(compared.folder / FOLDER, roots)
        self._output_dir, self._kept = output_dir, Thumbnails(output_dir)
        self._known: dict[str, _Work] = {}
        self._lock = threading.Lock()

    def numbers(self, name: str) -> dict[str, Any]:
        """What is known of a grid's columns so far, and which is proposed. Raises KeyError."""
        told = self.compared.told(name)
        done = sum(map(sum, self.compared.one(name)["there"]))
        with self._lock:
            work = self._known.get(name)
            if work is None or (work.is_over and work.cells != done):
                work = self._known[name] = _Work(done)
                threading.Thread(target=self._measure, args=(work, told), name="numbers", daemon=True).start()
        columns = [self._column(work, place, column) for place, column in enumerate(told["columns"])]
        answer = {"ready": work.is_over, "says": work.says, "problems": work.problems, "columns": [asdict_of(one) for one in columns]}
        answer["rating"] = self.ratings.models()
        file = next((Path(column["file"]) for column in told["columns"] if column["file"]), None)
        if not work.is_over or file is None:
            return {**answer, "proposal": {"column": None, "why": ""}, "chosen": "", "run": ""}
        chosen = picks.chosen(file.parent)
        return {**answer, "proposal": asdict(self._proposal(name, told, work)), "chosen": chosen, "run": file.parent.name}

    def _column(self, work: _Work, place: int, column: Mapping[str, Any]) -> dict[str, Any]:
        file = str(column["file"])
        at_one = column["strength"] in (None, 1.0)
        return {
            "label": column["label"],
            "file": Path(file).name if file else "",
            "held_out": work.held_out.get(file) if at_one else None,
            "near": work.near[place] if place < len(work.near) else None,
            "as_asked": work.as_asked[place] if place < len(work.as_asked) else None,
            "rated": work.rated[place] if place < len(work.rated) else None,
        }

    def _proposal(self, name: str, told: Mapping[str, Any], work: _Work) -> picks.Proposal:
        columns = told["columns"]
        made = [self._column(work, place, column) for place, column in enumerate(columns)]
        candidates = [
            picks.Candidate(place, column["label"], one["held_out"], one["near"])
            for place, (column, one) in enumerate(zip(columns, made, strict=True))
            if column["file"]
        ]
        base = next((one["near"] for column, one in zip(columns, made, strict=True) if column["is_base"]), None)
        return picks.proposal(candidates, self.compared.standings(name), base)

    def _measure(self, work: _Work, told: Mapping[str, Any]) -> None:
        """The thread: losses from logs first, then images beside images."""

        def say(text: str) -> None:
            work.says = text

        try:
            files = [Path(column["file"]) for column in told["columns"] if column["file"]]
            for folder in dict.fromkeys(file.parent for file in files):
                names = [file.name for file in files if file.parent == folder]
                found = measures.held_out(RunDirectory(folder), names)
                work.held_out |= {str(folder / name): one for name, one in found.items()}
            if _is_toy(files):
                prompts = [row["prompt"] for row in told["rows"]]
                columns = range(len(told["columns"]))
                drawn = [[self.compared.cells / f"{row[place]}.png" for row in told["keys"]] for place in columns]
                work.as_asked = [measures.as_asked(prompts, paths) for paths in drawn]
            cells = [[self.compared.cells / f"{row[place]}.png" for row in told["keys"]] for place in range(len(told["columns"]))]
            paths: list[Path] = []
            try:
                paths = self._trained(files, say)
                trained = measures.signs_of(paths, self._kept, say)
                for place, column in enumerate(cells):
                    say(f"Compares images with training images: column {place + 1} of {len(cells)}")
                    work.near.append(measures.nearness(measures.signs_of(column, self._kept, lambda _: None), trained))
            except OptionError as err:
                work.problems.append(f"How near the images are to training images is not known: {err}")
            self._rate(work, told, cells, paths, say)
        except OSError as err:
            work.problems.append(f"The numbers are not complete: {of_disk(err)}")
        except Exception as err:
            # What is known is shown, whatever happened to the rest.
            work.problems.append(f"The numbers are not complete: {type(err).__name__}: {err}")
        finally:
            work.says, work.is_over = "", True

    def _rate(
        self, work: _Work, told: Mapping[str, Any], cells: Sequence[Sequence[Path]], trained: Sequence[Path], say: measures.Say
    ) -> None:
        """What the models say that somebody named."""
        prompts = [row["prompt"].partition(" --")[0] for row in told["rows"]]
        drawn = [(path, prompt) for column in cells for path, prompt in zip(column, prompts, strict=True) if path.is_file()]
        try:
            said = self.ratings.of(drawn, trained, say)
        except OptionError as err:
            work.problems.append(f"The models that rate images were of no help: {err}")
            return
        if said.faceless_trained:
            work.problems.append(f"No face was found in {said.faceless_trained} of {said.trained} training images.")
        work.rated += [measures.rated([said.images[str(path)] for path in column if str(path) in said.images]) for column in cells]

    def rate(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Takes other models from now on, and measures anew. Raises KeyError, OptionError."""
        self.ratings.choose(given)
        with self._lock:
            self._known = {grid: work for grid, work in self._known.items() if not work.is_over}
        return self.numbers(name)

    def _trained(self, files: Sequence[Path], say: measures.Say) -> list[Path]:
        """The training images of the first run. Raises OptionError."""
        run = next((RunDirectory(file.parent) for file in files if (file.parent / "config.toml").is_file()), None)
        if run is None:
            raise OptionError("the files are of no run in the folder of runs")
        return measures.training_images(run, self._output_dir, say)

    # What is done

    def choose(self, name: str, column: object) -> None:
        """Raises KeyError, OptionError."""
        columns = self.compared.told(name)["columns"]
        known = columns[column] if isinstance(column, int) and 0 <= column < len(columns) else None
        file = Path(known["file"]) if known is not None and known["file"] else None
        if file is None or file.name not in {path.name for path in self._saved(file.parent)}:
            raise OptionError("this column has no file of a run that could be chosen")
        with self._lock:
            work = self._known.get(name)
        made = self._proposal(name, self.compared.told(name), work) if work is not None and work.is_over else picks.Proposal(None, "")
        picks.choose(file, made.why if made.column == column else "chosen by hand")

    def _saved(self, folder: Path) -> list[Path]:
        """What the run in a folder has saved; nothing where that is no run of this studio."""
        job = self.supervisor.find(folder.name)
        return drawing.saved_files(folder) if job is not None and job.path == folder else []

    def folder(self, name: str) -> Path:
        """Of the run that a grid's files are of. Raises KeyError, and OptionError for several."""
        found = {Path(column["file"]).parent for column in self.compared.told(name)["columns"] if column["file"]}
        if len(found) != 1:
            raise OptionError("the files of this comparison are not of one run; delete them in the folders of their runs")
        (folder,) = found
        job = self.supervisor.find(folder.name)
        if job is None or job.path != folder:
            raise OptionError("the run of these files is not in the folder of runs any more")
        if job.state in ("running", "queued"):
            raise OptionError("the run is under way or waits; nothing of it is deleted before it has ended")
        return folder

    def others(self, name: str) -> dict[str, Any]:
        """What would be deleted. Raises KeyError, OptionError."""
        found = picks.others(self.folder(name))
        return {"files": [path.name for path, _ in found], "bytes": sum(size for _, size in found)}


def _is_toy(files: Sequence[Path]) -> bool:
    """Whether the run of the files trained a built-in model on a built-in data set. Raises OptionError where it cannot be read."""
    folder = next((file.parent for file in files if (file.parent / "config.toml").is_file()), None)
    options = RunDirectory(folder).options() if folder is not None else None
    if options is None:
        return False
    base, data = options.model.pretrained_model_name_or_path, options.dataset.train_data_dir
    return base == "toy" and str(data or "").startswith("toy:")


def asdict_of(column: Mapping[str, Any]) -> dict[str, Any]:
    """A column with its numbers as plain values."""
    return {
        key: asdict(value) if isinstance(value, measures.HeldOut | measures.Nearness | measures.AsAsked | measures.Rated) else value
        for key, value in column.items()
    }


def routes(known: Picks) -> list[Route]:
    """The guard asks all of them for the token of the page."""

    def answered(work: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                given = await order_of(request) if request.method == "POST" else {}
                return JsonAnswer(await run_in_threadpool(work, str(request.path_params["name"]), given))
            except OptionError as err:
                return problems_of(err)
            except ValueError:
                return JsonAnswer({"detail": "This is not an order of the page."}, 400)
            except (KeyError, FileNotFoundError):
                return gone()
            except OSError as err:
                return problems_of(of_disk(err))

        return answer

    def choose(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        known.choose(name, given.get("column"))
        return known.numbers(name)

    def delete(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        files = given.get("files")
        return {"bytes": picks.delete_others(known.folder(name), files if isinstance(files, list) else [])}

    return [
        Route("/kl/compare/{name}/numbers", answered(lambda name, _: known.numbers(name))),
        Route("/kl/compare/{name}/choose", answered(choose), methods=["POST"]),
        Route("/kl/compare/{name}/rate", answered(known.rate), methods=["POST"]),
        Route("/kl/compare/{name}/others", answered(lambda name, _: known.others(name))),
        Route("/kl/compare/{name}/delete-others", answered(delete), methods=["POST"]),
    ]
