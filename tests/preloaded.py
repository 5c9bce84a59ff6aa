"""What a process of tests.forked has in it from its first moment: all that a training imports.

Nothing of it is ever looked through for garbage, which would take each such process 0.4 of its 2 seconds.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

from PIL import Image

from sd_scripts import families, library

gc.disable()
for package in (library, families):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
Image.init()
gc.freeze()
gc.enable()
