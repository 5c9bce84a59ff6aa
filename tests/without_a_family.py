"""What is asked of a copy of the program from which one family was deleted: `python without_a_family.py NAME LABEL SCRIPT...`, inside it.

Everything imports, the page starts, each kind of run that is left has its dry run, the demo has a preset, and no page, option or
document of the program says that the family ever was. Prints what is wrong, one sentence a line, and the family of the demo last.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))


def modules() -> Iterator[str]:
    """Every module of the program by its dotted name."""
    for path in sorted([*ROOT.glob("sd_scripts/**/*.py"), *ROOT.glob("kohya_like/**/*.py")]):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports() -> Iterator[str]:
    """Modules that cannot be imported."""
    for name in modules():
        try:
            importlib.import_module(name)
        except Exception as err:
            yield f"{name} cannot be imported: {type(err).__name__}: {err}"


def dry_runs() -> Iterator[str]:
    """Kinds of runs whose dry run fails."""
    from sd_scripts.families import FACTS, RUNS
    from sd_scripts.library.train.launch import main

    for (family, method), run in RUNS.items():
        base = "toy" if (ROOT / "sd_scripts" / "toy" / "bases" / family / "model_index.json").is_file() else "a/model"
        arguments = ["--dry_run", *([] if method == "scratch" else ["--pretrained_model_name_or_path", base])]
        data = "toy:styles" if FACTS[family].evaluates else "toy:edit_border" if FACTS[family].edits else "toy:star"
        said = io.StringIO()
        code: object = 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                main(family, method, [*arguments, "--train_data_dir", data])
            except SystemExit as err:
                code = err.code
        if code != 0:
            yield f"the dry run of {run.script} ends with {code}: {said.getvalue()}"


def texts() -> Iterator[tuple[str, str]]:
    """What a user can read, with the place where it stands."""
    import gradio as gr

    from kohya_like import app, form, presets
    from sd_scripts.schema import docs

    with tempfile.TemporaryDirectory() as folder:
        context = app.make_context(Path(folder), (), is_private=True)
        page = app.make_app(context)
        assert isinstance(page, gr.Blocks)
        yield "the page", json.dumps(page.get_config_file(), default=str)
        yield "the page's form", form.schema_json()
        yield "the presets", str(presets.available(Path(folder)))
        app.own_routes(context)
        context.predictions.close()
        context.supervisor.close()
    yield "the reference of options", docs.page()


def main() -> None:
    name, label, *scripts = sys.argv[1:]
    wrong = [*imports(), *dry_runs()]
    # Another family may say that it has this one's VAE: of its label only what is nothing but that counts.
    words = [rf"(?<![\w-]){re.escape(each)}(?![\w-])" for each in (name, *scripts)] + [
        re.escape(json.dumps(label)),
        f">{re.escape(label)}<",
    ]
    for place, text in texts():
        found = re.finditer("|".join(words), text)
        wrong += [f"{place} still has {each[0]}: …{text[max(0, each.start() - 60) : each.end() + 60]}…" for each in found][:3]
    from sd_scripts.toy import demo

    if not demo.PRESET.is_file():
        wrong.append(f"the demo's preset {demo.PRESET} is not there")
    print("\n".join([*wrong, demo.FAMILY]))


main()
