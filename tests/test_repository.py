"""What holds for the repository as a whole: its layers, its scripts, its files and what may not be written in them."""

import ast
import functools
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sd_scripts.families import TOOLS
from tests import mutants
from tests.forked import forked

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = (
    ["gui.py", "kohya_like", "sd_scripts", "presets", "tests", "docs", ".ci/run", "setup.sh", "setup.ps1"]
    + ["requirements.txt", "requirements-test.txt", "pyproject.toml"]
    + ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
)
LARGEST_FILE_BYTES = 9 * 2**20
ALL_FILES_BYTES = 56 * 2**20
# Extra packages a user may install; the code that imports one says so when it is missing.
OPTIONAL = {
    "pillow_jxl",
    "prodigyopt",
    "pytorch_optimizer",
    "bitsandbytes",
    "spaces",
    "torchao",
    "wandb",
    "tensorboard",
    "triton",
    "datasets",
    "gguf",
    "onnxruntime",
}
# The server under the studio; the exact pin of gradio decides its version.
COMES_WITH_GRADIO = {"fastapi", "starlette", "uvicorn", "httpx", "orjson"}
PACKAGES = ("sd_scripts", "kohya_like")
HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate")


# --- reading the repository -----------------------------------------------------------------------------------------


def tracked() -> list[Path]:
    """Files that belong to the project; everything but caches where git is not there to ask."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, encoding="utf-8")
    if done.returncode == 0 and done.stdout:
        names = [Path(name) for name in done.stdout.split("\0") if name]
    else:
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = [path for path in found if not any(part.startswith(".") or part == "__pycache__" for part in path.parts[:-1])]
    return sorted(name for name in names if (ROOT / name).is_file())


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]
TEXTS = [
    path for path in FILES if path.suffix in {".py", ".md", ".toml", ".sh", ".ps1", ".js", ".css", ".html", ".yaml", ".yml", ".txt", ".cfg"}
]
TEXTS += [path for path in FILES if path.suffix == "" and path.name != "LICENSE"]
# Libraries of others are kept as they were released.
TEXTS = [path for path in TEXTS if "vendor" not in path.parts]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """Trees of a thousand files are kept while the tests here run; looking through them for garbage took longer than parsing them."""
    gc.disable()
    yield
    tree.cache_clear()
    nodes.cache_clear()
    gc.enable()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(read(path), filename=str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, also inside functions; `from a import b` names a and a.b."""
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from named(path, node)


