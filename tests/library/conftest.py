"""What tests of loading share."""

from __future__ import annotations

import gc
import socket
from typing import NoReturn

import pytest


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new_is_looked_through() -> None:
    """Letting go of a network collects garbage; among all that thousands of tests have imported, that takes seconds each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for an address or a connection fails."""

    def refuse(*_arguments: object, **_names: object) -> NoReturn:
        raise OSError("the test allows no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
