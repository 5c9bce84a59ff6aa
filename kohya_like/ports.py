"""Whether the studio can listen where it was asked to; who has the port otherwise. Light: it is asked before gradio is imported."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import psutil

FIRST, LAST = 7860, 7959
"""The ports of which gradio takes the first free one when none is asked for."""


def problem(host: str, port: int | None) -> str | None:
    """A sentence about why nobody can listen there; None where it works."""
    if port is not None:
        err = _refusal(host, port)
        return None if err is None else _sentence(host, port, err)
    for each in range(FIRST, LAST + 1):
        err = _refusal(host, each)
        if err is None:
            return None
        if err.errno != errno.EADDRINUSE:
            return _sentence(host, each, err)
    return f"all ports from {FIRST} to {LAST} are taken; give a free one with --server_port"


def _refusal(host: str, port: int) -> OSError | None:
    """What the system answers to somebody who wants to listen there."""
    try:
        for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[:1]:
            with socket.socket(family, kind, number) as probe:
                if os.name != "nt":
                    # Connections that have just ended keep nobody from listening.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
    except OSError as err:
        return err
    return None


def _sentence(host: str, port: int, err: OSError) -> str:
    if isinstance(err, socket.gaierror) or err.errno == errno.EADDRNOTAVAIL:
        return f"--listen: this computer has no address {host}; give one of its own, or --listen alone for all of them"
    if err.errno == errno.EACCES:
        return f"--server_port: this user may not listen on port {port}; most systems keep those below 1024 for themselves, so take another"
    if err.errno != errno.EADDRINUSE:
        return f"--server_port: nobody can listen on port {port} of {host}: {err.strerror}"
    free = f"another --server_port, or none for the first free one from {FIRST}"
    process = _listener(port)
    if process is None:
        return f"--server_port: port {port} is taken by a program that this user cannot see; give {free}"
    with process.oneshot():
        since = time.strftime("%H:%M", time.localtime(process.create_time()))
        if any(Path(word).name == "gui.py" for word in process.cmdline()):
            return (
                f"--server_port: port {port} is taken by a studio (process {process.pid}, since {since}): open http://127.0.0.1:{port}/, "
                f"end it with kill {process.pid}, or give {free}"
            )
        return f"--server_port: port {port} is taken by {process.name()} (process {process.pid}, since {since}); end that, or give {free}"


def _listener(port: int) -> psutil.Process | None:
    """The process that listens on a port, where this user may know it."""
    try:
        found = psutil.net_connections(kind="tcp")
        pids = [each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid]
        process = psutil.Process(pids[0]) if pids else None
        return process if process is not None and process.name() and process.cmdline() is not None else None
    except (psutil.Error, OSError):
        return None
