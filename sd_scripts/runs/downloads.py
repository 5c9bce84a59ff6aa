"""Models from the hub: what a fetch would bring, and the fetch, with sentences for whatever keeps it from ending. Knows files, not models.

The token is read from the environment (HF_TOKEN) or the hub's own login, never from an option; it is written nowhere.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import httpx2
import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]
from tqdm import tqdm

from sd_scripts.schema import files
from sd_scripts.schema.errors import OptionError

log = logging.getLogger("sd_scripts")
SPARE_BYTES = 256 << 20
"""Of the disk, which a fetch leaves free."""
SECONDS_BETWEEN_LINES = 2.0
LARGE_BYTES = 16 << 20
"""Files from this size on are fetched so that a later start goes on with what has come; huggingface_hub removes what it did not end."""
_PIECE = 1 << 20
_TRIES = 5


@dataclass(frozen=True)
class Ahead:
    """What a fetch would bring. Sizes in bytes; free is of the disk with the hub's cache."""

    hub_id: str
    revision: str
    licence: str
    is_gated: bool
    num_files: int
    total: int
    missing: int
    free: int
    cache: Path
    large: tuple[str, ...] = ()
    """Files of many bytes that are not in the cache."""

    def lines(self) -> list[str]:
        """The same in words."""
        still = "all of it is in the cache" if not self.missing else f"{_size(self.missing)} of it not in the cache yet"
        licence = self.licence or "none is named; see the model page"
        return [
            f"{self.hub_id}: {self.num_files} files, {_size(self.total)}, {still}",
            f"free on the disk of {self.cache}: {_size(self.free)}",
            f"its licence: {licence}{'; gated: terms to accept' if self.is_gated else ''}",
        ]


def look_ahead(hub_id: str, patterns: Sequence[str], ignored: Sequence[str] = (), revision: str | None = None) -> Ahead:
    """Asks the hub what the files of a model are that these patterns name; fetches none. Raises what huggingface_hub and httpx2 raise."""
    info = huggingface_hub.HfApi().model_info(hub_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    found = huggingface_hub.snapshot_download(
        hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(ignored), tqdm_class=cast(Any, _Silent), dry_run=True
    )
    card: Any = info.card_data
    licence = str(getattr(card, "license_name", None) or getattr(card, "license", None) or "")
    cache = Path(constants.HF_HUB_CACHE)
    return Ahead(
        hub_id,
        str(info.sha or ""),
        licence,
        bool(info.gated),
        len(found),
        sum(file.file_size or 0 for file in found),
        sum(file.file_size or 0 for file in found if not file.is_cached),
        shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free,
        cache,
        tuple(file.filename for file in found if not file.is_cached and (file.file_size or 0) >= LARGE_BYTES),
    )


def fetched(
    option: str,
    hub_id: str,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    revision: str | None = None,
    ahead: Ahead | None = None,
) -> Path:
    """The folder in the hub cache with the files of a model that these patterns name; what is missing is fetched. Raises OptionError.

    ahead: what is known of it already; None asks, and says it.
    """
    log.info("looking for %s in the hub cache and on the hub", hub_id)
    try:
        ahead = ahead or _told(hub_id, patterns, ignored, revision)
        _check_room(option, ahead)
        if ahead is not None and ahead.large:
            _bring(ahead)
        chosen: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(ignored)}
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, tqdm_class=cast(Any, _Lines), **chosen))
    except TOLD as err:
        raise problem_of(err, option, hub_id, revision) from err


def _told(hub_id: str, patterns: Sequence[str], ignored: Sequence[str], revision: str | None) -> Ahead | None:
    """Says before a fetch what it brings; None where the hub cannot say, and the fetch itself says why, or finds all in the cache."""
    if is_offline():
        return None
    try:
        ahead = look_ahead(hub_id, patterns, ignored, revision)
    except TOLD:
        return None
    for line in ahead.lines() if ahead.missing else ():
        log.info("%s", line)
    return ahead


def _check_room(option: str, ahead: Ahead | None) -> None:
    """Raises OptionError where the disk has no room for a fetch."""
    if ahead is not None and ahead.missing and ahead.missing + SPARE_BYTES > ahead.free:
        raise OptionError(
            f"{option}: {ahead.hub_id} needs {_size(ahead.missing)} more in {ahead.cache}, and {_size(ahead.free)} are free there. Make "
            "room, or set HF_HOME to a folder on another disk"
        )


