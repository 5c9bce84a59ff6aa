"""Which GPUs this machine has, by the names that CUDA_VISIBLE_DEVICES understands. Asks the driver, not torch."""

from __future__ import annotations

import os


def uuids() -> list[str]:
    """UUIDs of all NVIDIA GPUs in the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in found]
    except pynvml.NVMLError:
        # A GPU that has fallen off the bus hides the others' names too; training on them still works by number.
        return []
    finally:
        pynvml.nvmlShutdown()


def are_known() -> bool:
    """Whether the GPUs that this asks for are all there are: not on a machine with AMD's driver, whose GPUs go by the same names."""
    return not os.path.exists("/dev/kfd") and "HIP_VISIBLE_DEVICES" not in os.environ


def visible() -> list[str]:
    """Names of the GPUs that this process may use: what CUDA_VISIBLE_DEVICES lists, or the numbers of all; empty without any."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index in range(len(uuids()))]


def same_names(names: list[str], all_uuids: list[str]) -> list[str]:
    """The names with numbers and shortened UUIDs replaced by whole UUIDs, so that two names of one GPU are equal.

    A name that no GPU here has stays as it is.
    """
    return [_whole(name, all_uuids) for name in names]


def _whole(name: str, all_uuids: list[str]) -> str:
    if name.isdigit():
        return all_uuids[int(name)] if int(name) < len(all_uuids) else name
    return next((uuid for uuid in all_uuids if uuid.lower().startswith(name.lower())), name)
