"""Which folders a run reads and with which settings: from the options alone, or from kohya's dataset TOML or JSON.

Either way the result is a list of `Subset`. In a dataset file each key falls through: subset, then dataset, then general, then
the options of the run; only a missing key falls through.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from sd_scripts.families import RUNS
from sd_scripts.schema import sleeping
from sd_scripts.schema.dataset import DatasetOptions, PairDatasetOptions
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.fields import show_of
from sd_scripts.schema.files import is_json
from sd_scripts.schema.flat import FlatField, section_of
from sd_scripts.schema.outside import json_of, toml_of

from .archives import archives_in, unpacked
from .images import EXTENSIONS
from .metadata import FILES, lists_controls
from .pairs import control_folder_problems, pair_folders
from .weights import NAMES as WEIGHT_KEYS
from .weights import Weights, weights_of

if TYPE_CHECKING:
    from sd_scripts.toy.datasets import ToyDataset

DATASET_KEYS = (
    "resolution",
    "additional_resolutions",
    "enable_bucket",
    "min_bucket_reso",
    "max_bucket_reso",
    "bucket_reso_steps",
    "bucket_no_upscale",
    "validation_seed",
    "validation_split",
)
SUBSET_KEYS = (
    "caption_extension",
    "caption_separator",
    "shuffle_caption",
    "keep_tokens",
    "keep_tokens_separator",
    "secondary_separator",
    "enable_wildcard",
    "caption_prefix",
    "caption_suffix",
    "caption_dropout_rate",
    "caption_dropout_every_n_epochs",
    "caption_tag_dropout_rate",
    "caption_token_dropout_rate",
    "token_warmup_min",
    "token_warmup_step",
    "caption_variants",
    "color_aug",
    "flip_aug",
    "random_crop",
    "resize_interpolation",
    "alpha_mask",
    "conditioning_data_dir",
)
_ONLY_SUBSET = ("image_dir", "is_reg", "class_tokens", "metadata_file", "recursive")
_PLACES = ("image_dir", "metadata_file", "conditioning_data_dir", "control_data_dir")
_SHARED_SUBSET = (*SUBSET_KEYS, "num_repeats", *WEIGHT_KEYS)
_ONLY_DATASET = (*DATASET_KEYS, "batch_size")
_ALIASES = {
    "train_batch_size": "batch_size",
    "dataset_repeats": "num_repeats",
    # musubi-tuner's names.
    "image_directory": "image_dir",
    "image_jsonl_file": "metadata_file",
    "control_directory": "control_data_dir",
    "control_dir": "control_data_dir",
}
_OF_ONE_MODEL = re.compile(r"\w+_(no_resize_control|control_resolution)")
"""musubi-tuner's older names begin with their model's."""
_NOT_SUPPORTED = {
    "network_multiplier": "is not supported; set the strength of the adapter with network_alpha",
    "face_crop_aug_range": "is not supported; cut the images around the faces beforehand, or use random_crop",
    "no_resize_control": "is not supported: control images are cut with their target, or brought to the size that the model takes",
    "control_resolution": "belongs into the options of the run: set control_resolution there",
    "multiple_target": "is not supported: a sample has one target",
    "video_directory": "is not supported: these trainers take images, so name an image_directory",
    "video_jsonl_file": "is not supported: these trainers take images, so name an image_jsonl_file",
    "custom_attributes": "is not supported: nothing in these trainers reads it; remove it",
}
_NOT_NEEDED = {
    "cache_info": "is not needed: sizes and captions are always kept in an index in cache_dir",
    "cache_directory": "is not needed: caches of all data sets lie in cache_dir",
    **dict.fromkeys(
        """target_frames frame_extraction frame_stride frame_sample max_frames source_fps fp_latent_window_size fp_1f_clean_indices
        fp_1f_target_index fp_1f_no_post""".split(),
        "is not needed: it is for videos",
    ),
}
_CONTROL_KEYS = ("control_data_dir", "control_directory", "control_dir")
_WITH_CONTROLS = [run.script for run in RUNS.values() if issubclass(section_of(run, "dataset"), PairDatasetOptions)]
_NO_CONTROLS = f"names control images, which this model does not take; remove it, or train with {' or '.join(_WITH_CONTROLS)}"
_MOST_REPEATS = 10_000
KOHYA_FOLDER = re.compile(r"^(\d+)_(.*)$")


def _of_today(key: str) -> str:
    """A key without the model in whose name it was once asked for."""
    found = _OF_ONE_MODEL.fullmatch(key)
    return key.removeprefix(key[: found.start(1)]) if found else key


def said_of(key: str, edits: bool) -> tuple[Literal["not needed", "not supported", "unknown"], str] | None:
    """What a dataset file's key is that is not read, and why; None for one that is. edits: whether the model takes control images."""
    if key in _NOT_NEEDED:
        return "not needed", _NOT_NEEDED[key].removeprefix("is not needed: ")
    key = _of_today(key)
    if key in _NOT_SUPPORTED or (not edits and key in _CONTROL_KEYS):
        return "not supported", _NOT_SUPPORTED.get(key, _NO_CONTROLS).removeprefix("is not supported: ").removeprefix("is not supported; ")
    known = {*_SHARED_SUBSET, *_ONLY_SUBSET, *_ONLY_DATASET, *_CONTROL_KEYS}
    return None if _ALIASES.get(key, key) in known else ("unknown", "")


