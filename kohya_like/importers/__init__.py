"""Other programs' configurations, and runs rebuilt from the files they made. Pure functions: bytes in, values and a report out."""

from sd_scripts.schema.imported import Imported, Row, Verdict

from .reading import Opened, own, read

__all__ = ["Imported", "Opened", "Row", "Verdict", "own", "read"]
