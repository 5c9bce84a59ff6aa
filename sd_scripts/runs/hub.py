"""Uploads of saved files to the Hugging Face hub: beside the training, never instead of it. Only for runs that ask for it.

The token is read from the environment (HF_TOKEN) or the hub's own login, never from an option.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.output import OutputOptions


def check(options: OutputOptions) -> None:
    """Raises OptionError when an upload is asked for that cannot work: without a token, or offline."""
    if options.huggingface_repo_id is None:
        return
    if huggingface_hub.constants.is_offline_mode():
        raise OptionError(
            Problem(
                "huggingface_repo_id", "huggingface_repo_id: uploads need a network, but HF_HUB_OFFLINE is set; unset it or upload later"
            )
        )
    if huggingface_hub.get_token() is None:
        raise OptionError(
            Problem(
                "huggingface_repo_id",
                "huggingface_repo_id: an upload needs your token, in the environment variable HF_TOKEN or stored by `hf auth login`",
            )
        )


class Uploads:
    """A thread that uploads one saved file or folder after the other, in the order they were saved."""

    def __init__(self, options: OutputOptions, warn: Callable[[str], None], told: Callable[[str], None]) -> None:
        """warn gets a sentence for an upload that failed; told the address in the repository of one that is done."""
        assert options.huggingface_repo_id is not None
        self._repo, self._folder = options.huggingface_repo_id, options.huggingface_path_in_repo.strip("/")
        self._private = options.huggingface_repo_visibility == "private"
        self._warn, self._told = warn, told
        self._api = HfApi()
        self._waiting: queue.Queue[Path | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def put(self, path: Path) -> None:
        """Uploads a file, or a folder with everything in it, when those before it are done."""
        self._waiting.put(path)

    def finish(self) -> None:
        """Waits until everything is uploaded or has failed."""
        self._waiting.put(None)
        self._thread.join()

    @property
    def left(self) -> int:
        """Files that are still waiting, about."""
        return self._waiting.qsize()

    def _work(self) -> None:
        made = False
        while (path := self._waiting.get()) is not None:
            try:
                if not made:
                    self._api.create_repo(self._repo, private=self._private, repo_type="model", exist_ok=True)
                    made = True
                self._upload(path)
            # The training is worth more than a copy of it: whatever an upload raises is told, and the file is on this disk.
            except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, OSError, ValueError) as err:
                self._warn(
                    f"{path.name} was not uploaded to {self._repo}: {first_line(err)}. The file is in the run's folder; upload it by hand"
                )

    def _upload(self, path: Path) -> None:
        target = f"{self._folder}/{path.name}" if self._folder else path.name
        message = f"Upload {path.name}"
        if path.is_dir():
            self._api.upload_folder(repo_id=self._repo, folder_path=path, path_in_repo=target, commit_message=message)
        else:
            self._api.upload_file(repo_id=self._repo, path_or_fileobj=path, path_in_repo=target, commit_message=message)
        self._told(f"{self._repo}/{target}")