@dataclass(frozen=True)
class Subset:
    """One folder of images with its settings. options holds what is true for this subset; the run's own options stay elsewhere.

    With recursive, folders inside are read too (hidden ones apart). listed_only takes only images that metadata_file names.
    """

    folder: Path
    options: DatasetOptions
    repeats: int = 1
    is_reg: bool = False
    class_tokens: str = ""
    metadata_file: Path | None = None
    recursive: bool = False
    root: Path | None = None
    """The folder above that the run names, where metadata may stand as well; None for folder itself."""
    controls: tuple[Path, ...] = ()
    """Folders with the control images of edit pairs: first, second, third."""
    masks: Path | None = None
    """Folder with masks that belongs to the pairs; conditioning_data_dir wins."""
    weights: Weights = ()
    """Weights in the loss that its images have unless they have their own."""
    is_style: bool = False
    """class_tokens is the caption of all images, whatever texts lie beside them."""

    @property
    def listed_only(self) -> bool:
        """Whether only the images named in metadata_file are used."""
        return self.metadata_file is not None


@dataclass(frozen=True)
class Subsets:
    """All subsets of a run, in order, and sentences a person should read."""

    items: tuple[Subset, ...]
    warnings: tuple[str, ...] = ()


def subsets_of(options: DatasetOptions, cache_dir: Path) -> Subsets:
    """The subsets of a run. Raises OptionError with everything that is wrong.

    `toy:<name>` as train_data_dir draws a built-in data set into cache_dir / "toy" / name and takes its folders.
    """
    if options.dataset_config is not None:
        return read_config(options.dataset_config, options)
    assert options.train_data_dir is not None, "DatasetOptions requires one of the two"
    train, reg = Path(options.train_data_dir), Path(options.reg_data_dir) if options.reg_data_dir else None
    if options.train_data_dir.startswith("toy:"):
        train, toy_reg = _toy(options.train_data_dir.removeprefix("toy:"), cache_dir)
        reg = reg or toy_reg
    elif archives := archives_in(train):
        # Images that lie beside archives are what is meant.
        train = train if train.is_dir() and (_has_images(train) or _kohya_folders(train)) else unpacked(archives, cache_dir)
    problems = [
        Problem(name, f"{name}: the folder {folder} is not there")
        for name, folder in (("train_data_dir", train), ("reg_data_dir", reg))
        if folder is not None and not folder.is_dir()
    ]
    metadata = Path(options.in_json) if options.in_json else None
    if metadata is not None and not metadata.is_file():
        problems.append(Problem("in_json", f"in_json: the file {metadata} is not there"))
    if options.conditioning_data_dir is not None and not Path(options.conditioning_data_dir).is_dir():
        problems.append(Problem("conditioning_data_dir", f"conditioning_data_dir: the folder {options.conditioning_data_dir} is not there"))
    problems += control_folder_problems(options)
    refuse(problems)
    warnings: list[str] = []
    if metadata is not None:
        pairs = pair_folders(train)
        controls, masks = (pairs.controls, pairs.mask) if pairs is not None else ((), None)
        items = [
            Subset(
                train,
                options,
                options.dataset_repeats,
                metadata_file=metadata,
                recursive=True,
                controls=options.control_folders or controls,
                masks=masks,
            )
        ]
    elif options.by_style:
        items = _styles(train, options)
    else:
        items = _folders(train, options, False, warnings)
    if reg is not None:
        items += _folders(reg, options, True, warnings)
    return Subsets(tuple(items), tuple(warnings))


