"""What torch.compile gains on the CPU: seconds of a training step of each family's small network with plain code and with compiled code.

Both run in turns in one process, on one thread, in seconds of CPU time, so that a busy machine does not count. Seconds of compiling are
wall time.

usage: compiled.py [families, default all] [scopes, default network,blocks] [batch, default 4] [backend, default inductor]
"""

from __future__ import annotations

import sys
import time

import torch
from report import median, report

from sd_scripts import families
from sd_scripts.library.memory import compiling
from sd_scripts.schema.compile import CompileOptions
from tests.library.batches import a_call, trainable

SIDE = 128
TIMES = 12


def measure(name: str, scope: str, batch: int, backend: str) -> None:
    """Prints one line."""
    torch._dynamo.reset()
    family = families.family(name)
    parts, trained = trainable(name)
    x_t, t, conditions = a_call(name, parts, 1, SIDE)
    x_t, t, conditions = x_t.repeat(batch, 1, 1, 1), t.repeat(batch), conditions * batch
    options = CompileOptions(compile=True, compile_scope=scope, compile_backend=backend)  # type: ignore[arg-type]
    code = compiling.compile_network(parts.backbone, options, torch.device("cpu"))

    def step() -> float:
        started = time.process_time()
        torch.autograd.grad(family.denoise(parts, x_t, t, conditions).square().mean(), trained, allow_unused=True)
        return time.process_time() - started

    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    made = code.take()
    seconds: dict[str, list[float]] = {"plain": [], "compiled": []}
    for _ in range(TIMES):
        with compiling.plain_code(parts.backbone):
            seconds["plain"].append(step())
        seconds["compiled"].append(step())
    code.close()
    plain, compiled = (median(found[2:]) for found in seconds.values())
    report(
        "compiled",
        "-",
        family=name,
        scope=scope,
        backend=backend,
        batch=batch,
        plain_ms=1000 * plain,
        compiled_ms=1000 * compiled,
        gain=plain / compiled,
        graphs=made.graphs,
        compile_seconds=made.seconds,
        first_step_seconds=first,
    )


def main() -> None:
    torch.set_num_threads(1)
    given = sys.argv[1:] + [""] * 4
    for name in given[0].split(",") if given[0] else families.NAMES:
        for scope in (given[1] or "network,blocks").split(","):
            measure(name, scope, int(given[2] or 4), given[3] or "inductor")


if __name__ == "__main__":
    main()
