"""Uploads to the hub, against a hub on this machine: nothing leaves without being asked for, and no failure costs the training."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sd_scripts.families import RUNS
from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.library.train.launch import check_early
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.runs.hub import Uploads
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.output import OutputOptions
from tests.forked import forked_script
from tests.runs.conftest import PATIENCE_SECONDS, Runs

TOKEN = "hf_" + "x" * 34


class Hub(ThreadingHTTPServer):
    """The part of the hub's protocol that an upload needs (repository, preupload, LFS, commit); keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.repositories: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.requests = 0
        self.refuses = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self) -> None:
        body = self._body()
        self.server.objects[hashlib.sha256(body).hexdigest()] = body
        self._answer({})

    def do_GET(self) -> None:
        self.server.requests += 1
        self._answer({"id": "me/loras", "private": True, "siblings": [], "sha": "0" * 40})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.requests += 1
        if token := self.headers.get("Authorization"):
            hub.tokens.add(token)
        if hub.refuses:
            self._answer({"error": "no room"}, 403)
        elif self.path == "/api/repos/create":
            hub.repositories.append(json.loads(body))
            self._answer({"url": f"{hub.address}/me/loras", "name": "me/loras"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular", "shouldIgnore": False}
                for file in files
            ]
            self._answer({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{**item, "actions": {"upload": {"href": f"{hub.address}/put/{item['oid']}"}}} for item in objects]
            self._answer({"transfer": "basic", "objects": uploads})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "lfsFile":
                    hub.files[entry["value"]["path"]] = hub.objects[entry["value"]["oid"]]
                elif entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._answer({"commitUrl": f"{hub.address}/me/loras/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True})
        else:
            self._answer({"error": self.path}, 404)


@contextmanager
def serving() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


def variables(hub: Hub) -> dict[str, str]:
    """Of a process that may use this network."""
    return {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}


def trained(runs: Runs, hub: Hub, console: Path, **options: Any) -> None:
    """Trains in a process of its own, to the end; what it says goes to the file console."""
    script = SCRIPTS / RUNS[runs.family, runs.method].script
    process = forked_script(script, runs.arguments(max_train_steps=2, **options), console, variables(hub))
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0, console.read_text()


def test_every_saved_file_arrives_byte_for_byte_in_a_private_repository(runs: Runs, hub: Hub, tmp_path: Path) -> None:
    trained(runs, hub, tmp_path / "console.txt", save_every_n_steps=1, huggingface_repo_id="me/loras", huggingface_path_in_repo="cats")
    run = runs.newest()
    assert hub.files.keys() == {"cats/lora-000001.safetensors", "cats/lora.safetensors"}
    for path, content in hub.files.items():
        assert content == (run.path / Path(path).name).read_bytes()
    assert len(hub.repositories) == 1 and (hub.repositories[0].get("private") or hub.repositories[0].get("visibility") == "private")
    assert hub.tokens == {f"Bearer {TOKEN}"}
    uploaded = [event["text"] for event in run.events()[0] if event["kind"] == "uploaded"]
    assert uploaded == ["me/loras/cats/lora-000001.safetensors", "me/loras/cats/lora.safetensors"]
    assert not any(TOKEN in path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file()), (
        "the token was written down"
    )


def test_a_folder_is_uploaded_with_everything_in_it(runs: Runs, hub: Hub, tmp_path: Path) -> None:
    runs.method = "full"
    trained(runs, hub, tmp_path / "console.txt", save_model_as="diffusers", huggingface_repo_id="me/models")
    folder = runs.newest().path / "model"
    assert hub.files == {f"model/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_hub_that_refuses_costs_a_warning_and_not_the_training(runs: Runs, hub: Hub, tmp_path: Path) -> None:
    hub.refuses = True
    trained(runs, hub, tmp_path / "console.txt", huggingface_repo_id="me/loras")
    run = runs.newest()
    events = run.events()[0]
    assert events[-1]["kind"] == "finished"
    assert any("lora.safetensors was not uploaded to me/loras" in event.get("text", "") for event in events if event["kind"] == "warning")
    assert (run.path / "lora.safetensors").is_file()


def test_nothing_is_uploaded_or_asked_by_default(runs: Runs, hub: Hub, tmp_path: Path) -> None:
    """That importing the libraries asks nothing either, test_real_photographs shows on a Python that is started anew."""
    trained(runs, hub, tmp_path / "console.txt")
    assert hub.requests == 0 and not hub.files


def test_an_upload_without_token_or_network_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "huggingface_repo_id": "me/loras"}
    options = flat.build(SdxlNetwork, values)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OptionError, match="HF_HUB_OFFLINE is set"):
        check_early(options)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match="HF_TOKEN"):
        check_early(options)
    with pytest.raises(OptionError, match="huggingface_repo_id"):
        flat.build(SdxlNetwork, values | {"huggingface_repo_id": "no-owner"})


def test_a_hub_that_cannot_be_reached_is_told_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        address = gone.address
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
    for file in files:
        file.write_bytes(b"weights")
    warned: list[str] = []
    uploads = Uploads(OutputOptions(output_name="x", huggingface_repo_id="me/loras"), warned.append, lambda _address: None)
    for file in files:
        uploads.put(file)
    uploads.finish()
    assert [text.split(" ")[0] for text in warned] == ["one.safetensors", "two.safetensors"]
