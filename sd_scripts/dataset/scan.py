"""What lies in the folders: images with their sizes and captions, found without decoding a pixel, and which of them are broken.

Sizes, captions and content hashes are kept in an sqlite index, so a later scan only asks the file system for times and sizes.
A scan holds about half a kilobyte for each image and reads one folder at a time.

Where an image's caption comes from, first found first: the metadata file of its subset; the file beside it with
caption_extension; with `.caption`; with `.json`; such files beside its control image; a metadata.jsonl or metadata.csv in its own
folder or one above it, up to the one that the run names; the class tokens of its folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import is_text
from sd_scripts.schema.model import Controls

from .config import Subset, Subsets, subsets_of
from .findings import some_names
from .images import EXTENSIONS, BadImage, Unreachable, read_size
from .index import Index, Known, Stat, index_file, stat_of
from .metadata import FILES, Listed, caption_in_json, read_metadata
from .pairs import CACHES, TARGET_FOLDERS, Beside, ControlFolder, beside, is_file, layouts, plain, walk
from .records import ControlImage, Dataset, ImageInfo, Progress, UnusableImage
from .verify import identity_of, verify
from .weights import Weights

__all__ = ["Dataset", "ImageInfo", "Progress", "UnusableImage", "identity_of", "read_dataset", "scan", "verify"]

_REPORT_EVERY = 500
_IN_DECODERS_WORDS = re.compile(r"is (truncated or )?damaged \(")
"""Reasons of earlier versions, which quoted decoders in English: such a file is read again."""
TRIGGER = "[trigger]"
"""The place of the trigger word in captions made for ai-toolkit; here the class tokens are that word."""


def read_dataset(
    options: DatasetOptions,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    controls: Controls | None = None,
) -> Dataset:
    """Finds, scans and verifies all images of a run; every broken one is found.

    controls says how many control images the model takes, see `ModelOptions.controls`; with None those that are there are not used, which
    a warning says.

    Raises OptionError that lists all broken images when on_bad_image is stop; with skip they are left out and warned about.
    On several processes run it on one first: the others then find everything in the index.
    """
    dataset = scan(subsets_of(options, cache_dir), cache_dir, progress, controls)
    check_masks(dataset.subsets, dataset.images)
    dataset = verify(dataset, cache_dir, progress)
    if dataset.bad and options.on_bad_image == "stop":
        raise bad_images_error(dataset.bad)
    if dataset.bad:
        text = f"{_images(len(dataset.bad))} cannot be read and {'is' if len(dataset.bad) == 1 else 'are'} left out: "
        dataset = replace(dataset, warnings=(*dataset.warnings, text + "; ".join(map(str, dataset.bad))))
    if not any(not dataset.subsets[image.subset].is_reg for image in dataset.images):
        raise OptionError(Problem("train_data_dir", f"none of the images can be read:\n{_listing(dataset.bad)}"))
    return dataset


def bad_images_error(bad: Iterable[UnusableImage]) -> OptionError:
    """The error that names every broken image with its reason."""
    bad = tuple(bad)
    return OptionError(
        Problem(
            "on_bad_image",
            f"{_images(len(bad))} cannot be read. Replace or remove {'it' if len(bad) == 1 else 'them'}, or set on_bad_image = skip:\n"
            + _listing(bad),
        )
    )


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _listing(bad: Iterable[UnusableImage]) -> str:
    return "\n".join(f"  {image}" for image in bad)


def scan(subsets: Subsets, cache_dir: Path, progress: Progress | None = None, controls: Controls | None = None) -> Dataset:
    """Lists the images of all subsets, sorted by name within each; reads only headers and captions.

    Raises OptionError when there are none, and when the model edits images and none has a control image.
    """
    wanted = controls or Controls()
    images: list[ImageInfo] = []
    bad: list[UnusableImage] = []
    warnings = list(subsets.warnings)
    folders: dict[Path, ControlFolder] = {}
    scans: list[_SubsetScan] = []
    with Index(index_file(cache_dir)) as index:
        for number, subset in enumerate(subsets.items):
            for folder in subset.controls:
                if folder not in folders:
                    folders[folder] = ControlFolder(folder, caption_endings(subset.options))
            walker = _SubsetScan(index, number, subset, progress, len(images), wanted, [folders[folder] for folder in subset.controls])
            found = sorted(walker.run(), key=lambda image: image.name)
            scans.append(walker)
            bad += sorted(walker.bad, key=lambda image: image.path)
            warnings += walker.warnings
            if not found and not walker.bad:
                warnings.append(f"{subset.folder} has no images ({', '.join(ending[1:] for ending in EXTENSIONS)}); it adds nothing")
            images += found
    _check_found(subsets, images, bad)
    _check_pairs(scans, wanted)
    if wanted.most:
        warnings += [text for folder in folders.values() if (text := _without_target(folder))]
    if progress is not None:
        progress("scan", len(images), len(images))
    return Dataset(subsets.items, tuple(images), tuple(bad), tuple(warnings))


def _check_found(subsets: Subsets, images: list[ImageInfo], bad: list[UnusableImage]) -> None:
    if not any(not subsets.items[image.subset].is_reg for image in images) and not bad:
        folders = ", ".join(str(item.folder) for item in subsets.items if not item.is_reg)
        raise OptionError(
            Problem(
                "train_data_dir",
                f"train_data_dir: no images in {folders}; wanted are {', '.join(ending[1:] for ending in EXTENSIONS)} files",
            )
        )


def _check_pairs(scans: list[_SubsetScan], wanted: Controls) -> None:
    own = [walker for walker in scans if not walker.subset.is_reg]
    if wanted.fewest and not any(walker.is_paired for walker in own):
        folder = str(own[0].subset.folder)
        raise OptionError(
            Problem(
                "train_data_dir",
                f"train_data_dir: {wanted.model} edits images, and none in {folder} has a control image (the image before the edit). "
                f"These layouts are understood:\n{layouts(folder)}",
            )
        )


def check_masks(subsets: Sequence[Subset], images: Sequence[ImageInfo]) -> None:
    """Raises OptionError where masks are wanted and no image has one."""
    own = [subset.options for subset in subsets if not subset.is_reg]
    sought = any(options.masked_loss for options in own)
    if sought and not any(options.conditioning_data_dir or options.alpha_mask for options in own) and not any(map(_has_mask, images)):
        raise OptionError(
            Problem(
                "masked_loss",
                "masked_loss needs masks, and none of the images has one: set conditioning_data_dir to a folder with masks of the same "
                "names, or alpha_mask to use the images' alpha channel; edit pairs may have a folder mask beside target, too",
            )
        )


def _has_mask(image: ImageInfo) -> bool:
    return bool(image.mask)


def _without_target(folder: ControlFolder) -> str:
    unused = folder.unused()
    if not unused:
        return ""
    return f"{_images(len(unused))} in {folder.folder} without a target, not used: {some_names(unused)}"


def caption_endings(options: DatasetOptions) -> tuple[str, ...]:
    """Endings of caption files, with their dot, in the order in which they are looked for."""
    return tuple(ending if ending.startswith(".") else f".{ending}" for ending in (options.caption_extension, ".caption"))


@dataclass(slots=True)
class _Found:
    """A target by name, with what belongs to it by name; no file of it has been opened."""

    path: str
    name: str
    caption: str
    """What holds when there is no sidecar."""
    sidecar: str = ""
    mask: str = ""
    controls: list[str] = field(default_factory=list)
    reason: str = ""
    """Why it cannot be used, or ""."""
    weights: Weights = ()


class _Names:
    """The files of one folder, and which of them a name means."""

    def __init__(self, files: set[str]) -> None:
        self.all = files
        self._plain = {plain(name): name for name in sorted(files)}

    def find(self, name: str) -> str | None:
        """The file of this name, or else the one whose name differs in case or Unicode form only."""
        return name if name in self.all else self._plain.get(plain(name))


class _SubsetScan:
    """Walks the folder of one subset."""

    def __init__(
        self,
        index: Index,
        number: int,
        subset: Subset,
        progress: Progress | None,
        done: int,
        wanted: Controls,
        folders: list[ControlFolder],
    ) -> None:
        self.index, self.number, self.subset, self.progress, self.done = index, number, subset, progress, done
        self.wanted, self.folders = wanted, folders
        self.bad: list[UnusableImage] = []
        self.warnings: list[str] = []
        self.endings = caption_endings(subset.options)
        self.masks = _masks(subset)
        self.listed = self._listing(subset.metadata_file) if subset.metadata_file else None
        self.is_paired = bool(folders) or any(entry.controls for entry in (self.listed or {}).values())
        self.unmasked = self.unused_controls = 0
        self.fewer: dict[int, list[str]] = {}
        self.told: dict[str, dict[str, Listed]] = {}
        """What metadata files say: folder -> name -> entry."""
        self.without_word: list[str] = []
        """Images whose caption has a place for a trigger word that nobody named."""
        self.left_out: dict[str, list[str]] = {}
        """What looks like an image and is left out: kind -> names."""

    def run(self) -> list[ImageInfo]:
        """All usable images; bad and warnings are complete afterwards."""
        images: list[ImageInfo] = []
        used: set[str] = set()
        for above in self._above() if self.listed is None else ():
            self._tell_of(above, [name for name in FILES if os.path.isfile(os.path.join(above, name))])
        for folder in walk(str(self.subset.folder), self.subset.recursive, self.subset.controls):
            if os.path.basename(folder) in CACHES and folder != str(self.subset.folder):
                self._leave_out("folders of other trainers", os.path.basename(folder))
                continue
            for part in self._folder(folder, used):
                images += self._read(part)
        if self.listed is not None:
            images += self._elsewhere(sorted(self.listed.keys() - used))
        self._tell()
        return images

    def _above(self) -> list[str]:
        """The folders from the one that the run names to the one that holds this subset's."""
        root, found = self.subset.root, list(self.subset.folder.parents)
        return [str(folder) for folder in reversed(found[: found.index(root) + 1])] if root in found else []

    def _tell(self) -> None:
        subset, options = self.subset, self.subset.options
        if self.left_out:
            kinds = "; ".join(f"{kind} ({len(names)}): {some_names(names)}" for kind, names in self.left_out.items())
            self.warnings.append(f"left out of {subset.folder} are {kinds}")
        if self.without_word:
            self.warnings.append(
                f"{_images(len(self.without_word))} in {subset.folder} have {TRIGGER} in their captions and no word for it, so it "
                f"is left out; name the word in instance_prompt, class_tokens or the name of the folder: {some_names(self.without_word)}"
            )
        source = options.conditioning_data_dir or subset.masks
        if self.unmasked and (source or not options.alpha_mask):
            where = f" in {source}" if source else ""
            self.warnings.append(f"{_images(self.unmasked)} in {subset.folder} have no mask{where}; all of each counts in the loss")
        if self.unused_controls:
            self.warnings.append(
                f"{_images(self.unused_controls)} in {subset.folder} {'has' if self.unused_controls == 1 else 'have'} control images, "
                f"which {self.wanted.model} does not take: it is trained on the targets alone"
            )
        for place, names in sorted(self.fewer.items()) if self.wanted.most else ():
            sought = some_names([f"{os.path.splitext(name)[0]}.*" for name in names])
            self.warnings.append(
                f"{_images(len(names))} in {subset.folder} {'has' if len(names) == 1 else 'have'} no partner in "
                f"{self.folders[place].folder}, where {sought} was looked for; training shows them with fewer control images"
            )

    # Names: which files are targets, and what belongs to each.

    def _listing(self, file: Path) -> dict[str, Listed]:
        """What the metadata file says, by path inside the subset's folder as far as it lies there."""
        root = os.path.abspath(self.subset.folder)
        inside: dict[str, Listed] = {}
        for name, entry in read_metadata(file, self.subset.options.caption_separator).items():
            within = os.path.isabs(name) and os.path.normpath(name).startswith(root + os.sep)
            inside[os.path.relpath(name, root).replace(os.sep, "/") if within else name] = entry
        return inside

    def _folder(self, folder: str, used: set[str]) -> Iterator[list[_Found]]:
        # Names only: the entries themselves keep what stat() said, a kilobyte each.
        files = self._files(folder)
        names = sorted(name for name in files.all if os.path.splitext(name)[1].lower() in EXTENSIONS)
        near = Beside(tuple(names), {}, {})
        if self.listed is None:
            captioned = {stem for stem, ending in map(os.path.splitext, files.all) if plain(ending) in map(plain, self.endings)}
            near = beside(names, captioned, with_masks=bool(self.folders) or self.wanted.most > 0)
        if self.listed is None:
            self._tell_of(folder, files.all)
        told = self.told.pop(os.path.abspath(folder), {})
        told = {plain(key): entry for key, entry in told.items()} | told
        for name in near.conditions:
            self._leave_out("conditions for a ControlNet", name)
        prefix = os.path.relpath(folder, self.subset.folder).replace(os.sep, "/")
        prefix = "" if prefix == "." else prefix + "/"
        stems = {os.path.splitext(name)[0] for name in near.targets}
        targets = iter(near.targets)
        while part := list(islice(targets, _REPORT_EVERY)):
            if self.listed is not None:
                yield [found for name in part if (found := self._in_list(folder, prefix, name, stems, used)) is not None]
            else:
                yield [self._in_folder(folder, prefix, name, files, near, told, stems) for name in part]
            self._count(len(part))

    def _tell_of(self, folder: str, names: Collection[str]) -> None:
        """Takes note of what the metadata files of a folder say, about images in it and in those below; later files win."""
        for name in reversed(FILES):
            if name not in names:
                continue
            try:
                entries = read_metadata(Path(folder, name), self.subset.options.caption_separator)
            except OptionError as err:
                if name.endswith(".csv"):
                    # Many tables have this name.
                    self.warnings.append(f"{Path(folder, name)} is not read: {err.problems[0].message}")
                    continue
                raise
            for image, entry in entries.items():
                where, own = os.path.split(os.path.abspath(os.path.join(folder, image)))
                self.told.setdefault(where, {})[own] = entry

    def _files(self, folder: str) -> _Names:
        """The files in a folder; what looks like an image and is none is noted."""
        files: set[str] = set()
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if not is_text(entry.name):
                    self._leave_out("names that are not UTF-8", entry.name.encode(errors="surrogateescape").decode(errors="replace"))
                elif is_file(entry):
                    files.add(entry.name)
                elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                    link = entry.is_symlink()
                    kind = (
                        "links that lead nowhere"
                        if link
                        else "folders with the name of an image"
                        if entry.is_dir()
                        else "pipes and devices"
                    )
                    self._leave_out(kind, entry.name)
        return _Names(files)

    def _leave_out(self, kind: str, name: str) -> None:
        self.left_out.setdefault(kind, []).append(name)

    def _count(self, more: int) -> None:
        self.done += more
        if self.progress is not None:
            self.progress("scan", self.done, 0)

    def _in_list(self, folder: str, prefix: str, name: str, stems: Collection[str], used: set[str]) -> _Found | None:
        assert self.listed is not None
        stem = os.path.splitext(prefix + name)[0]
        key = prefix + name if prefix + name in self.listed else stem if stem in self.listed else None
        if key is None:
            return None
        used.add(key)
        return self._of_entry(os.path.join(folder, name), prefix + name, self.listed[key], stems)

    def _of_entry(self, path: str, name: str, entry: Listed, stems: Collection[str]) -> _Found:
        mask = self._mask(name, self._listed_file(entry.mask) if entry.mask else "")
        found = _Found(path, name, entry.caption, mask=mask, weights=entry.weights)
        if entry.controls:
            found.controls = [self._listed_file(control) for control in entry.controls]
        else:
            self._find_controls(found, self._keys(name), stems)
        return found

    def _listed_file(self, name: str) -> str:
        """The file that a metadata file means: from the subset's folder, else from its own folder, else from where the command runs."""
        assert self.subset.metadata_file is not None
        places = [self.subset.folder / name, self.subset.metadata_file.parent / name, Path(name)]
        return str(next((place for place in places if place.exists()), places[0]))

    def _elsewhere(self, names: list[str]) -> Iterator[ImageInfo]:
        """Images of the metadata file that do not lie under their names in the subset's folder."""
        assert self.listed is not None and self.subset.metadata_file is not None
        root, file = self.subset.folder, self.subset.metadata_file
        for start in range(0, len(names), _REPORT_EVERY):
            part = []
            for name in names[start : start + _REPORT_EVERY]:
                places = [*(root / folder / name for folder in TARGET_FOLDERS), file.parent / name, Path(name)]
                path = next((place for place in places if place.is_file() and place.suffix.lower() in EXTENSIONS), None)
                if path is None:
                    self.bad.append(UnusableImage(str(root / name), f"is named in {file} but is not there"))
                else:
                    # Named from the file's own folder, so that both can be moved.
                    shown = os.path.relpath(name, file.parent).replace(os.sep, "/") if os.path.isabs(name) else name
                    part.append(self._of_entry(str(path), shown, self.listed[name], ()))
            yield from self._read(part)
            self._count(len(part))

    def _in_folder(
        self, folder: str, prefix: str, name: str, files: _Names, near: Beside, told: dict[str, Listed], stems: Collection[str]
    ) -> _Found:
        if self.subset.is_style:
            return _Found(os.path.join(folder, name), prefix + name, self.subset.class_tokens)
        stem = os.path.splitext(name)[0]
        keys = self._keys(prefix + name)
        entry = next((told[key] for key in (name, stem, plain(name), plain(stem)) if key in told), None)
        mask = os.path.join(folder, near.masks[stem]) if stem in near.masks else ""
        found = _Found(
            os.path.join(folder, name),
            prefix + name,
            entry.caption if entry is not None else self.subset.class_tokens,
            mask=self._mask(prefix + name, mask),
            weights=entry.weights if entry is not None else (),
        )
        sidecar = next((there for ending in (*self.endings, ".json") if (there := files.find(stem + ending))), None)
        if sidecar is not None:
            found.sidecar = os.path.join(folder, sidecar)
        else:
            found.sidecar = next((path for place in self.folders if (path := place.caption(keys, self.endings))), "")
        self._find_controls(found, keys, stems)
        found.controls += [os.path.join(folder, control) for control in near.controls.get(stem, [])]
        self.is_paired |= bool(found.controls)
        return found

    def _keys(self, name: str) -> tuple[str, ...]:
        """Under which names a target's partners may lie in a control folder."""
        stem = os.path.splitext(name)[0]
        return tuple(dict.fromkeys((f"{self.subset.folder.name}/{stem}", stem, os.path.basename(stem))))

    def _find_controls(self, found: _Found, keys: tuple[str, ...], stems: Collection[str]) -> None:
        missing: list[int] = []
        for place, folder in enumerate(self.folders):
            paths, reason = folder.find(keys, stems)
            found.reason = found.reason or reason
            if not paths:
                missing.append(place)
            elif missing and not found.reason:
                earlier = self.folders[missing[0]].folder
                found.reason = f"has a control image in {folder.folder} but none in {earlier}, where {keys[-1]}.* was looked for"
            found.controls += paths
        if found.controls and not found.reason:
            for place in missing:
                self.fewer.setdefault(place, []).append(found.name)

    def _mask(self, name: str, own: str) -> str:
        options = self.subset.options
        if self.subset.is_reg or not (options.masked_loss or options.conditioning_data_dir):
            return ""
        mask = own or next((self.masks[key] for key in self._keys(name) if key in self.masks), "")
        self.unmasked += not mask
        return mask

    # Files: their headers and texts.

    def _read(self, part: list[_Found]) -> Iterator[ImageInfo]:
        edits = self.wanted.most > 0
        paths = [path for found in part for path in (found.path, found.sidecar, *(found.controls if edits else ())) if path]
        known = self.index.known(paths)
        for found in part:
            try:
                stat = stat_of(found.path)
                size = self._size(found.path, stat, known)
            except FileNotFoundError:
                continue  # removed while we were looking
            if isinstance(size, str):
                self.bad.append(UnusableImage(found.path, size))
                continue
            caption = self._text(found, known)
            controls = self._controls(found, known)
            if caption is not None and controls is not None:
                yield ImageInfo(
                    found.path, found.name, self.number, *size, caption, *stat, found.mask, controls=controls, weights=found.weights
                )

    def _text(self, found: _Found, known: Known) -> str | None:
        """The caption; None for what has been added to the bad ones."""
        text = self._caption(found.sidecar, known, found.path) if found.sidecar else found.caption
        if text is not None and plain(found.sidecar).endswith(".json"):
            said = caption_in_json(text, self.subset.options.caption_separator)
            if said is None and self.endings[0] == ".json":
                self.bad.append(
                    UnusableImage(found.path, "has a caption file .json without a caption: a text, or an object with caption or tags")
                )
                return None
            text = found.caption if said is None else said
        if text is not None and TRIGGER in text:
            word = self.subset.class_tokens
            if not word:
                self.without_word.append(found.name)
            text = " ".join(text.replace(TRIGGER, word).split()) if not word else text.replace(TRIGGER, word)
        return text

    def _controls(self, found: _Found, known: Known) -> tuple[ControlImage, ...] | None:
        """None for what has been added to the bad ones."""
        if not self.wanted.most:
            self.unused_controls += bool(found.controls)
            return ()
        reason, count = found.reason, len(found.controls)
        # Where there are control folders, a target without a partner in them is a mistake, whatever the model takes.
        fewest = max(self.wanted.fewest, 1) if self.folders else self.wanted.fewest
        if not reason and count < fewest:
            many = f"{count or 'no'} control image{'s' if count > 1 else ''}"
            takes = f", {self.wanted.model} takes at least {fewest}" if count else ""
            reason = f"has {many}{takes}; looked for were {self._sought(found)}"
        if not reason and count > self.wanted.most:
            reason = f"has {count} control images, {self.wanted.model} takes at most {self.wanted.most}: {', '.join(found.controls)}"
        controls: list[ControlImage] = []
        for path in found.controls if not reason else ():
            seen = self._control(path, known)
            if isinstance(seen, str):
                reason = f"has a control image {path} which {seen}"
                break
            controls.append(seen)
        if reason:
            self.bad.append(UnusableImage(found.path, reason))
        return None if reason else tuple(controls)

    def _sought(self, found: _Found) -> str:
        """Where control images of a target might have been."""
        stem = os.path.splitext(found.name)[0]
        places = [str(folder.folder / f"{stem}.*") for folder in self.folders]
        listing = self.subset.metadata_file
        last = f"a control_path in {listing}" if listing else f"{os.path.basename(stem)}_control_1.* beside it"
        return " and ".join([", ".join(places), last] if places else [last])

    def _control(self, path: str, known: Known) -> ControlImage | str:
        try:
            stat = stat_of(path)
            size = self._size(path, stat, known)
        except OSError as err:
            return "is not there" if isinstance(err, FileNotFoundError) else f"cannot be read ({err.strerror or err})"
        return size if isinstance(size, str) else ControlImage(path, *size, *stat)

    def _size(self, path: str, stat: Stat, known: Known) -> tuple[int, int] | str:
        """(width, height), or why there is none."""
        row = known.get(path)
        if row is not None and row[:2] == stat:
            if row[6] and not _IN_DECODERS_WORDS.match(row[6]):
                return str(row[6])
            if row[2]:
                return row[2], row[3]
        try:
            width, height = read_size(path)
        except BadImage as err:
            if not isinstance(err, Unreachable):
                self.index.put(path, stat, reason=str(err))
            return str(err)
        self.index.put(path, stat, width=width, height=height)
        return width, height

    def _caption(self, path: str, known: Known, image: str) -> str | None:
        row = known.get(path)
        try:
            stat = stat_of(path)
            if row is not None and row[:2] == stat and row[4] is not None:
                return str(row[4])
            with open(path, encoding="utf-8-sig") as file:
                text = file.read(1 << 20).strip()
        except (OSError, UnicodeDecodeError) as err:
            self.bad.append(UnusableImage(image, f"has a caption file that cannot be read as UTF-8 text ({err})"))
            return None
        self.index.put(path, stat, text=text)
        return text


def _masks(subset: Subset) -> dict[str, str]:
    """Name of an image without ending, within the mask folder -> path of its mask."""
    options = subset.options
    root = options.conditioning_data_dir or (str(subset.masks) if subset.masks is not None and options.masked_loss else None)
    if subset.is_reg or root is None:
        return {}
    masks = {}
    for folder in walk(root, True):
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, ending = os.path.splitext(entry.name)
                if ending.lower() in EXTENSIONS and is_text(entry.name) and is_file(entry):
                    masks[os.path.relpath(os.path.join(folder, stem), root).replace(os.sep, "/")] = entry.path
    return masks
