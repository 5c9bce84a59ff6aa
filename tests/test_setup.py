"""The installer and the doctor: run for real, on small wheels made here, so that no network is needed."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pynvml
import pytest

from sd_scripts import doctor
from sd_scripts.doctor import Card, Torch

ROOT = Path(__file__).resolve().parent.parent
SUB_COMMANDS = ("install", "gui", "demo", "toys", "test", "doctor")
BASH = shutil.which("bash") or "bash"
# Says what it was called with; stands in for the tools that `setup.sh test` starts.
ECHO = (
    "import json, os, sys\nprint(json.dumps([NAME, sys.argv[1:], os.environ.get('OMP_NUM_THREADS'), os.environ.get('HF_HUB_OFFLINE')]))\n"
)


# --- a small project ------------------------------------------------------------------------------------------------


def write_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), main: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{name}/__main__.py": main,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


class Project:
    """A copy of the installer with small requirements, in a folder whose name has spaces."""

    def __init__(self, parent: Path):
        self.folder, self.elsewhere, self.wheels = parent / "a folder", parent / "elsewhere", parent / "wheels"
        for folder in (self.folder, self.elsewhere, self.wheels):
            folder.mkdir()
        for name in ("setup.sh", ".gitignore"):
            shutil.copy(ROOT / name, self.folder)
        (self.folder / "requirements.txt").write_text("torch==2.13.0\nsmall>=1,<2\n", encoding="utf-8")
        (self.folder / "requirements-test.txt").write_text("ruff\nmypy\npytest\n", encoding="utf-8")
        (self.folder / "tests").mkdir()
        for name in ("__main__", "campaign", "mutants", "trees"):
            shutil.copy(ROOT / "tests" / f"{name}.py", self.folder / "tests")
        (self.folder / "tests" / "test_something.py").touch()
        (self.folder / "gui.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n", encoding="utf-8")
        for version in ("2.12.0", "2.13.0", "2.14.0"):
            write_wheel(self.wheels, "torch", version)
        write_wheel(self.wheels, "small", "1.5")
        write_wheel(self.wheels, "small", "2.0")
        write_wheel(self.wheels, "needy", "1.0", requires=("torch",))
        for tool in ("ruff", "mypy", "pytest"):
            write_wheel(self.wheels, tool, "1.0", main=ECHO.replace("NAME", repr(tool)))

    def run(self, *arguments: str, wheels: bool = True, **extra: str) -> subprocess.CompletedProcess[str]:
        """Runs the installer from another folder; without wheels every call of pip must fail."""
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name not in ("TORCH_SPEC", "PYTHONPATH")
        }
        env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
        if wheels:
            env["PIP_FIND_LINKS"] = str(self.wheels)
        env |= extra
        return subprocess.run(
            [BASH, str(self.folder / "setup.sh"), *arguments], cwd=self.elsewhere, env=env, capture_output=True, text=True, timeout=300
        )

    def installed(self, name: str) -> str:
        """The version of a package in the project's environment; empty when it is not there."""
        found = list((self.folder / ".venv").glob(f"lib/python*/site-packages/{name}-*.dist-info"))
        return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else ""

    def snapshot(self) -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in (self.folder / ".venv").rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Project:
    """A project on which install ran once; tests leave it as they find it."""
    project = Project(tmp_path_factory.mktemp("set-up"))
    done = project.run("install")
    assert done.returncode == 0, done.stderr
    assert "Making .venv with Python 3." in done.stdout
    return project


@pytest.fixture
def copy(made, tmp_path) -> Project:
    """A project of one's own that is installed already."""
    project = Project(tmp_path)
    shutil.copytree(made.folder / ".venv", project.folder / ".venv", symlinks=True)
    return project


