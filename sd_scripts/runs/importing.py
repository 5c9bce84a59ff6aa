"""Importing large libraries, and building networks, without looking for garbage meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(library: str) -> Iterator[None]:
    """For the first import of a library by its module's name, and of all that comes with it.

    Modules stay to the end of the process. Looking through them for garbage takes 1.2 of the 8 CPU seconds in which a trainer's libraries
    are imported, 0.5 of 3.6 for the studio's, and afterwards 0.3 s each time, so what is there is never looked at again.
    """
    if library in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def building() -> Iterator[None]:
    """Around what makes very many objects that stay: to look through them again and again takes a tenth of a forecast."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
