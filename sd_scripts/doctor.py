"""Say what is installed, which devices there are and what will not work. Changes nothing and asks no network.

`python -m sd_scripts.doctor` exits with 0 when training can work here and with 1 otherwise.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
OLDEST, FIRST_UNTESTED = (3, 11), (3, 14)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
GIB = 2**30
SETUP = "powershell -File setup.ps1" if os.name == "nt" else "bash setup.sh"

# Runs in a process of its own: a broken torch may raise, crash or hang, and the report has to survive all three.
TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
devices = []
for index in range(torch.cuda.device_count() if cuda else 0):
    card = torch.cuda.get_device_properties(index)
    devices.append({"name": card.name, "gib": card.total_memory / 2**30, "capability": [card.major, card.minor]})
mps = getattr(torch.backends, "mps", None)
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None),
    "available": cuda, "devices": devices, "mps": bool(mps and mps.is_available()), "threads": torch.get_num_threads(),
    "bf16": bool(cuda and torch.cuda.is_bf16_supported()),
}))
"""

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """One sentence of the report; "error" means that training cannot work before it is mended."""

    level: Level
    text: str


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str) -> Finding:
    return Finding("warn", text)


def error(text: str) -> Finding:
    return Finding("error", text)


@dataclass(frozen=True)
class Card:
    """What the driver says about one GPU; None where it does not say."""

    name: str
    total_gib: float | None = None
    free_gib: float | None = None
    driver: str | None = None
    celsius: int | None = None
    used_percent: int | None = None


@dataclass(frozen=True)
class Torch:
    """What torch says about itself."""

    version: str
    cuda: str | None
    hip: str | None
    available: bool
    devices: tuple[dict[str, Any], ...]
    mps: bool
    threads: int
    bf16: bool


# --- Python and packages --------------------------------------------------------------------------------------------


