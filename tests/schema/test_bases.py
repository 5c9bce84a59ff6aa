"""What is said of a base model by its name: the licence, and what a model of few steps wants."""

import pytest

from sd_scripts.families import FACTS, NAMES, RUNS, bases
from sd_scripts.runs.drawing import has_toy
from sd_scripts.runs.early_checks import check_settings
from sd_scripts.runs.model_files import BASE
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.generate import FAMILIES, generate_options

KLEIN = "black-forest-labs/FLUX.2-klein-"
NAMED = [
    ("flux2", f"{KLEIN}base-4B", "Apache-2.0", None),
    ("flux2", f"{KLEIN}base-9B", "non-commercial", None),
    ("flux2", f"{KLEIN}4B", "Apache-2.0", f"{KLEIN}base-4B"),
    ("flux2", "C:\\models\\flux-2-klein-9b-fp8.safetensors", "non-commercial", f"{KLEIN}base-9B"),
    ("flux2_dev", "black-forest-labs/FLUX.2-dev", "non-commercial", None),
    ("flux2", "/turbo/base/mine.safetensors", "if it is made from Klein 4B", None),
    ("zimage", "Tongyi-MAI/Z-Image-Turbo", "Apache-2.0", "Tongyi-MAI/Z-Image"),
    ("zimage", "Tongyi-MAI/Z-Image", "Apache-2.0", None),
    ("flux", "black-forest-labs/FLUX.1-dev", "non-commercial", None),
    ("flux3", "black-forest-labs/flux-3-image-klein-base", "non-commercial", None),
    ("flux3", "flux-3-image-klein_fp8.safetensors", "non-commercial", "black-forest-labs/flux-3-image-klein-base"),
    ("kontext", "black-forest-labs/FLUX.1-Kontext-dev", "non-commercial", None),
    ("chroma", "lodestones/Chroma1-HD", "Apache-2.0", None),
    ("qwen_image21", "Qwen/Qwen-Image-2.1", "Qwen's own", None),
    ("krea2", "krea/Krea-2-Turbo", "a million dollars", "krea/Krea-2-Raw"),
    ("krea2", "krea/Krea-2-Raw", "a million dollars", None),
    ("anima", "circlestone-labs/Anima-Base-v1.0-Diffusers", "non-commercial use, images are free", None),
    ("anima", "models/anima-turbo-v1.0.safetensors", "non-commercial", "circlestone-labs/Anima-Base-v1.0-Diffusers"),
]


@pytest.mark.parametrize(("family", "name", "licence", "undistilled"), NAMED)
def test_licence_and_few_steps_are_known_by_the_name(family: str, name: str, licence: str, undistilled: str | None) -> None:
    base = bases.published(family, name)
    assert base is not None and licence in base.licence and base.undistilled == undistilled
    said = bases.about(family, name)
    assert bases.licence(family, name) == f"Licence: {base.licence}."
    assert base.licence in said and ("few steps" in said) == (undistilled is not None)


@pytest.mark.parametrize("family", NAMES)
def test_toy_is_named_where_there_is_a_built_in_model_and_nowhere_else(family: str) -> None:
    kinds = [run for (name, _method), run in RUNS.items() if name == family and FACTS[family].bases]
    for options in [*kinds, *([generate_options(family)] if family in FAMILIES else [])]:
        field = flat.fields(options)[BASE]
        assert ("toy" in field.help, "toy" in field.show.suggestions) == (has_toy(family), has_toy(family)), options
    for run in kinds:
        with pytest.raises(OptionError) as missing:
            flat.build(run, {"train_data_dir": "toy:star"})
        with pytest.raises(OptionError) as wrong:
            check_settings(flat.build(run, {"train_data_dir": "toy:star", BASE: "no/file.safetensors"}))
        for refused in (missing, wrong):
            assert BASE in str(refused.value) and ("toy" in str(refused.value)) == has_toy(family)


def test_every_family_with_published_models_says_something_of_any_name() -> None:
    for family, facts in FACTS.items():
        assert all(base.pieces for base in facts.bases[:-1]) and not any(base.pieces for base in facts.bases[-1:]), family
        assert bool(bases.about(family, "mine.safetensors")) == bool(facts.bases), family
        assert bases.about(family, "toy") == bases.about(family, " ") == ""


def notes(name: str, **values: object) -> list[str]:
    given = {"pretrained_model_name_or_path": name, "train_data_dir": "toy:star", "output_name": "x", **values}
    return bases.notes(flat.build(RUNS["flux2", "network"], given))


def test_a_run_that_keeps_the_few_steps_is_told_the_licence_alone() -> None:
    assert len(notes(f"{KLEIN}4B")) == 2 and "base_prior_weight" in notes(f"{KLEIN}4B")[1]
    assert len(notes(f"{KLEIN}4B", base_prior_weight=1.0)) == len(notes(f"{KLEIN}4B", training_adapter="undo.safetensors")) == 1
    assert len(notes(f"{KLEIN}base-4B")) == 1 and notes("toy") == []


@pytest.mark.parametrize(
    ("run", "option", "value"),
    [
        (("sdxl", "network"), BASE, "toy:sd"),
        (("sdxl", "network"), BASE, "toy:photographs"),
        (("ddpm", "scratch"), "vae", "toy:photographs"),
        (("lgt", "scratch"), "vae", "toy:nothing"),
    ],
)
def test_a_built_in_model_that_an_option_does_not_propose_is_refused_before_anything_is_loaded(
    run: tuple[str, str], option: str, value: str
) -> None:
    with pytest.raises(OptionError, match=f"{option}: there is no built-in model {value}; give toy"):
        check_settings(flat.build(RUNS[run], {option: value, "train_data_dir": "toy:shapes"}))


def test_the_vae_of_photographs_is_proposed_and_taken() -> None:
    check_settings(flat.build(RUNS["lgt", "scratch"], {"vae": "toy:photographs", "train_data_dir": "toy:photographs"}))