def _toy(name: str, cache_dir: Path) -> tuple[Path, Path | None]:
    written = _written_toy(name, cache_dir, "train_data_dir")
    return written.train_data_dir, written.reg_data_dir


def _written_toy(name: str, cache_dir: Path, option: str) -> ToyDataset:
    from sd_scripts.toy.datasets import write_dataset

    try:
        return write_dataset(name, cache_dir / "toy" / name)
    except ValueError as err:
        raise OptionError(Problem(option, f"{option}: {err}")) from err


def _folders(root: Path, options: DatasetOptions, is_reg: bool, warnings: list[str]) -> list[Subset]:
    """kohya's `<repeats>_<class tokens>` folders inside root, or root itself when it has none."""
    prompt = options.class_prompt if is_reg else options.instance_prompt
    pairs = pair_folders(root)
    if pairs is not None:
        items = _folders(pairs.target, options, is_reg, warnings) if _kohya_folders(pairs.target) else []
        items = items or [Subset(pairs.target, options, options.dataset_repeats, is_reg, prompt, recursive=True, root=root)]
        controls = options.control_folders or pairs.controls
        return [item if item.controls else replace(item, controls=controls, masks=pairs.mask) for item in items]
    if not _kohya_folders(root):
        return [_paired(Subset(root, options, options.dataset_repeats, is_reg, prompt, recursive=True))]
    named = []
    others = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        match = KOHYA_FOLDER.match(folder.name)
        if match and int(match[1]) > _MOST_REPEATS:
            raise OptionError(
                f"{folder}: the number before _ says how often the images are repeated, and {match[1]} times cannot be meant "
                f"(at most {_MOST_REPEATS}); rename the folder, for example to 1_{folder.name}"
            )
        if match and int(match[1]) > 0:
            named.append(_paired(Subset(folder, options, int(match[1]), is_reg, prompt or match[2].strip(), root=root)))
        else:
            others.append(folder)
    with_images = [folder.name for folder in others if _has_images(folder)]
    if with_images:
        warnings.append(
            f"{root} has folders named <repeats>_<class>, so these others in it are not used: {', '.join(with_images)}. "
            "Put a number above 0 and _ before their names to use them"
        )
    if _has_images(root):
        warnings.append(f"{root} has folders named <repeats>_<class>, so the images directly in it are not used; move them into one")
    return named


def _styles(root: Path, options: DatasetOptions) -> list[Subset]:
    """The sub-folders of root, each a style of its name. Raises OptionError for images outside of them, and for folders without any."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    problems = []
    if not folders:
        problems.append(f"{root} has no sub-folders; make one for each style, named as the style, and move its images there")
    if _has_images(root):
        problems.append(f"{root} has images directly in it, whose style nobody knows; move them into the folder of their style")
    empty = [path.name for path in folders if not images_below(path)]
    if empty:
        problems.append(f"{root} has styles without an image: {', '.join(empty)}; put images there, or remove the folders")
    unclear = [path.name for path in folders if path.name != path.name.strip() or "=" in path.name]
    if unclear:
        problems.append(
            f"{root} has folders whose names cannot be names of styles: {', '.join(map(repr, unclear))}; take out = and outer spaces"
        )
    if problems:
        raise OptionError([Problem("train_data_dir", f"train_data_dir: {text}") for text in problems])
    return [Subset(path, options, options.dataset_repeats, class_tokens=path.name, recursive=True, is_style=True) for path in folders]


def images_below(folder: Path) -> list[Path]:
    """All images in a folder and those inside it, by name; hidden ones apart."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def evaluated_folders(given: str, cache_dir: Path) -> dict[str, Path]:
    """The folders of test_image_dir by the names of their styles; `toy:<name>` is as in train_data_dir.

    Raises OptionError when there is none.
    """
    root: Path | None = Path(given).expanduser()
    if given.startswith("toy:"):
        root = _written_toy(given.removeprefix("toy:"), cache_dir, "test_image_dir").test_data_dir
    if root is None or not root.is_dir():
        text = f"test_image_dir: the folder {given} is not there" if root else f"test_image_dir: {given} has no test images"
        raise OptionError(Problem("test_image_dir", f"{text}; name a folder with a sub-folder for each style, or leave it out"))
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _kohya_folders(root: Path) -> bool:
    return any(
        match is not None and int(match[1]) > 0 and path.is_dir() for path in root.iterdir() if (match := KOHYA_FOLDER.match(path.name))
    )


