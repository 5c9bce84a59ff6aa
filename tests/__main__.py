"""What `bash setup.sh test` runs; setup.sh and setup.ps1 have installed what it needs.

    test [...]               style, types, then the tests that always run; arguments go to pytest
    test --all [FOLDER ...]  style, types, then every test, those that take minutes too, a folder at a time
    test --all -k WORDS      the same in one piece, with arguments of pytest
    test --busy [FOLDER ...] the tests that always run, ten times each folder, while two other processes compute
    test --mutants [...]     known faults in copies of the program: which of them do the tests notice?

Of --all by folders, --busy and --mutants, what is done stays done as long as the tree is the same: a second call goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tests import campaign, mutants
from tests.trees import ENVIRONMENT, ROOT

STYLE_AND_TYPES = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))


def called(*words: str) -> int:
    """Exit code of a Python module that is run as a program."""
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=ENVIRONMENT, check=False).returncode


def main(words: Sequence[str]) -> int:
    what, rest = (words[0], words[1:]) if words and words[0] in ("--all", "--busy", "--mutants") else ("", words)
    if what == "--mutants":
        return mutants.main(rest)
    if what == "--busy":
        return campaign.busy(rest)
    for tool in STYLE_AND_TYPES:
        if code := called(*tool):
            return code
    if what == "--all" and not any(word.startswith("-") for word in rest):
        return campaign.everything(rest)
    return called("pytest", *campaign.TWO_AT_ONCE, "-m", "" if what == "--all" else "not long", *rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