def named(path: Path, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    package = path.parent.parts[: len(path.parent.parts) - node.level + 1] if node.level else ()
    module = ".".join([*package, *([node.module] if node.module else [])])
    yield module
    yield from (f"{module}.{alias.name}" for alias in node.names)


def loaded_by(path: Path) -> Iterator[str]:
    """The modules among `imports` that are there once the file is imported: none for types alone, in functions, or of a program's start."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif isinstance(node, ast.If):
                if not {"TYPE_CHECKING", "__name__"} & {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}:
                    yield from statements(node.body)
                yield from statements(node.orelse)
            elif isinstance(node, ast.Try | ast.With):
                yield from statements(node.body)

    for node in statements(tree(path).body):
        yield from named(path, node)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach themselves, those that reach one another together."""

    def reached(start: str) -> set[str]:
        found, left = set(), [start]
        while left:
            new = graph.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    reach = {name: reached(name) for name in graph}
    return sorted({tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph if name in reach[name]})


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def dotted(node: ast.AST) -> str:
    """The name that an expression like a.b.c spells; empty for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def python_under(folder: str) -> list[Path]:
    return [path for path in PYTHON if path.is_relative_to(folder)]


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_top_level_is_complete():
    assert [name for name in TOP_LEVEL if not (ROOT / name).exists()] == []


def test_nothing_else_lies_at_the_top_level():
    hidden = {".ci", ".dockerignore", ".gitattributes", ".gitignore"}
    assert {path.parts[0] for path in FILES} - {name.partition("/")[0] for name in TOP_LEVEL} - hidden - {"Dockerfile"} == set()


def test_all_files_together_are_not_large():
    assert sum((ROOT / path).stat().st_size for path in FILES) <= ALL_FILES_BYTES


def test_no_file_is_large():
    assert [(str(path), size) for path in FILES if (size := (ROOT / path).stat().st_size) > LARGEST_FILE_BYTES] == []


def test_no_file_is_a_link():
    assert [str(path) for path in FILES if (ROOT / path).is_symlink()] == []


def test_every_python_file_parses():
    for path in PYTHON:
        tree(path)


def test_texts_name_no_machine_no_registry_and_no_unfinished_work():
    # Put together here, so that this file does not name them either.
    forbidden = {
        "a path of one machine": rf"(?<![\w.~])/({'|'.join(['wo' + 'rk', 'fa' + 'rm'])})/",
        "the host of a registry": "|".join(
            ["py" + r"pi\.org", "python" + r"hosted\.org", r"download\.py" + r"torch\.org", r"npm" + r"js\.(org|com)"]
        ),
        "unfinished work": rf"\b({'|'.join(['TO' + 'DO', 'FIX' + 'ME', 'X' * 3])})\b",
        "a conflict": "^" + "<" * 7 + " ",
    }
    found = []
    for path in TEXTS:
        for number, line in enumerate(read(path).splitlines(), start=1):
            found += [f"{path}:{number}: {what}: {line.strip()[:80]}" for what, pattern in forbidden.items() if re.search(pattern, line)]
    assert found == []


def test_links_between_documents_lead_somewhere():
    broken = []
    for path in FILES:
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", read(path), flags=re.DOTALL)):
            if not re.match(r"[a-z]+:|#", target) and not (ROOT / path.parent / target.partition("#")[0]).exists():
                broken.append(f"{path}: {target}")
    assert broken == []


# --- what code may not do -------------------------------------------------------------------------------------------


def dangers(path: Path) -> Iterator[str]:
    """What a file does that no file here may do, with line numbers."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in {"os.system", "os.popen", "pickle.load", "pickle.loads", "torch.load", "eval", "exec"}:
                yield f"{path}:{node.lineno}: {name}"
            if any(word.arg == "allow_pickle" for word in node.keywords):
                yield f"{path}:{node.lineno}: {name} with allow_pickle"
            if any(
                word.arg == "shell" and not (isinstance(word.value, ast.Constant) and word.value.value is False) for word in node.keywords
            ):
                yield f"{path}:{node.lineno}: {name} with a shell"
        elif isinstance(node, ast.ImportFrom) and node.module in {"pickle", "os"}:
            if bad := {alias.name for alias in node.names} & {"load", "loads", "system", "popen"}:
                yield f"{path}:{node.lineno}: {sorted(bad)} from {node.module}"
        elif isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{path}:{node.lineno}: bare except"
            elif dotted(node.type) in {"Exception", "BaseException"} and all(isinstance(line, ast.Pass) for line in node.body):
                yield f"{path}:{node.lineno}: every exception is passed over"


def test_no_shell_no_pickle_no_eval_and_no_error_passed_over():
    assert [line for path in PYTHON for line in dangers(path)] == []


@pytest.mark.parametrize(
    "code",
    ["import os\nos.system('ls')", "f(shell=True)", "torch.load(p)", "from pickle import loads", "eval(x)", "try: f()\nexcept: g()"]
    + ["try: f()\nexcept Exception: pass", "np.load(p, allow_pickle=True)"],
)
def test_the_search_for_dangers_finds_them(code, tmp_path):
    file = tmp_path / "file.py"
    file.write_text(code, encoding="utf-8")
    assert len(list(dangers(file))) == 1


def test_tests_are_skipped_for_missing_hardware_only():
    found = []
    for path in python_under("tests"):
        source = read(path)
        for node in nodes(path):
            if not isinstance(node, ast.Attribute) or node.attr not in {"skip", "skipif", "xfail", "importorskip"}:
                continue
            line = source.splitlines()[node.lineno - 1]
            if dotted(node).startswith("pytest") and not re.search(
                r"cuda|gpu|nvml|hip\b|mps|namespaces|mounted|slurm|node", line, re.IGNORECASE
            ):
                found.append(f"{path}:{node.lineno}: {line.strip()}")
    assert found == []


def test_tests_draw_from_the_seed_of_the_run():
    """A draw that the system gives comes only once: nobody sees the failed test again. See tests/conftest.py."""
    unseeded = re.compile(r"default_rng\(\)|random\.Random\(\)|SystemRandom|\.seed\(\)|import secrets|urandom|from random import")
    paths = [path for path in python_under("tests") if path.name not in ("conftest.py", Path(__file__).name)]
    assert [f"{path}: {line.strip()}" for path in paths for line in read(path).splitlines() if unseeded.search(line)] == []


def test_draws_come_from_generators_of_a_seed_a_number_and_a_stream():
    """See sd_scripts/dataset/draws.py and sd_scripts/library/core/rng.py; what trains toys has a seed of its own."""
    own = re.compile(r"default_rng|RandomState|Generator\([^)]*\)\.manual_seed\(\d|random\.Random\(\d")
    paths = [path for top in ("sd_scripts", "kohya_like") for path in python_under(top) if "toy" not in path.parts]
    assert [f"{path}: {line.strip()}" for path in paths for line in read(path).splitlines() if own.search(line)] == []


# --- layers ---------------------------------------------------------------------------------------------------------

ENGINE = "sd_scripts.library"
FAMILIES = "sd_scripts.families"
# What of a family loads no torch: everybody may import it.
LIGHT = re.compile(r"sd_scripts\.families(\.[A-Z]+|\.\w+|\.\w+\.(options|facts|tools|predict_options)(\..*)?)?")
# Which files, and what they may not import.
RULES: list[tuple[str, tuple[str, ...]]] = [
    ("kohya_like", (*HEAVY, ENGINE, FAMILIES)),
    ("gui.py", (*HEAVY, ENGINE, FAMILIES)),
    ("kohya_like/monitor.py", ("gradio",)),
    ("kohya_like/dataset_view.py", ("gradio",)),
    ("sd_scripts", ("gradio", "kohya_like")),
    ("sd_scripts/schema", (*HEAVY, ENGINE, FAMILIES)),
    ("sd_scripts/programs", (*HEAVY, ENGINE, FAMILIES)),
    ("sd_scripts/dataset", (*HEAVY, ENGINE, FAMILIES)),
    ("sd_scripts/runs", (*HEAVY, ENGINE, FAMILIES)),
    ("sd_scripts/doctor.py", (*HEAVY, ENGINE)),
    ("sd_scripts/library", (f"{ENGINE}.train.launch",)),
    (
        "sd_scripts/library/core",
        tuple(f"{ENGINE}.{room}" for room in ("train", "memory", "parallel", "adapters", "data", "objectives", "render", "tools")),
    ),
    ("sd_scripts/library/train/trainer.py", (FAMILIES, *(f"{ENGINE}.{room}" for room in ("objectives", "adapters")))),
    ("sd_scripts/library/objectives", tuple(f"{ENGINE}.{room}" for room in ("adapters", "data", "train"))),
]


@pytest.mark.parametrize(("where", "forbidden"), RULES, ids=[rule[0] for rule in RULES])
def test_layers_import_only_downwards(where, forbidden):
    files = python_under(where)
    assert files, f"{where} is not there; the rule has to follow the code"
    named = {(path, module) for path in files for module in imports(path) if not LIGHT.fullmatch(module)}
    found = {f"{path} imports {module}" for path, module in named for package in forbidden if is_under(module, package)}
    assert sorted(found) == []


def test_modules_load_one_another_in_no_circle():
    files = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for top in PACKAGES for path in python_under(top)}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found = {module for module in loaded_by(path) if module in files and module != name}
        # `from . import b` asks for b, not for what the package gathers.
        graph[name] = {module for module in found if not any(other.startswith(f"{module}.") for other in found)}
    assert sum(map(len, graph.values())) > 1000 and circles(graph) == []


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [("b", "c"), ("d",)]


