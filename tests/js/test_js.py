"""The page's modules pass the tools of their own language, and its libraries are the files that were released."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
VENDOR = HERE.parents[1] / "kohya_like" / "web" / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))
NPM = shutil.which("npm")
with_node = pytest.mark.skipif(not NPM or not (HERE / "node_modules").is_dir(), reason="no node; `npm ci` in tests/js installs its tools")


@with_node
@pytest.mark.parametrize("script", ["lint", "types", "test", "docker"])
def test_the_modules_are_clean_typed_and_compute_what_they_should_and_the_dockerfile_is_clean(script: str) -> None:
    done = subprocess.run([str(NPM), "run", "--silent", script], cwd=HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_libraries_are_the_files_that_were_released() -> None:
    files = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*") if path.is_file()}
    licences = {f"{name.split('/')[0]}/LICENSE.txt" for name in MANIFEST}
    assert set(files) == {"manifest.json", *MANIFEST, *licences}
    for name, said in MANIFEST.items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == said["sha256"], (
            f"{name} is not that of {said['package']} {said['version']}"
        )
    for name in licences:
        assert re.search(r"Permission is hereby granted|Apache License\s+Version 2.0", files[name].read_text(encoding="utf-8"))