def _bring(ahead: Ahead) -> None:
    """Fetches the large files into the hub's cache, each going on where it was. Raises OptionError, and what the hub's client raises."""
    blobs = ahead.cache / file_download.repo_folder_name(repo_id=ahead.hub_id, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    urls = [huggingface_hub.hf_hub_url(ahead.hub_id, name, revision=ahead.revision) for name in ahead.large]
    found = [huggingface_hub.get_hf_file_metadata(url) for url in urls]
    with _Lines(total=sum(about.size or 0 for about in found), unit="B", unit_scale=True, desc=_BYTES) as bar:
        for name, about in zip(ahead.large, found, strict=True):
            assert about.etag is not None and about.size is not None, "the hub names both for every file of a model"
            blob, part = blobs / about.etag, blobs / f"{about.etag}.part"
            # A lock beside it: on Windows no file is renamed that somebody has open.
            with files.one_at_a_time(blobs, f"{about.etag}.lock"):
                if blob.exists():  # by another process, meanwhile
                    bar.update(about.size)
                    continue
                with part.open("ab") as file:
                    _stream(about.location, file, about.size, bar)
                    file.flush()
                    os.fsync(file.fileno())
                _check_whole(part, about.etag, f"{ahead.hub_id}: {name}")
                os.replace(part, blob)


def _stream(url: str, part: BinaryIO, size: int, bar: tqdm[Any]) -> None:
    """Writes what is missing of a file, however often the connection breaks, as long as something comes. Raises httpx2.TransportError."""
    is_ours = urlsplit(url).netloc == urlsplit(constants.ENDPOINT).netloc
    headers = build_hf_headers() if is_ours else {}
    have, tries = part.seek(0, os.SEEK_END), 0
    bar.update(have)
    while have < size:
        try:
            asked = {**headers, "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
            wait = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with get_session().stream("GET", url, headers=asked, timeout=wait, follow_redirects=True) as answer:
                hf_raise_for_status(answer)
                if have and answer.status_code != 206:
                    bar.update(-have)  # all of it comes again
                    part.truncate(0)
                    have = 0
                for piece in answer.iter_bytes(_PIECE):
                    part.write(piece)
                    have, tries = have + len(piece), 0
                    bar.update(len(piece))
            if have < size:
                raise httpx2.RemoteProtocolError(f"{have} of {size} bytes came")
        except httpx2.TransportError:
            part.flush()
            tries += 1
            if tries > _TRIES:
                raise
            time.sleep(1)


def _check_whole(part: Path, etag: str, what: str) -> None:
    """Raises OptionError, and removes the file, where it is not what the hub says it is."""
    if len(etag) != 64:
        return  # only of large files, as the hub keeps them, the name is the hash
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != etag:
        part.unlink()
        raise OptionError(f"{what} came damaged (its hash is {digest[:12]}, and the hub says {etag[:12]}); start again to fetch it anew")


def is_offline() -> bool:
    """Whether somebody has said that the hub is not to be asked."""
    return bool(constants.is_offline_mode())


TOLD = (HfHubHTTPError, HFValidationError, OSError, httpx2.HTTPError)


def problem_of(err: Exception, option: str, hub_id: str, revision: str | None) -> OptionError:
    """The sentence for what huggingface_hub has raised."""
    if isinstance(err, GatedRepoError):
        has_token = bool(huggingface_hub.get_token())
        cure = (
            "Accept them on the model's page with the account of your token"
            if has_token
            else "Accept them on the model's page, then give a token in the environment variable HF_TOKEN, or log in with `hf auth login`"
        )
        return OptionError(f"{option}: {hub_id} is gated: it asks its readers to accept terms. {cure}")
    if isinstance(err, RepositoryNotFoundError | HFValidationError):
        return OptionError(f"{option}: {_not_here(hub_id)}, and the hub has no model of that name that you may read. Check the spelling")
    if isinstance(err, RevisionNotFoundError):
        return OptionError(f"revision: {hub_id} has no branch, tag or commit {revision}")
    if isinstance(err, OfflineModeIsEnabled | LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the hub cannot be reached"
        return OptionError(
            f"{option}: {_not_here(hub_id)}; as a hub id it would have to be fetched, but {why} and it is not in the cache. "
            "Download it where there is a network, and give the path"
        )
    if isinstance(err, httpx2.HTTPError) and not isinstance(err, httpx2.HTTPStatusError):
        waited = constants.HF_HUB_DOWNLOAD_TIMEOUT
        return OptionError(
            f"{option}: fetching {hub_id} stopped ({type(err).__name__}): the hub sent nothing for {waited} seconds, or broke off, several "
            "times in a row. What has come is kept; start again to go on, or set HF_HUB_DOWNLOAD_TIMEOUT to more seconds"
        )
    return OptionError(f"{option}: {hub_id} could not be fetched from the hub ({type(err).__name__}: {err}). Try again, or give a path")


def _not_here(value: str) -> str:
    """A value that looks like a hub id may be a mistaken path, so the sentence begins with that."""
    return f"there is no folder {value} here"


def _size(count: float) -> str:
    """Bytes in words."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


_BYTES = "bytes"


class _Silent(tqdm):  # type: ignore[type-arg]
    """No bar."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "disable": True})


class _Lines(tqdm):  # type: ignore[type-arg]
    """How many bytes have come, of how many, and how fast; of files nothing. In a log a line now and then."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.pop("bar_format", None)
        is_of_bytes = str(settings.get("desc")).startswith(("Reconstructing", _BYTES))
        begun = {"mininterval": SECONDS_BETWEEN_LINES} if not sys.stderr.isatty() else {}
        super().__init__(*args, **{**settings, **begun, "disable": not is_of_bytes, "leave": True, "delay": 0.2, "desc": "fetching"})

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """What huggingface_hub calls it is not said."""

    set_description_str = set_description