def _paired(subset: Subset) -> Subset:
    """The subset with what makes it one of edit pairs, where its folder has that: targets and controls in it, or a list that names them."""
    folders = subset.options.control_folders
    pairs = pair_folders(subset.folder)
    if pairs is not None:
        subset = replace(subset, folder=pairs.target, recursive=True, controls=folders or pairs.controls, masks=pairs.mask)
    elif folders:
        subset = replace(subset, controls=folders)
    listings = (path for name in FILES if (path := subset.folder / name).is_file() and lists_controls(path))
    if subset.metadata_file is None and not subset.controls and (listing := next(listings, None)) is not None:
        subset = replace(subset, metadata_file=listing, recursive=True)
    return subset


def _has_images(folder: Path) -> bool:
    return any(path.suffix.lower() in EXTENSIONS for path in folder.iterdir())


def read_config(given: Path | str, options: DatasetOptions) -> Subsets:
    """The subsets of a kohya dataset file (.toml, or .json of the same structure), or of the text of such a .json in place of its path.
    Raises OptionError with everything wrong in it."""
    itself = isinstance(given, str) and is_json(given)
    path = Path("dataset.json" if itself else given)
    text = str(given) if itself else _read_text(path)
    data = _parse(path, text)
    reader = _Reader(path, text, options)
    items = reader.read(data)
    if reader.problems:
        raise OptionError(reader.problems)
    return Subsets(tuple(items), tuple(reader.warnings))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise OptionError(Problem("dataset_config", f"dataset_config: the file {path} is not there")) from None
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(Problem("dataset_config", f"dataset_config: {path} cannot be read as UTF-8 text ({err})")) from err


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json_of(text) if path.suffix.lower() == ".json" else toml_of(text)
    except ValueError as err:
        kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise OptionError(Problem("dataset_config", f"dataset_config: {path.name} is not valid {kind}: {err}")) from err
    if not isinstance(data, dict):
        raise OptionError(Problem("dataset_config", f"dataset_config: {path.name} must have the tables [general] and [[datasets]]"))
    return data


def _with_subset(table: Any) -> Any:
    """musubi-tuner names the images in [[datasets]] itself; they become its only subset."""
    moved = {key: table[key] for key in ("image_directory", "image_jsonl_file") if key in table} if isinstance(table, dict) else {}
    if not moved or "subsets" in table:
        return table
    listing = moved.get("image_jsonl_file")
    if isinstance(listing, str):
        moved.setdefault("image_directory", str(Path(listing).parent))
    return {**{key: value for key, value in table.items() if key not in moved}, "subsets": [moved]}


