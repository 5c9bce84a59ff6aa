"""Preview prompts in kohya's three forms and typed in directly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sd_scripts.families import RUNS
from sd_scripts.families.flux.options import FluxSampleOptions
from sd_scripts.families.qwen_edit.options import QwenImageSampleOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import Defaults, PromptSpec, flags_of, read_prompts
from sd_scripts.schema.samples import UNetSampleOptions


def read(text: str, grid: int = 8, resolution: tuple[int, int] = (1024, 768), seed: int = 7, **options: object) -> list[PromptSpec]:
    return read_prompts(Defaults(UNetSampleOptions(sample_prompts=text, **options), resolution, grid, seed))


def problems(text: str, **options: object) -> str:
    with pytest.raises(OptionError) as caught:
        read(text, **options)
    assert all(problem.option in ("sample_prompts", "sample_size") for problem in caught.value.problems)
    return str(caught.value)


WANTED = [
    PromptSpec("a cat, sitting", "dog -- or wolf", 512, 640, 3, 12, 4.5, "ddim"),
    PromptSpec("a second one", "ugly", 1024, 768, 8, 28, 6.0, "auto"),
]


def test_kohyas_text_with_all_flags(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(
        "\ufeff# two prompts\n\na cat, sitting --w 512 --h 640 --d 3 --l 4.5 --s 12 --n dog -- or wolf --ss ddim\n"
        "  # no more\na second one --n ugly\n",
        encoding="utf-8",
    )
    with pytest.raises(OptionError, match=r"prompts.txt line 3: there is no flag --"):
        read(str(file))
    file.write_text(file.read_text(encoding="utf-8-sig").replace("dog -- or wolf", "dog"), encoding="utf-8")
    found = read(str(file))
    assert found == [PromptSpec("a cat, sitting", "dog", 512, 640, 3, 12, 4.5, "ddim"), WANTED[1]]


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = tmp_path / "prompts.toml"
    toml.write_text(
        '[prompt]\nsample_steps = 12\n[[prompt.subset]]\nprompt = "a cat, sitting"\nnegative_prompt = "dog -- or wolf"\n'
        "width = 512\nheight = 640\n"
        'seed = 3\nscale = 4.5\nsample_sampler = "ddim"\n[[prompt.subset]]\nprompt = "a second one"\nnegative_prompt = "ugly"\n'
    )
    listed = tmp_path / "prompts.json"
    listed.write_text(
        json.dumps(
            [
                {
                    "prompt": "a cat, sitting", "negative_prompt": "dog -- or wolf", "width": 512, "height": 640,
                    "seed": 3, "scale": 4.5, "sample_steps": 12, "sample_sampler": "ddim",
                },
                {"prompt": "a second one", "negative_prompt": "ugly", "sample_steps": 12},
            ]
        )
    )  # fmt: skip
    assert read(str(toml)) == read(str(listed)) == [WANTED[0], PromptSpec("a second one", "ugly", 1024, 768, 8, 12, 6.0, "auto")]


def test_only_a_family_with_several_samplers_has_the_flag_for_one() -> None:
    kinds = {run.model_fields["samples"].annotation for run in RUNS.values() if "samples" in run.model_fields}
    with_one, with_several = ([kind for kind in kinds if ("sample_sampler" in kind.model_fields) is has] for has in (False, True))
    assert with_one and with_several
    for kind in kinds:
        flags = set(flags_of(kind))
        assert {"w", "h", "d", "s"} <= flags and ("ss" in flags) is (kind in with_several), kind


def test_typed_prompts_take_the_options_of_the_run() -> None:
    found = read(
        "one\n\ntwo --d 99", sample_steps=5, sample_cfg_scale=2, sample_negative_prompt="bad", sample_size=(64, 128), sample_sampler="euler"
    )
    assert found == [PromptSpec("one", "bad", 64, 128, 7, 5, 2.0, "euler"), PromptSpec("two", "bad", 64, 128, 99, 5, 2.0, "euler")]
    assert read("") == [] and read("  \n # nothing\n") == []


def test_without_a_size_the_resolution_is_brought_to_the_grid() -> None:
    assert (read("x", grid=16, resolution=(1000, 500))[0].width, read("x", grid=16, resolution=(1000, 500))[0].height) == (992, 496)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a --w 513", "line 1: width (--w) 513 is not a multiple of 8; the nearest are 512 and 520"),
        ("a --w wide", "line 1: width (--w) 'wide' is not a whole number"),
        ("ok\nb --s 0", "line 2: sample_steps (--s) '0' is not a whole number from 1 to 1000"),
        ("a --l nan", "scale (--l) 'nan' is not a number"),
        ("a --l -1", "scale (--l) '-1'"),
        ("a --ss best", "sample_sampler (--ss) 'best' is not one of auto, ddim"),
        ("a --d -1", "seed (--d) '-1'"),
        ("a --x 3", "there is no flag --x; known are --w, --h"),
        ("a --g 3.5", "--g means nothing to this model, which has no embedding of guidance; remove it"),
        ("a --w 64 --w 128", "--w stands twice"),
        ("--w 64", "the prompt is missing"),
        ("no/such/file.txt", "does not exist"),
    ],
)
def test_a_wrong_prompt_is_a_sentence_with_its_line(text: str, words: str) -> None:
    assert words in problems(text)


def test_all_problems_are_told_at_once() -> None:
    assert problems("a --w 513\nb --q 1\nc --s x").count("\n") == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.toml", "[prompt]\nprompt = 'a'\nwidth = 64\n[[prompt.subset]]\nwidth = 64", "width stands in [prompt] too"),
        ("p.toml", "prompt = 3", "exactly one table [prompt]"),
        ("p.toml", "[prompt", "not valid TOML"),
        ("p.toml", "[prompt]\nprompt = 'a'\nsteps = 3", "there is no key steps"),
        ("p.json", "{}", "must be a list of objects"),
        ("p.json", "[", "not valid JSON"),
        ("p.json", '[{"prompt": 3}]', "prompt must be text"),
        ("p.json", '[{"prompt": "a", "width": 64.5}]', "width (--w) 64.5 is not a whole number"),
    ],
)
def test_a_wrong_file_is_a_sentence(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert words in problems(str(tmp_path / name))


@given(st.text(max_size=200))
def test_any_text_gives_prompts_or_sentences(text: str) -> None:
    try:
        specs = read(text)
    except OptionError as err:
        assert err.problems
    else:
        assert all(spec.prompt and spec.width % 8 == 0 for spec in specs)


def test_flux_prompts_have_guidance_and_the_samplers_of_flow_models() -> None:
    options = FluxSampleOptions(sample_prompts="a cat --g 2.5 --l 1.5\na dog --ss dpmpp_2m", sample_scheduler="karras", sample_shift=2)
    cat, dog = read_prompts(Defaults(options, (1024, 1024), 16, 0))
    assert (cat.guidance, cat.cfg_scale, cat.sampler) == (2.5, 1.5, "auto")
    assert (dog.guidance, dog.cfg_scale, dog.steps, dog.sampler) == (3.5, 1.0, 20, "dpmsolver++")
    assert (cat.scheduler, cat.shift, dog.scheduler) == ("karras", 2, "karras")
    with pytest.raises(OptionError, match=r"\(--ss\) 'lms' is not one of auto, euler"):
        read_prompts(Defaults(FluxSampleOptions(sample_prompts="a cat --ss lms"), (1024, 1024), 16, 0))


def qwen(text: str) -> list[PromptSpec]:
    return read_prompts(Defaults(QwenImageSampleOptions(sample_prompts=text), (512, 512), 16, 0))


@pytest.fixture
def control(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"control {index}.png" for index in range(11)]
    for file in files:
        file.write_bytes(b"")
    return files


def test_control_images_are_flags_that_may_stand_several_times(control: list[Path]) -> None:
    first, second, third = qwen(f"make it red --ci {control[0]} --d 4 --ci {control[1]}\nmake it blue --ci {control[2]}\nplain --l 1")
    assert first.controls == (str(control[0]), str(control[1])) and first.seed == 4 and first.prompt == "make it red"
    assert second.controls == (str(control[2]),) and third.controls == ()
    assert (third.steps, third.cfg_scale, first.cfg_scale) == (20, 1.0, 4.0)


def test_control_images_in_files_are_a_path_or_a_list(tmp_path: Path, control: list[Path]) -> None:
    listed, toml = tmp_path / "p.json", tmp_path / "p.toml"
    listed.write_text(
        json.dumps(
            [{"prompt": "a", "control_image": str(control[0])}, {"prompt": "b", "control_image": [str(file) for file in control[:3]]}]
        )
    )
    one, other = qwen(str(listed))
    assert one.controls == (str(control[0]),) and other.controls == tuple(str(file) for file in control[:3])
    toml.write_text(f'[prompt]\ncontrol_image = "{control[1]}"\n[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nprompt = "b"')
    assert [spec.controls for spec in qwen(str(toml))] == [(str(control[1]),)] * 2


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('{"control_image": 3}', "control_image (--ci) 3 is neither the path of an image nor a list of paths"),
        ('{"control_image": [3]}', "control_image (--ci) [3] is neither the path of an image nor a list of paths"),
        ('{"control_image": "no/such.png"}', "control_image (--ci) there is no file no/such.png"),
    ],
)
def test_a_wrong_control_image_is_a_sentence(entry: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(f'[{entry[:-1]}, "prompt": "a"}}]')
    with pytest.raises(OptionError) as caught:
        qwen(str(tmp_path / "p.json"))
    assert words in str(caught.value)


def test_too_many_or_unknown_control_images_are_named(control: list[Path]) -> None:
    with pytest.raises(OptionError) as caught:
        qwen("a" + "".join(f" --ci {file}" for file in control) + "\nb --ci nowhere.png\nc --ci")
    words = str(caught.value)
    assert (
        "line 1: 11 control images; a model takes 10 at most" in words
        and "line 2: control_image (--ci) there is no file nowhere.png" in words
    )
    assert "line 3: control_image (--ci) [''] is neither" in words
    assert "--ci means nothing to this model, which takes no control images" in problems("a --ci b.png")
