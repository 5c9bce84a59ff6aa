"""How many versions of compiled code a run is said to need."""

from __future__ import annotations

import pytest

from sd_scripts.families import RUNS
from sd_scripts.library.memory.recompile_count import recompile_count
from sd_scripts.schema.command_line import parse_cli

SQUARE, WIDE, TALL, LARGE = (64, 64), (128, 64), (64, 128), (128, 128)


@pytest.mark.parametrize(
    ("family", "given", "sizes", "wanted"),
    [
        ("sdxl", "", [SQUARE], 1),
        ("sdxl", "", [SQUARE, WIDE], 3),
        ("sdxl", "", [SQUARE, WIDE, TALL, LARGE], 4),
        ("sdxl", "--compile_dynamic=true", [SQUARE], 1),
        ("sdxl", "--compile_dynamic=true", [SQUARE, WIDE], 2),
        ("sdxl", "--compile_dynamic=false", [SQUARE, WIDE, TALL, LARGE], 4),
        ("flux", "", [SQUARE], 1),
        ("flux", "", [WIDE, TALL], 1),
        ("flux", "", [SQUARE, WIDE, TALL, LARGE], 3),
        ("flux", "--compile_dynamic=false", [SQUARE, WIDE, TALL, LARGE], 3),
        ("flux", "--apply_t5_attn_mask", [SQUARE], 6),
        ("flux", "--apply_t5_attn_mask --compile_dynamic=false", [SQUARE], None),
        ("zimage", "", [SQUARE], 6),
        ("zimage", "--compile_dynamic=false", [SQUARE], None),
        ("zimage", "--objective=acrf --base_prior_weight=0.5 --reg_data_dir=toy:star", [SQUARE], 16),
    ],
)
def test_versions_follow_from_sizes_texts_and_calls(family: str, given: str, sizes: list[tuple[int, int]], wanted: int | None) -> None:
    arguments = ["--pretrained_model_name_or_path=toy", "--train_data_dir=toy:star", "--compile", *given.split()]
    assert recompile_count(parse_cli(RUNS[family, "network"], arguments).options, sizes) == wanted