@pytest.fixture
def tools(tmp_path) -> Path:
    """A folder for PATH with just what setup.sh calls, on a machine that says it is Linux."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "grep", "id", "mv", "rm", "sed"):
        (folder / name).symlink_to(shutil.which(name) or name)
    write_program(folder / "uname", 'if [ "${1:-}" = -m ]; then echo "${MACHINE:-x86_64}"; else echo "${SYSTEM:-Linux}"; fi')
    return folder


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!{BASH}\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


# --- the installer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["setup.sh", ".ci/run"])
def test_shell_scripts_parse_and_may_be_executed(script):
    assert subprocess.run([BASH, "-n", str(ROOT / script)], capture_output=True).stderr == b""
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_every_sub_command(flag):
    done = subprocess.run([BASH, str(ROOT / "setup.sh"), flag], capture_output=True, text=True)
    assert done.returncode == 0
    assert [name for name in SUB_COMMANDS if f"\n  {name} " not in done.stdout] == []
    assert "TORCH_SPEC" in done.stdout and "PYTHON" in done.stdout


def test_the_windows_twin_knows_the_same_sub_commands():
    text = (ROOT / "setup.ps1").read_text(encoding="utf-8")
    assert [name for name in SUB_COMMANDS if f'    "{name}" {{' not in text] == []


@pytest.mark.parametrize("arguments", [["trian"], ["install", "--fast"]])
def test_an_unknown_word_gets_a_sentence_and_exit_code_2(arguments):
    done = subprocess.run([BASH, str(ROOT / "setup.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr and done.stdout == ""


def test_install_works_from_another_folder_and_in_a_path_with_spaces(made):
    assert (made.installed("torch"), made.installed("small")) == ("2.13.0", "1.5")
    assert list(made.elsewhere.iterdir()) == []


def test_a_second_install_calls_no_pip_and_changes_nothing(made):
    before = made.snapshot()
    done = made.run("install", wheels=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Everything is installed, nothing to do.")
    assert made.snapshot() == before


def test_a_changed_requirement_is_installed_and_torch_is_not_replaced(copy):
    with (copy.folder / "requirements.txt").open("a", encoding="utf-8") as file:
        file.write("needy>=1,<2\n")
    failed = copy.run("install", wheels=False)
    assert failed.returncode == 1
    assert "pip could not install requirements.txt" in failed.stderr and "again to go on" in failed.stderr
    done = copy.run()
    assert done.returncode == 0, done.stderr
    assert (copy.installed("needy"), copy.installed("torch")) == ("1.0", "2.13.0")


def test_torch_spec_overrides_the_pin_and_is_remembered(copy):
    failed = copy.run("install", TORCH_SPEC="torch==2.99.0")
    assert failed.returncode == 1 and "pip could not install 'torch==2.99.0'" in failed.stderr
    done = copy.run("install", TORCH_SPEC="torch==2.12.0 --no-cache-dir")
    assert done.returncode == 0 and "because TORCH_SPEC says so" in done.stdout
    assert copy.installed("torch") == "2.12.0"
    assert "nothing to do" in copy.run("install", wheels=False).stdout
    assert "when .venv was made" in copy.run("install", "--dry_run").stdout
    assert copy.run("install", TORCH_SPEC="torch==2.13.0").returncode == 0
    assert copy.installed("torch") == "2.13.0"
    assert "nothing to do" in copy.run("install", wheels=False).stdout


def test_an_environment_that_does_not_start_is_made_again(tmp_path):
    project = Project(tmp_path)
    binaries = project.folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(tmp_path / "gone")
    done = project.run("install")
    assert done.returncode == 0, done.stderr
    assert project.installed("torch") == "2.13.0"


def test_a_python_that_does_not_start_gets_a_sentence(tmp_path):
    done = Project(tmp_path).run("install", PYTHON=str(tmp_path / "gone"))
    assert done.returncode == 1
    assert "does not start" in done.stderr


@pytest.mark.parametrize(
    ("given", "sentence"), [(True, "is Python 3.9.1"), (False, "no Python 3.11, 3.12 or 3.13 found (python3 is 3.9.1)")]
)
def test_an_old_python_gets_a_sentence_with_its_version(tmp_path, tools, given, sentence):
    write_program(tools / "python3", "echo 3.9.1")
    project = Project(tmp_path)
    done = project.run("install", PATH=str(tools), PYTHON=str(tools / "python3") if given else "")
    assert done.returncode == 1
    assert sentence in done.stderr
    assert not (project.folder / ".venv").exists()


def test_another_python_than_the_one_of_the_environment_is_not_taken_silently(made, tmp_path):
    other = "3.12.99" if sys.version_info[:2] != (3, 12) else "3.13.99"
    write_program(tmp_path / "python", f"echo {other}")
    done = made.run("install", PYTHON=str(tmp_path / "python"))
    assert done.returncode == 1
    assert other in done.stderr and "delete the folder .venv" in done.stderr


@pytest.mark.parametrize(
    ("driver", "rocm", "system", "reason"),
    [
        (True, False, "Linux", "an NVIDIA driver answers"),
        (False, True, "Linux", "ROCm is here"),
        (False, False, "Linux", "no GPU is found"),
        (False, False, "Darwin", "Intel Macs"),
    ],
)
def test_dry_run_says_which_torch_and_why_and_changes_nothing(tmp_path, tools, driver, rocm, system, reason):
    project = Project(tmp_path)
    if driver:
        write_program(tools / "nvidia-smi", 'echo "GPU 0: some card"')
    roots = {"ROCM_PATH": str(tmp_path if rocm else tmp_path / "gone"), "SYSTEM": system}
    done = project.run("install", "--dry_run", PATH=str(tools), **roots)
    assert done.returncode == 0, done.stderr
    assert "Taking torch==2.13.0" in done.stdout and reason in done.stdout
    assert not (project.folder / ".venv").exists()


def test_a_driver_that_fails_is_no_gpu(tmp_path, tools):
    write_program(tools / "nvidia-smi", "exit 9")
    done = Project(tmp_path).run("install", "--dry_run", PATH=str(tools), ROCM_PATH=str(tmp_path / "gone"))
    assert "no GPU is found" in done.stdout


def test_gui_gets_its_arguments_untouched(made):
    done = made.run("gui", "--server_port", "7861", "two words", wheels=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["--server_port", "7861", "two words"]


def test_test_runs_style_types_and_tests_in_one_go(made):
    done = made.run("test", "-k", "two words")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [(name, arguments) for name, arguments, _, _ in calls] == [
        ("ruff", ["check", "."]),
        ("ruff", ["format", "--check", "."]),
        ("mypy", []),
        ("pytest", ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not long", "-k", "two words"]),
    ]
    assert {(threads, offline) for _, _, threads, offline in calls} == {("1", "1")}
    whole = json.loads(made.run("test", "--all", "-k", "two", wheels=False).stdout.splitlines()[-1])
    assert whole[:2] == ["pytest", ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "", "-k", "two"]]


def test_campaigns_go_on_where_they_were_stopped(made):
    """What has passed on a tree is not run again on the same."""
    subprocess.run(["git", "init", "-q"], cwd=made.folder, check=True)
    called = [
        "pytest",
        ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q", "-p", "no:cacheprovider", "-m", "", "tests/test_something.py"],
    ]
    for calls in (1, 0):
        said = made.run("test", "--all").stdout
        assert [json.loads(line)[:2] for line in said.splitlines() if line.startswith('["pytest"')] == [called] * calls
        assert "1 of 1 passed" in said
    (made.folder / "tests" / "test_something.py").write_text("# changed\n")
    assert '["pytest"' in made.run("test", "--all", "tests").stdout
    assert "no folders with tests" in made.run("test", "--all", "elsewhere").stderr


def test_a_folder_is_tested_ten_times_while_others_compute(made):
    subprocess.run(["git", "init", "-q"], cwd=made.folder, check=True)
    called = ["pytest", ["-q", "-p", "no:cacheprovider", "-m", "not long", "tests/test_something.py"]]
    for calls in (10, 0):
        said = made.run("test", "--busy").stdout
        assert [json.loads(line)[:2] for line in said.splitlines() if line.startswith('["pytest"')] == [called] * calls
        assert "10 of 10 passed" in said


def test_doctor_before_install_says_what_to_run(tmp_path):
    done = Project(tmp_path).run("doctor")
    assert done.returncode == 1
    assert "bash setup.sh install" in done.stderr


@pytest.mark.parametrize("browser", [True, False])
def test_ci_calls_exactly_the_test_command(tmp_path, tools, browser):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "setup.sh").write_text('echo "setup.sh $*"\n', encoding="utf-8")
    if browser:
        write_program(tools / "chromium", "exit 0")
    done = subprocess.run([BASH, str(tmp_path / ".ci" / "run")], env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "setup.sh test"
    assert ("Chromium is missing" in done.stdout) != browser


# --- the doctor -----------------------------------------------------------------------------------------------------

CPU = Torch("2.13.0+cpu", cuda=None, hip=None, available=False, devices=(), mps=False, threads=4, bf16=False)
CUDA = replace(CPU, version="2.13.0", cuda="13.0")
WORKING = replace(CUDA, available=True, bf16=True, devices=({"name": "card", "gib": 24.0, "capability": [8, 9]},))
NO_DRIVER = "no NVIDIA driver answers"


def run_doctor(*arguments: str, torch: str | None = None, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if torch is not None and folder is not None:
        (folder / "torch.py").write_text(torch, encoding="utf-8")
        env["PYTHONPATH"] = str(folder)
    return subprocess.run(
        [sys.executable, "-m", "sd_scripts.doctor", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def levels(findings: list[doctor.Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_doctor_finds_this_machine_fit_and_names_the_versions():
    done = run_doctor("--test")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Training can work here." in done.stdout
    for word in ("Python 3.", "torch 2.", "diffusers ", "gradio ", "pytest ", "memory: ", "GiB free at", "webp", "toy base"):
        assert word in done.stdout, word


def test_doctor_itself_imports_no_torch():
    code = "import sys, sd_scripts.doctor as d; d.check_disks(), d.read_cards(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("torch", "sentence"),
    [
        ("raise ImportError('libcudart.so: cannot open shared object file')", "torch cannot be imported (ImportError: libcudart.so"),
        ("import os\nos.abort()", "ended the process with signal 6"),
        ("raise OSError", "torch cannot be imported (OSError"),
        ("import sys\nprint('hello')\nsys.exit(0)", "is not torch (it said 'hello')"),
    ],
)
def test_doctor_survives_a_broken_torch_and_says_so(tmp_path, torch, sentence):
    done = run_doctor(torch=torch, folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert sentence in done.stdout.partition("What will not work")[2]
    assert "Training cannot work before the errors are mended." in done.stdout


def test_a_torch_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = doctor.probe_torch(timeout_seconds=1.0)
    assert isinstance(said, str) and "still loading after 1 s" in said


def test_packages_outside_their_range_are_named_with_what_to_do():
    there = {"torch": "2.14.0", "peft": "0.20.0", "numpy": "2.4.6"}

    def installed(name: str) -> str:
        if name in there:
            return there[name]
        raise PackageNotFoundError(name)

    lines = ["torch==2.13.0", "peft==0.21.2", "numpy>=2.4,<3", "gone>=1,<2", "elsewhere>=1; python_version < '3'"]
    torch, peft, numpy, gone = doctor.check_packages(lines, installed)
    assert levels([torch, peft, numpy, gone]) == ["warn", "error", "ok", "error"]
    assert "0.20.0 is outside the tested ==0.21.2" in peft.text and "setup.sh install" in peft.text
    assert gone.text.startswith("gone is missing")


def test_a_local_build_of_the_pinned_torch_is_the_pinned_torch():
    assert levels(doctor.check_packages(["torch==2.13.0"], lambda name: "2.13.0+cpu")) == ["ok"]


def test_a_package_built_for_another_torch_is_named(tmp_path, monkeypatch):
    info = tmp_path / "torchvision-0.20.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.0\nRequires-Dist: torch==2.5.0\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    findings = doctor.check_bound_to_torch("2.13.0+cpu")
    assert [finding.level for finding in findings if "torchvision 0.20.0 was built for torch ==2.5.0" in finding.text] == ["error"]


@pytest.mark.parametrize(("found", "level"), [((3, 10, 9), "error"), ((3, 11, 0), "ok"), ((3, 13, 9), "ok"), ((3, 14, 0), "error")])
def test_python_must_be_a_tested_one(found, level):
    assert doctor.check_python(found).level == level


@pytest.mark.parametrize(
    ("torch", "cards", "sentence"),
    [
        (CPU, NO_DRIVER, "no GPU: the toy world trains in minutes on 4 threads"),
        (CPU, [Card("card")], "there is an NVIDIA GPU that this torch cannot use"),
        (CUDA, [Card("card")], "is the driver older than CUDA 13.0"),
        (replace(WORKING, bf16=False), [Card("card")], "no bfloat16"),
        (replace(WORKING, devices=({"name": "old", "gib": 4.0, "capability": [7, 5]},)), [Card("old")], "needs about 6 GiB"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_explained(torch, cards, sentence):
    notes = [finding.text for finding in doctor.check_torch(torch, cards) if finding.level == "warn"]
    assert len(notes) == 1 and sentence in notes[0]


def test_a_working_gpu_raises_no_note():
    assert set(levels(doctor.check_torch(WORKING, [Card("card")]))) == {"ok"}


def test_one_metric_that_a_driver_refuses_hides_no_other(monkeypatch):
    class Memory:
        total, free = 24 * 2**30, 6 * 2**30

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": "card",
        "nvmlDeviceGetMemoryInfo": Memory,
    }
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlSystemGetDriverVersion"):
        monkeypatch.setattr(pynvml, name, refuse)
    cards = doctor.read_cards()
    assert cards == [Card("card", total_gib=24.0, free_gib=6.0)]
    found, note = doctor.check_cards(cards)
    assert found.text == "NVIDIA GPU 0: card, 6.0 of 24.0 GiB free"
    assert note.level == "warn" and "another program" in note.text


@pytest.mark.parametrize(("free_gib", "level"), [(0.5, "error"), (5, "warn"), (200, "ok")])
def test_little_room_on_the_disk_is_told_in_time(tmp_path, free_gib, level):
    assert doctor.check_disk("project", tmp_path, int(free_gib * 2**30)).level == level


def test_the_model_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert doctor.hub_cache() == tmp_path / "hub"
    assert doctor.existing(tmp_path / "hub" / "deep") == tmp_path


def test_a_missing_toy_base_and_a_missing_browser_are_notes_with_what_to_do(tmp_path):
    base, browser = doctor.check_toy(tmp_path), doctor.check_browser(lambda name: None)
    assert base.level == browser.level == "warn"
    assert "sd_scripts.toy.build sdxl" in base.text and "apt-get install chromium" in browser.text


def test_errors_come_before_notes_in_the_report():
    text = doctor.report([doctor.warn("a note"), doctor.ok("a fact"), doctor.error("a fault")])
    assert text.index("a fact") < text.index("a fault") < text.index("a note")
    assert doctor.report([doctor.ok("a fact")]).endswith("Training can work here.")