def check_python(found: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """Whether this Python is one that the pinned packages were tested with."""
    text = f"Python {'.'.join(map(str, found))} on {platform.system()} {platform.machine()}"
    if OLDEST <= found[:2] < FIRST_UNTESTED:
        return ok(text)
    return error(f"{text}: 3.11, 3.12 or 3.13 is needed; delete .venv and run PYTHON=/path/to/python3.12 {SETUP} install")


def wanted(file: Path) -> list[str]:
    """The requirement lines of a file, without comments."""
    lines = (line.split("#", 1)[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def check_packages(lines: Iterable[str], installed: Callable[[str], str] = version) -> list[Finding]:
    """One finding for each requirement line; another torch than the pinned one is allowed, others are not."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [error(f"the package packaging is missing, so nothing was installed here; run: {SETUP} install")]
    findings = []
    for line in lines:
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate():
            continue
        try:
            found = installed(need.name)
        except PackageNotFoundError:
            findings.append(error(f"{need.name} is missing; run: {SETUP} install"))
            continue
        if need.specifier.contains(found, prereleases=True):
            findings.append(ok(f"{need.name} {found}"))
        elif need.name == "torch":
            findings.append(warn(f"torch {found} is not the tested {need.specifier}; it may work, results are not promised"))
        else:
            findings.append(error(f"{need.name} {found} is outside the tested {need.specifier}; delete .venv and run: {SETUP} install"))
    return findings


def check_bound_to_torch(torch_version: str) -> list[Finding]:
    """Packages that were built for another torch than the one that is here, which breaks imports far away from the cause."""
    from packaging.requirements import Requirement

    findings = []
    for name in sorted({item.metadata["Name"] for item in distributions() if item.metadata["Name"]}):
        for line in distribution(name).requires or ():
            need = Requirement(line)
            if need.name != "torch" or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(torch_version, prereleases=True):
                findings.append(
                    error(f"{name} {version(name)} was built for torch {need.specifier} and torch is {torch_version}; uninstall it")
                )
    return findings


# --- torch and GPUs -------------------------------------------------------------------------------------------------


def probe_torch(timeout_seconds: float = 60.0) -> Torch | str:
    """What torch says, or in one sentence why it says nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=timeout_seconds, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"torch was still loading after {timeout_seconds:.0f} s; a driver may be hanging, a restart of the machine often helps"
    if done.returncode < 0:
        return f"loading torch ended the process with signal {-done.returncode}; delete .venv and run: {SETUP} install"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        return f"torch cannot be imported ({reason}); delete .venv and run: {SETUP} install"
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
        return Torch(**{**said, "devices": tuple(said["devices"])})
    except (IndexError, ValueError, TypeError, KeyError):
        return f"torch was imported and is not torch (it said {done.stdout.strip()[:80]!r}); is a file named torch.py in the way?"


def read_cards() -> list[Card] | str:
    """All NVIDIA GPUs as the driver lists them, or in one sentence why there are none."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is missing, so the driver was not asked"

    def ask(metric: Callable[..., Any], *arguments: object) -> Any:
        # Laptops, WSL and virtual cards refuse single metrics; one refusal must not hide the others.
        try:
            return metric(*arguments)
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        return f"no NVIDIA driver answers ({err})"
    try:
        cards = []
        for index in range(ask(pynvml.nvmlDeviceGetCount) or 0):
            handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                cards.append(Card(f"GPU {index}, which the driver cannot open"))
                continue
            memory, load = ask(pynvml.nvmlDeviceGetMemoryInfo, handle), ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
            cards.append(
                Card(
                    name=str(ask(pynvml.nvmlDeviceGetName, handle) or f"GPU {index}"),
                    total_gib=memory.total / GIB if memory else None,
                    free_gib=memory.free / GIB if memory else None,
                    driver=ask(pynvml.nvmlSystemGetDriverVersion),
                    celsius=ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
                    used_percent=load.gpu if load else None,
                )
            )
        return cards
    finally:
        ask(pynvml.nvmlShutdown)


def describe(card: Card) -> str:
    """One line about a card, leaving out what the driver does not say."""
    parts = [card.name]
    if card.total_gib is not None and card.free_gib is not None:
        parts.append(f"{card.free_gib:.1f} of {card.total_gib:.1f} GiB free")
    if card.used_percent is not None:
        parts.append(f"{card.used_percent} % busy")
    if card.celsius is not None:
        parts.append(f"{card.celsius} °C")
    if card.driver is not None:
        parts.append(f"driver {card.driver}")
    return ", ".join(parts)


def check_cards(cards: list[Card] | str) -> list[Finding]:
    """What the driver knows, and cards whose memory somebody else is using."""
    if isinstance(cards, str):
        return [ok(f"NVIDIA: {cards}")]
    findings = [ok(f"NVIDIA GPU {index}: {describe(card)}") for index, card in enumerate(cards)]
    for index, card in enumerate(cards):
        if card.total_gib and card.free_gib is not None and card.free_gib < card.total_gib / 2:
            findings.append(warn(f"GPU {index} has only {card.free_gib:.1f} of {card.total_gib:.1f} GiB free; another program is using it"))
    return findings


def check_torch(torch: Torch | str, cards: list[Card] | str) -> list[Finding]:
    """What torch can compute on, and why not on a GPU that is there."""
    if isinstance(torch, str):
        return [error(torch)]
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU, Apple GPU" if torch.mps else "CPU only"
    findings = [ok(f"torch {torch.version} is built for {build}")]
    has_card = isinstance(cards, list) and bool(cards)
    for index, device in enumerate(torch.devices):
        major, minor = device["capability"]
        findings.append(ok(f"torch sees GPU {index}: {device['name']}, {device['gib']:.1f} GiB, capability {major}.{minor}"))
        if device["gib"] < 6:
            findings.append(warn(f"GPU {index} has {device['gib']:.1f} GiB; an SDXL LoRA needs about 6 GiB with every memory saving on"))
    if torch.available and not torch.bf16:
        findings.append(warn("this GPU has no bfloat16; choose mixed_precision fp16"))
    if torch.available or torch.mps:
        return findings
    if has_card and not (torch.cuda or torch.hip):
        findings.append(
            warn(f"there is an NVIDIA GPU that this torch cannot use; set TORCH_SPEC as pytorch.org shows and run: {SETUP} install")
        )
    elif has_card:
        reason = f"is the driver older than CUDA {torch.cuda}, or CUDA_VISIBLE_DEVICES empty?"
        findings.append(warn(f"the driver answers and torch finds no GPU: {reason}"))
    else:
        findings.append(warn(f"no GPU: the toy world trains in minutes on {torch.threads} threads, a real model would take days"))
    return findings


# --- the machine ----------------------------------------------------------------------------------------------------


def hub_cache() -> Path:
    """Where huggingface_hub keeps downloaded models; the rule is its documentation's, asking the library would cost a second."""
    if value := os.environ.get("HF_HUB_CACHE"):
        return Path(value).expanduser()
    if value := os.environ.get("HF_HOME"):
        return Path(value).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_disk(what: str, path: Path, free_bytes: int) -> Finding:
    """Whether there is room at a folder; a LoRA run writes hundreds of MB, a base model 7 to 60 GB."""
    text = f"{what}: {free_bytes / GIB:.1f} GiB free at {path}"
    if free_bytes < GIB:
        return error(f"{text}; saving a run needs at least 1 GiB, make room there")
    if free_bytes < 15 * GIB:
        return warn(f"{text}; enough for LoRA files, too little for downloading a base model")
    return ok(text)


def check_disks() -> list[Finding]:
    """Room where runs, downloaded models and temporary files go."""
    folders = {"project": ROOT, "model cache": hub_cache(), "temporary files": Path(tempfile.gettempdir())}
    findings = []
    for what, path in folders.items():
        place = existing(path)
        findings.append(check_disk(what, path, shutil.disk_usage(place).free))
        if not os.access(place, os.W_OK):
            findings.append(error(f"{what}: {place} cannot be written to; change its owner or choose another folder"))
    return findings


def check_memory() -> list[Finding]:
    """Host RAM, and the shared memory that containers often keep small."""
    try:
        import psutil
    except ImportError:
        return []  # its absence is already among the packages
    memory = psutil.virtual_memory()
    text = f"memory: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    small = memory.available < 6 * GIB
    findings = [warn(f"{text}; loading SDXL needs about 8 GiB, close other programs") if small else ok(text)]
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < GIB // 4:
        findings.append(warn("shared memory (/dev/shm) is under 256 MiB, data workers may die; start the container with --shm-size=1g"))
    return findings


def check_decoders() -> list[Finding]:
    """Which of the optional image formats Pillow can read here."""
    try:
        from PIL import features
    except ImportError:
        return []  # its absence is already among the packages
    can = {
        "webp": bool(features.check("webp")),
        "avif": bool(features.check("avif")),
        "jxl": importlib.util.find_spec("pillow_jxl") is not None,
    }
    findings = [ok(f"images: jpg, png, bmp{''.join(f', {name}' for name, there in can.items() if there)} can be read")]
    advice = {"jxl": "install the package pillow-jxl-plugin into .venv if you have any"}
    for name, there in can.items():
        if not there:
            findings.append(warn(f".{name} images cannot be read; {advice.get(name, 'this build of Pillow lacks the decoder')}"))
    return findings


def check_toy(bases: Path = ROOT / "sd_scripts" / "toy" / "bases") -> Finding:
    """Whether the demo has its base."""
    families = sorted(index.parent.name for index in bases.glob("*/model_index.json") if any(index.parent.rglob("*.safetensors")))
    # That a package is missing, without which nothing is known of families, stands elsewhere in the report.
    demo = ""
    with suppress(ImportError):
        from sd_scripts.families import FACTS

        demo = next((name for name, facts in FACTS.items() if facts.demo is not None), "")
    if not demo or demo in families:
        return ok(f"toy bases: {', '.join(families)}")
    return warn(f"the demo will not work, {bases / demo} is missing; get it from git, or run: python -m sd_scripts.toy.build {demo}")


def check_browser(find: Callable[[str], str | None] = shutil.which) -> Finding:
    """Whether the browser tests have a browser."""
    path = next(filter(None, map(find, BROWSERS)), None)
    if path:
        return ok(f"browser for tests: {path}")
    return warn("the browser tests will not work: Chromium is not installed; on Debian and Ubuntu: apt-get install chromium")


# --- the report -----------------------------------------------------------------------------------------------------


def check(with_tests: bool = False) -> list[Finding]:
    """Everything that is known about this machine, in the order of the report."""
    findings = [check_python(), *check_packages(wanted(ROOT / "requirements.txt"))]
    if with_tests:
        findings += [*check_packages(wanted(ROOT / "requirements-test.txt")), check_browser()]
    torch, cards = probe_torch(), read_cards()
    findings += check_torch(torch, cards)
    if isinstance(torch, Torch) and importlib.util.find_spec("packaging"):
        findings += check_bound_to_torch(torch.version)
    return [*findings, *check_cards(cards), *check_memory(), *check_disks(), check_toy(), *check_decoders()]


def report(findings: list[Finding]) -> str:
    """The findings as text: what is there, then what will not work."""
    lines = [f"  {finding.text}" for finding in findings if finding.level == "ok"]
    errors = [f"  error: {finding.text}" for finding in findings if finding.level == "error"]
    warnings = [f"  note:  {finding.text}" for finding in findings if finding.level == "warn"]
    lines = ["Here:", *lines, "", "What will not work, or only partly:", *(errors + warnings or ["  nothing found"])]
    return "\n".join([*lines, "", "Training cannot work before the errors are mended." if errors else "Training can work here."])


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; 0 when training can work here."""
    parser = argparse.ArgumentParser(prog="python -m sd_scripts.doctor", description="Say what is installed and what will not work.")
    parser.add_argument("--test", action="store_true", help="look at the test extras and the browser too")
    findings = check(with_tests=parser.parse_args(arguments).test)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # consoles that cannot show a sign in a card's name
    print(report(findings))
    return int(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