class _Reader:
    """Walks one dataset file and collects what is wrong with it."""

    def __init__(self, path: Path, text: str, options: DatasetOptions) -> None:
        self.path, self.text, self.options = path, text, options
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.base = options.model_dump()
        self.known = {name: FlatField(name, "dataset", info, show_of(info)) for name, info in type(options).model_fields.items()}
        edits = options.in_pairs
        self.shared = (*_SHARED_SUBSET, "control_data_dir") if edits else _SHARED_SUBSET
        self.not_supported = _NOT_SUPPORTED if edits else {**_NOT_SUPPORTED, **dict.fromkeys(_CONTROL_KEYS, _NO_CONTROLS)}

    def read(self, data: dict[str, Any]) -> list[Subset]:
        for key in data.keys() - {"general", "datasets"}:
            self._unknown(key, "", ("general", "datasets"), {})
        general = self._table(data.get("general", {}), "[general]", (*self.shared, *_ONLY_DATASET), {}, ())
        datasets = self._list(data, "datasets", "")
        if not datasets and not self.problems:
            self._problem("", "has no [[datasets]]; add one with a [[datasets.subsets]] that names an image_dir")
        items: list[Subset] = []
        for index, dataset in enumerate(datasets):
            items += self._dataset(general, dataset, f"[[datasets]] number {index + 1}")
        if items and not any(not item.is_reg for item in items) and not self.problems:
            self._problem("", "has only regularisation subsets (is_reg = true); add one with training images")
        return items

    def _dataset(self, general: Mapping[str, Any], table: Any, place: str) -> list[Subset]:
        table = _with_subset(table)
        own = self._table(table, place, (*self.shared, *_ONLY_DATASET), {}, ("subsets",))
        subsets = self._list(table, "subsets", f"{place}: ") if isinstance(table, dict) else []
        if not subsets and isinstance(table, dict):
            self._problem(place, "has no [[datasets.subsets]]; add one that names an image_dir")
        values = [
            (self._table(subset, f"{place}, subset {index + 1}", (*self.shared, *_ONLY_SUBSET), dict.fromkeys(_ONLY_DATASET), ()), index)
            for index, subset in enumerate(subsets)
        ]
        kinds = {"metadata_file" in {**own, **value} for value, _ in values if not value.get("is_reg")}
        if len(kinds) > 1:
            self._problem(place, "mixes subsets with and without metadata_file; put them into two [[datasets]]")
        made = [self._subset({**general, **own, **value}, f"{place}, subset {index + 1}") for value, index in values]
        return [subset for subset in made if subset is not None]

    def _list(self, table: Mapping[str, Any], key: str, place: str) -> list[Any]:
        value = table.get(key, [])
        if isinstance(value, list):
            return value
        self._problem(
            f"{place}{key}", f"must be a list of tables: write [[{'datasets.' if key == 'subsets' else ''}{key}]] with two brackets"
        )
        return []

    def _table(self, table: Any, place: str, allowed: tuple[str, ...], elsewhere: dict[str, Any], lists: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(table, dict):
            self._problem(place, "must be a table of keys and values")
            return {}
        values: dict[str, Any] = {}
        for key, value in table.items():
            name = _ALIASES.get(key, key)
            if name in _PLACES and isinstance(value, str) and not value.strip():
                # Not given: it must never be the present folder.
                continue
            if _of_today(key) in _NOT_SUPPORTED and value is False:
                continue
            if name in allowed:
                values[name] = value
            elif name not in lists:
                self._unknown(key, place, allowed, elsewhere)
        return values

    def _unknown(self, key: str, place: str, allowed: tuple[str, ...], elsewhere: dict[str, Any]) -> None:
        where = f"{place}, {key}{self._line(key)}" if place else f"{key}{self._line(key)}"
        if key in _NOT_NEEDED:
            self.warnings.append(f"{self.path.name}: {where} {_NOT_NEEDED[key]}; remove it")
        elif _of_today(key) in self.not_supported:
            self._problem(where, self.not_supported[_of_today(key)])
        elif _ALIASES.get(key, key) in elsewhere:
            self._problem(where, "belongs into [[datasets]] or [general], not into a subset")
        elif _ALIASES.get(key, key) in _ONLY_SUBSET:
            self._problem(where, "belongs into [[datasets.subsets]]")
        else:
            close = difflib.get_close_matches(key, (*allowed, *_ALIASES, *_ONLY_SUBSET), n=1)
            hint = f"did you mean {close[0]}?" if close else f"known here are {', '.join(sorted(allowed))}"
            self._problem(where, f"is unknown; {hint}")

    def _subset(self, values: dict[str, Any], place: str) -> Subset | None:
        before = len(self.problems)
        folder = self._folder(values.pop("image_dir", None), "image_dir", place)
        is_reg = self._typed(values.pop("is_reg", False), bool, "is_reg", place, "true or false")
        class_tokens = self._typed(values.pop("class_tokens", ""), str, "class_tokens", place, "a text")
        recursive = self._typed(values.pop("recursive", False), bool, "recursive", place, "true or false")
        metadata = values.pop("metadata_file", None)
        metadata_file = Path(self._typed(metadata, str, "metadata_file", place, "a file name")) if metadata is not None else None
        if metadata_file is not None and not metadata_file.is_file():
            self._problem(f"{place}, metadata_file{self._line('metadata_file')}", f"the file {metadata_file} is not there")
        if metadata_file is not None and is_reg:
            self._problem(f"{place}, is_reg", "regularisation subsets have no metadata_file; remove one of the two")
        if values.get("conditioning_data_dir") is not None:
            self._folder(values["conditioning_data_dir"], "conditioning_data_dir", place)
        if isinstance(values.get("control_data_dir"), str):
            values["control_data_dir"] = [values["control_data_dir"]]
        self._batch_size(values.pop("batch_size", self.options.train_batch_size), place)
        values["dataset_repeats"] = values.pop("num_repeats", self.options.dataset_repeats)
        weights, wrong = weights_of({key: values.pop(key) for key in WEIGHT_KEYS if key in values})
        for message in wrong:
            self._problem(place, message)
        options = self._options(values, place)
        for problem in control_folder_problems(options) if options is not None else ():
            self._problem(place, problem.message)
        if len(self.problems) > before or folder is None or options is None:
            return None
        return _paired(
            Subset(
                folder,
                options,
                options.dataset_repeats,
                is_reg,
                class_tokens,
                metadata_file,
                recursive=recursive or metadata_file is not None,
                weights=weights,
            )
        )

    def _batch_size(self, value: Any, place: str) -> None:
        if value != self.options.train_batch_size:
            self._problem(
                f"{place}, batch_size{self._line('batch_size')}",
                f"{value!r} differs from train_batch_size = {self.options.train_batch_size}; one batch size holds for the whole run, "
                f"so set train_batch_size = {value} in the options and remove it here",
            )

    def _folder(self, value: Any, key: str, place: str) -> Path | None:
        if value is None:
            self._problem(place, f"has no {key}; name the folder with the images")
            return None
        name = self._typed(value, str, key, place, "a folder name")
        folder = Path(name)
        if name and not folder.is_dir():
            self._problem(f"{place}, {key}{self._line(key)}", f"the folder {name} is not there")
            return None
        return folder

    def _typed(self, value: Any, kind: type, key: str, place: str, wanted: str) -> Any:
        if isinstance(value, kind):
            return value
        self._problem(f"{place}, {key}{self._line(key)}", f"{value!r} is not {wanted}")
        return kind()

    def _options(self, values: dict[str, Any], place: str) -> DatasetOptions | None:
        size = values.get("resolution")
        parts = size if isinstance(size, list) else [size]
        if any(isinstance(part, str) and not re.fullmatch(r"\s*\d+\s*([,x]\s*\d+\s*)?", part) for part in parts):
            self._problem(f"{place}, resolution{self._line('resolution')}", f"{size!r} is not a size; write 1024 or [1024, 768]")
            return None
        given = {**self.base, **values}
        self.warnings += [f"{self.path.name}: {place}: {note}" for note in sleeping.notes(self.known, given)]
        without_effect = sleeping.asleep(self.known, given)
        try:
            return type(self.options).model_validate({name: value for name, value in given.items() if name not in without_effect})
        except ValidationError as err:
            for detail in err.errors():
                key = str(detail["loc"][0]) if detail["loc"] else ""
                shown = "num_repeats" if key == "dataset_repeats" else key
                message = detail["msg"].removeprefix("Value error, ")
                for line in message.splitlines():
                    if key:
                        self._problem(
                            f"{place}, {shown}{self._line(shown)}", f"{detail['input']!r} is not allowed: {line[:1].lower()}{line[1:]}"
                        )
                    else:
                        self._problem(place, line)
            return None

    def _line(self, key: str) -> str:
        """Where the key stands, when it stands in one place only."""
        found = [
            number for number, line in enumerate(self.text.splitlines(), 1) if re.match(rf"""\s*["']?{re.escape(key)}["']?\s*[=:]""", line)
        ]
        return f" (line {found[0]})" if len(found) == 1 else ""

    def _problem(self, place: str, message: str) -> None:
        self.problems.append(Problem("dataset_config", f"dataset_config: {self.path.name}: {place + ': ' if place else ''}{message}"))