@pytest.mark.parametrize("top", PACKAGES)
def test_no_two_public_classes_have_one_name(top):
    """Families have the same classes in the same files."""
    places: dict[str, list[str]] = {}
    for path in python_under(top):
        if not path.is_relative_to("sd_scripts/families"):
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path))
    assert len(places) > 20 and {name: where for name, where in places.items() if len(where) > 1} == {}


FAMILY_NAMES = re.compile(r"sdxl|flux|qwen|z.?image|ddpm|lgt|(?<![\w./-])sd(?![\w-])|(?<![A-Za-z])(?-i:Sd[A-Z])", re.IGNORECASE)
OTHER_PROGRAMS = Path("sd_scripts/schema/kohya_words.py")
"""What other programs call models: the one file that may name them, also those that are not trained here."""
PROGRAMS = Path("sd_scripts/programs")
"""Beside it each program's own module, where it has names of models; what they share names none."""


def words(path: Path) -> Iterator[str]:
    """Identifiers and strings of a Python file, and its name."""
    yield path.stem
    for node in nodes(path):
        for name in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(found := getattr(node, name, None), str):
                yield found.replace("sd_scripts", "").replace("qwen_image_finetune", "")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"sd[_-]scripts", "", node.value)


def test_no_file_outside_the_families_names_one():
    """What a family is stands in its folder. Comments are free."""
    folders = ("sd_scripts/schema", "sd_scripts/dataset", "sd_scripts/runs", "sd_scripts/library", "sd_scripts/programs", "kohya_like")
    naming = {str(path) for folder in folders for path in python_under(folder) if any(FAMILY_NAMES.search(word) for word in words(path))}
    others = [
        path for path in FILES if path.parts[0] == "kohya_like" and path.suffix in {".js", ".css", ".toml"} and "vendor" not in path.parts
    ]
    naming |= {str(path) for path in others if FAMILY_NAMES.search(f"{path.name} {read(path)}")}
    models = {str(path) for path in python_under(str(PROGRAMS)) if any(word == "MODELS" for word in words(path))}
    assert models and naming == {str(OTHER_PROGRAMS)} | models


