"""Why a run ended badly, in a sentence, and what to change: a table of what consoles and exit codes say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sd_scripts.runs.events import LastWord

Kind = Literal["", "memory", "ram", "disk", "nan", "model", "file", "images", "readers", "settings", "passing"]
"""What fixes.py can do something about; passing: what need not come back when the run is started again."""
WHY: dict[str, str] = {
    "memory": "The network, its gradients, the optimizer and the images of a batch need more memory together than the GPU has free.",
    "ram": "The model, the readers of the data set and other programs need more together than this machine has.",
    "disk": "Caches, states and saved files have filled it, or those of other programs have.",
    "nan": "The steps are too large, fp16 cannot hold the numbers, or an image of the batch is damaged.",
    "model": "The file is not the one that the settings expect, or not all of it arrived.",
    "file": "It was moved, renamed or deleted, or its disk is not there.",
    "images": "They are damaged, were not copied whole, or are no images.",
    "readers": "Background readers share memory, of which a container has little.",
    "settings": "Two settings contradict each other, or one does not fit the data or the model.",
}
"""Why things of a kind happen, in a sentence."""


@dataclass(frozen=True)
class Cause:
    """What happened and what to do about it; advice may be empty."""

    text: str
    advice: str
    kind: Kind = ""

    @property
    def why(self) -> str:
        return WHY.get(self.kind, "")


@dataclass(frozen=True)
class Recogniser:
    """Sentences for a pattern; `{0}` stands for what its first group found."""

    pattern: str
    text: str
    advice: str
    kind: Kind = ""

    def match(self, lines: Sequence[str]) -> Cause | None:
        """The cause, when a line has the pattern; the last such line counts."""
        for line in reversed(lines):
            found = re.search(self.pattern, line)
            if found:
                groups = [group or "" for group in found.groups()] or [""]
                return Cause(self.text.format(*groups), self.advice, self.kind)
        return None


_LESS_MEMORY = (
    "Turn on gradient_checkpointing and cache_latents, raise blocks_to_swap, lower train_batch_size or resolution, or close other programs "
    "that use the GPU. The bar beside Start says what would fit, and oom_fallback turns such memory options on by itself."
)
_LESS_RAM = (
    "Close other programs, use a smaller base model file or fewer data workers, turn on cache_latents_to_disk, "
    "or give the machine more memory or swap."
)

RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser(
        r"\d+ images? cannot be read\. Replace or remove",
        "Images of the data set cannot be read.",
        "Replace or remove them, or leave them out with on_bad_image = skip.",
        "images",
    ),
    Recogniser(
        r"(?:CUDA|HIP|torch\.)\s?(?:error: )?out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|the device has no memory",
        "The GPU ran out of memory.",
        _LESS_MEMORY,
        "memory",
    ),
    Recogniser(
        r"can't allocate memory|Cannot allocate memory|^MemoryError|DefaultCPUAllocator: not enough memory",
        "The machine ran out of memory (RAM).",
        _LESS_RAM,
        "ram",
    ),
    Recogniser(
        r"WinError 1455|paging file is too small",
        "Windows ran out of virtual memory.",
        "Make the paging file larger (system settings, performance, virtual memory) and start again.",
        "ram",
    ),
    Recogniser(
        r"No space left on device|Errno 28\b|Disk quota exceeded|There is not enough space on the disk|Errno 122\b"
        r"|could not be written to .* are free there",
        "The disk is full.",
        "Free some space, or choose an output_dir on another disk, then press Resume; earlier states are intact.",
        "disk",
    ),
    Recogniser(
        r"ModuleNotFoundError: No module named ['\"]([\w.]+)",
        "The package {0} is not installed.",
        "Run `bash setup.sh install` once more; optional packages are named in the help of the option that needs them.",
    ),
    Recogniser(
        r"(?:cannot open shared object file|DLL load failed while importing) ?(\S*)",
        "A system library is missing or does not fit.",
        "Run `bash setup.sh doctor`; on Windows install the current Visual C++ runtime.",
    ),
    Recogniser(
        r"driver on your system is too old|CUDA driver version is insufficient|Found no NVIDIA driver|no CUDA-capable device",
        "The NVIDIA driver is missing or too old for this build of torch.",
        "Update the driver, or install a torch build that fits it (TORCH_SPEC, see `bash setup.sh doctor`).",
    ),
    Recogniser(
        r"no kernel image is available",
        "This build of torch has no code for your GPU.",
        "Install a torch build that lists your GPU's generation (TORCH_SPEC, see `bash setup.sh doctor`).",
    ),
    Recogniser(
        r"NCCL (?:error|watchdog)|ncclSystemError|ncclUnhandledCudaError|collective operation timeout|DistBackendError",
        "The GPUs lost contact with each other (NCCL).",
        "Look for the first failing rank above in the log; one rank out of memory stops them all. If none failed, try NCCL_P2P_DISABLE=1.",
        "passing",
    ),
    Recogniser(
        r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|CUBLAS_STATUS_EXECUTION_FAILED|\bXid\b",
        "The GPU reported a failed computation.",
        "Press Resume. If it comes back, remove any overclocking, update the driver and report the log.",
        "passing",
    ),
    Recogniser(
        r"EADDRINUSE|Address already in use",
        "Another run on this machine uses the same network port.",
        "Wait for the other run, or end it, then start again.",
        "passing",
    ),
    Recogniser(
        r"DataLoader worker .* (?:killed|exited)|Bus error|insufficient shared memory",
        "A data worker was ended; containers often have too little shared memory.",
        "Start the container with --shm-size 8g or --ipc host, or use fewer data workers.",
        "readers",
    ),
    Recogniser(
        r"(?i)non-?finite|is not a finite number|loss (?:is|became|of step \d+ is) (?:nan|inf)",
        "The loss became infinite or not a number.",
        "Press Resume with a lower learning_rate, mixed_precision bf16 instead of fp16, or without the images named in the log.",
        "nan",
    ),
    Recogniser(
        r"GatedRepo|401 Client Error|403 Client Error|is gated",
        "The model's page asks for a login or for its licence to be accepted.",
        "Accept the licence on the model's page and set HF_TOKEN before starting the studio, or point to a downloaded file.",
        "model",
    ),
    Recogniser(
        r"Max retries exceeded|Name or service not known|Temporary failure in name resolution|LocalEntryNotFoundError|OfflineModeIsEnabled",
        "The model could not be downloaded: no connection.",
        "Check the network, or download the model and give its path in pretrained_model_name_or_path.",
        "passing",
    ),
    Recogniser(
        r"SafetensorError|InvalidHeader|HeaderTooLarge|HeaderTooSmall|MetadataIncompleteBuffer"
        r"|is damaged or was not downloaded whole|is not a readable safetensors file",
        "A .safetensors file is damaged or not fully downloaded.",
        "Download the file again and compare its size or SHA-256.",
        "model",
    ),
    Recogniser(
        r"size mismatch for|Missing key\(s\) in state_dict|: .* is .*; you chose .*, which needs",
        "The model file does not belong to this model family.",
        "Choose the family that fits the file, or another file.",
        "model",
    ),
    Recogniser(
        r"Too many open files|Errno 24\b",
        "The system's limit of open files was reached.",
        "Raise it with `ulimit -n 65536` before starting the studio.",
    ),
    Recogniser(
        r"PermissionError.*?['\"]([^'\"]+)['\"]|Permission denied",
        "A file or folder may not be read or written: {0}",
        "Change its permissions or choose another folder.",
    ),
    Recogniser(
        r"FileNotFoundError.*?['\"]([^'\"]+)['\"]",
        "A file is missing: {0}",
        "Correct the path or bring the file back, then press Resume.",
        "file",
    ),
    Recogniser(
        r"failed \(exitcode: -9\) local_rank: (\d+)",
        "The process with local rank {0} was killed (signal 9), almost always because memory (RAM) ran out.",
        _LESS_RAM,
        "ram",
    ),
    Recogniser(
        r"SIGKILL|exitcode\s*: -9|[Ss]ignal 9\b",
        "The operating system ended the training at once (SIGKILL), almost always because memory (RAM) ran out.",
        _LESS_RAM,
        "ram",
    ),
    Recogniser(
        r"SIGSEGV|Segmentation fault|exitcode\s*: -11",
        "The training crashed in native code (segmentation fault).",
        "Press Resume; if it comes back, run `bash setup.sh doctor`.",
        "passing",
    ),
)

_SIGNALS: dict[int, Cause] = {
    1: Cause(
        "The terminal that held the training was closed (SIGHUP).", "Press Resume; runs started by the studio survive this.", "passing"
    ),
    2: Cause("The training was interrupted (Ctrl-C) before it could save.", "Press Resume.", "passing"),
    4: Cause("The processor does not know an instruction of this torch build.", "Install a torch build for this processor."),
    7: Cause(
        "A memory page could not be read (bus error); containers often have too little shared memory.",
        "Use --shm-size 8g or --ipc host.",
        "readers",
    ),
    9: Cause("The operating system ended the training at once (SIGKILL), almost always because memory (RAM) ran out.", _LESS_RAM, "ram"),
    11: Cause(
        "The training crashed in native code (segmentation fault).",
        "Press Resume; if it comes back, run `bash setup.sh doctor`.",
        "passing",
    ),
    15: Cause(
        "Something outside the studio ended the training (SIGTERM), such as a shutdown or a job scheduler.", "Press Resume.", "passing"
    ),
}


def _signal_of(returncode: int | None) -> int | None:
    """The signal behind an exit code, as Popen (-9) or a shell (137) tells it."""
    if returncode is None or 0 <= returncode <= 128 or returncode > 128 + 64:
        return None
    return -returncode if returncode < 0 else returncode - 128


_LAUNCHERS = ("subprocess.CalledProcessError: ", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError")


def without_launcher(lines: Sequence[str]) -> list[str]:
    """The lines before the traceback in which accelerate or torchrun tell that the training has ended; it says nothing of why."""
    end = next((number for number, line in enumerate(lines) if line.startswith(_LAUNCHERS)), None)
    begin = [number for number, line in enumerate(lines[:end]) if line.startswith("Traceback (most recent call last)")]
    return list(lines) if end is None else list(lines[: begin[-1] if begin else end])


def _known(lines: Sequence[str]) -> Cause | None:
    return next((cause for cause in (item.match(lines) for item in RECOGNISERS) if cause), None)


def diagnose(lines: Sequence[str], returncode: int | None, farewell: LastWord | None) -> Cause:
    """Why a run failed or died.

    lines: the last lines of its console. returncode: of its process, None when nothing was left to tell it (power cut, everything
    killed). farewell: its last word, when it wrote one; its own words come first.
    """
    words = farewell.text if farewell else ""
    # Who says what to do has said all; otherwise the console may know more.
    known = (_known([words]) if words else None) or (None if farewell and farewell.advice else _known(lines))
    if farewell and words:
        kind: Kind = known.kind if known else "settings" if farewell.refused else ""
        return Cause(words, farewell.advice or (known.advice if known else ""), kind)
    if known:
        return known
    signal = _signal_of(returncode)
    if signal is not None:
        return _SIGNALS.get(signal, Cause(f"The training was ended by signal {signal}.", "Press Resume."))
    if returncode is None:
        return Cause(
            "The training disappeared without a word: the machine was restarted, or everything was ended at once.",
            "Press Resume.",
            "passing",
        )
    if returncode == 127:
        return Cause("The training command could not be started.", "Run `bash setup.sh doctor`.")
    if returncode == 2:
        return Cause(
            "The training refused its settings.", "The last lines of the log say which; correct them in the Train tab.", "settings"
        )
    return Cause(f"The training ended with code {returncode}.", "The last lines of the log say more.")
