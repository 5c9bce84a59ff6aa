"""What tests of loading share."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for an address or a connection fails."""

    def refuse(*_arguments: object, **_names: object) -> NoReturn:
        raise OSError("the test allows no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