COMMON = "sd_scripts.families.common"


def definitions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """The names that a file defines at its top level, with what defines them."""
    for node in tree(path).body:
        for named_so in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
            if isinstance(name := getattr(named_so, "id", None) or getattr(named_so, "name", None), str):
                yield name, node


def used(path: Path, node: ast.AST, known: Collection[str]) -> set[str]:
    """Which of these dotted names a part of a file uses, its own or imported ones."""
    package, here = path.parent.parts, ".".join(path.with_suffix("").parts)
    spelled = {}
    for each in nodes(path):
        if isinstance(each, ast.ImportFrom):
            start = package[: len(package) - each.level + 1] if each.level else ()
            module = ".".join([*start, *([each.module] if each.module else [])])
            spelled |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in each.names}
    found = set()
    for each in ast.walk(node):
        first, _, rest = dotted(each).partition(".")
        found.add(f"{spelled.get(first, f'{here}.{first}')}{rest and '.'}{rest}")
    return found & set(known)


def test_what_families_have_in_common_two_of_them_use():
    """Or the engine, which knows none of them. What only one family needs stands in its folder."""
    common = {
        f"{'.'.join(path.with_suffix('').parts)}.{name}": (path, node)
        for path in python_under(COMMON.replace(".", "/"))
        for name, node in definitions(path)
    }
    needs = {name: used(path, node, common) for name, (path, node) in common.items()}
    users: dict[str, set[str]] = {name: set() for name in common}
    for path in python_under("sd_scripts"):
        if is_under(".".join(path.parts), COMMON) or path.parts[1] == "toy":
            continue
        who = path.parts[2] if path.parts[1] == "families" else "the engine"
        left = used(path, tree(path), common)
        while left:
            name = left.pop()
            if who not in users[name]:
                users[name].add(who)
                left |= needs[name]
    lonely = {name: sorted(who) for name, who in users.items() if len(who) < 2 and "the engine" not in who and "._" not in name}
    assert len(common) > 150 and lonely == {}


def test_families_know_one_another_through_what_is_common_alone():
    folders = [path.parent for path in python_under("sd_scripts/families") if path.name == "facts.py"]
    assert len(folders) > 1
    found = {
        f"{path} imports {module}"
        for folder in folders
        for path in python_under(str(folder))
        for module in imports(path)
        for other in folders
        if other != folder and is_under(module, ".".join(other.parts))
    }
    assert sorted(found) == []


def test_relative_imports_are_seen_by_the_layer_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.py").write_text("from . import d\nfrom ..e import f\n\ndef g():\n    import torch.nn\n", encoding="utf-8")
    assert set(imports(Path("a/b/c.py"))) == {"a.b", "a.b.d", "a.e", "a.e.f", "torch.nn"}


LOADING = (
    (("sd_scripts.schema", "sd_scripts.schema.runs"), (*HEAVY, "gradio", "kohya_like", "numpy")),
    (
        ("sd_scripts.families", *(path.with_suffix("").as_posix().replace("/", ".") for path in python_under("sd_scripts/runs"))),
        (*HEAVY, "gradio", "kohya_like"),
    ),
    (("sd_scripts.dataset.plan", "sd_scripts.dataset.scan"), (*HEAVY, "gradio")),
    (("kohya_like.app",), HEAVY),
)
"""Modules, and what is not there once they are imported; each row may load all that those above it may."""


def test_a_fresh_process_does_not_load_what_a_layer_may_not_know():
    code = """import importlib, json, sys
told = set()
for modules, absent in json.loads(sys.argv[1]):
    for module in modules:
        importlib.import_module(module)
        for name in set(absent) & set(sys.modules) - told:
            told.add(name)
            print("FOUND", module, "loads", name)
print("DONE")"""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(LOADING)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("FOUND", "DONE"))] == ["DONE"]


def import_trainer(said: str) -> None:
    importlib.import_module("sd_scripts.library.train.trainer")
    Path(said).write_text(str([name for name in ("gradio", "kohya_like") if name in sys.modules]))


def test_a_process_that_trains_does_not_load_the_page(tmp_path):
    """Forked from a server that has nothing but the libraries and a session in it."""
    process = forked(import_trainer, str(tmp_path / "said"))
    process.join(120)
    assert process.exitcode == 0 and (tmp_path / "said").read_text() == "[]"


