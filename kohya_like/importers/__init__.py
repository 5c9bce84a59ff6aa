"""Other programs' configurations, and runs rebuilt from the files they made. Pure functions: bytes in, values and a report out."""

from .reading import own, read
from .report import Imported, Row, Verdict

__all__ = ["Imported", "Row", "Verdict", "own", "read"]
