"""Weights in the loss that a data set or a single image has of its own: of the whole sample, and of further terms of the loss."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from functools import lru_cache

from sd_scripts.families import FACTS, RUNS
from sd_scripts.schema.anchored_flow import TERMS, AnchoredFlowOptions
from sd_scripts.schema.flat import section_of

NAMES = ("loss_weight", *TERMS)
"""loss_weight multiplies everything; the others replace the run's option of the same name."""
Weights = tuple[tuple[str, float], ...]
"""(name, weight) of what is given, in the order of NAMES."""


def weights_of(values: Mapping[str, object]) -> tuple[Weights, list[str]]:
    """The weights among the values, and a sentence for each that is none or looks like a name that was mistyped."""
    found, problems = [], []
    for name in NAMES:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            problems.append(f"{name} is {value!r}; wanted is a number from 0 on")
        else:
            found.append((name, float(value)))
    problems += [problem for key in values if (problem := _mistyped(str(key)))]
    return tuple(found), problems


@lru_cache(maxsize=1024)
def _mistyped(key: str) -> str:
    """What to say of a key that looks like a weight and is none; "" for all others. Long lists have the same few keys in every line."""
    close = difflib.get_close_matches(key, NAMES, n=1, cutoff=0.8)
    if key in NAMES or not (close or key.startswith("lambda_")):
        return ""
    return f"{key} is no weight of the loss; {f'did you mean {close[0]}?' if close else 'known are ' + ', '.join(NAMES)}"


def with_terms() -> str:
    """The families whose loss has further terms, in words."""
    having = [family for (family, _), run in RUNS.items() if issubclass(section_of(run, "objective"), AnchoredFlowOptions)]
    return " or ".join(FACTS[family].label for family in dict.fromkeys(having))