# --- thin scripts ---------------------------------------------------------------------------------------------------


def shape(path: Path) -> str:
    """The syntax of a file with every string emptied."""
    parsed = ast.parse(read(path))
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(parsed)


SCRIPTS = {
    "training": [path for path in PYTHON if path.parent == Path("sd_scripts") and "_train" in path.stem],
    "tools": [path for path in PYTHON if path.parent == Path("sd_scripts/networks")],
    "drawing tools": [Path("sd_scripts/ddpm_sample.py"), Path("sd_scripts/lgt_infer.py")],
    "image tools": [Path(f"sd_scripts/{name}.py") for name in ("caption", "mask", "faces", "duplicates", "rate")],
}


@pytest.mark.parametrize(
    ("kind", "example"), [("training", "sd_scripts/sdxl_train_network.py"), ("tools", "sd_scripts/networks/merge_lora.py")]
)
def test_scripts_of_a_kind_differ_in_their_strings_only(kind: str, example: str):
    scripts = SCRIPTS[kind]
    assert Path(example) in scripts
    first = shape(scripts[0])
    assert [str(path) for path in scripts if shape(path) != first] == []
    assert [str(path) for path in scripts if len(read(path).splitlines()) > 25] == []


def test_every_tool_has_its_script_and_every_script_its_tool():
    assert {Path("sd_scripts") / tool.script for tool in TOOLS.values()} == {
        *(path for kind in ("tools", "drawing tools", "image tools") for path in SCRIPTS[kind])
    }


# --- requirements ---------------------------------------------------------------------------------------------------


def requirements(name: str) -> list[Requirement]:
    lines = (line.split("#", 1)[0].strip() for line in read(Path(name)).splitlines())
    return [Requirement(line) for line in lines if line]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-test.txt"])
def test_every_requirement_has_both_bounds_and_stands_once(name):
    needs = requirements(name)
    names = [canonicalize_name(need.name) for need in needs]
    assert [found for found in names if names.count(found) > 1] == []
    assert [
        str(need) for need in needs if not {"=="} <= (signs := {item.operator for item in need.specifier}) and not {">=", "<"} <= signs
    ] == []


def test_what_the_product_imports_is_required():
    provided = packages_distributions()
    needed = {canonicalize_name(need.name) for need in requirements("requirements.txt")}
    ours = {"kohya_like", "sd_scripts", "gui"}
    missing = set()
    for path in [*python_under("kohya_like"), *python_under("sd_scripts"), *python_under("gui.py")]:
        for module in {module.partition(".")[0] for module in imports(path)}:
            if module in sys.stdlib_module_names or module in ours | OPTIONAL | COMES_WITH_GRADIO | {"__future__"}:
                continue
            if not needed & {canonicalize_name(name) for name in provided.get(module, [])}:
                missing.add(f"{path} imports {module}")
    assert sorted(missing) == []


def test_the_package_says_the_same_as_its_papers():
    project = tomllib.loads(read(Path("pyproject.toml")))["project"]
    assert project["license"] == "Apache-2.0" and "Apache License" in read(Path("LICENSE"))
    assert f"\n## {project['version']} " in read(Path("CHANGELOG.md"))
    assert project["requires-python"] == ">=3.11,<3.14"


# --- known faults ---------------------------------------------------------------------------------------------------


def test_every_known_fault_can_be_put_into_the_program_and_has_tests_that_are_meant_to_notice_it() -> None:
    stale = []
    for fault in mutants.faults():
        try:
            fault.applied((ROOT / fault.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            stale.append(str(err))
    assert stale == []
    tests = {fault.file: mutants.tests_for(fault.file) for fault in mutants.faults()}
    assert all(tests.values()) and [name for names in tests.values() for name in names if not (ROOT / name).exists()] == []
    assert [place for places in mutants.AREAS.values() for place in places if not (ROOT / place).exists()] == []


def test_nobody_outside_a_family_asks_for_the_class_of_options():
    """What a run has is said by its options: a fact, a property, a composed part."""
    asks = re.compile(r"isinstance\([^()]*?,\s*[^()]*Options\b|\" (?:not )?in type\([^()]*\)\.model_fields")
    allowed = {"sd_scripts/library/memory/forecast/fitting.py": 1}
    found = {
        path.relative_to(ROOT).as_posix(): len(asks.findall(path.read_text(encoding="utf-8")))
        for folder in ("sd_scripts", "kohya_like")
        for path in (ROOT / folder).rglob("*.py")
        if "families" not in path.parts
    }
    assert {name: number for name, number in found.items() if number} == allowed
