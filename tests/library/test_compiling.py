"""torch.compile of a network in place: names stay, previews run plain code, and a compiler that is missing is a sentence."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch._dynamo.utils import counters

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.memory import compiling
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.memory import UNetMemoryOptions
from tests.library.batches import a_call, trainable
from tests.library.small_trainers import make, weights_of

CPU = torch.device("cpu")
EAGER = CompileOptions(compile=True, compile_backend="eager")


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    """Code is kept for the class, not for the network."""
    torch._dynamo.reset()


class Network(torch.nn.Module):
    """A class of its own, as networks have one: torch compiles none of its own containers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.nn.functional.silu(self.a(x)))


@pytest.mark.parametrize("dynamic", ["auto", "true", "false"])
def test_a_compiled_network_has_the_names_and_numbers_of_the_plain_one(dynamic: Any) -> None:
    made, x = Network(), torch.randn(4, 3)
    names, wanted = list(made.state_dict()), made(x)
    counters.clear()
    compiling.compile_network(made, EAGER.model_copy(update={"compile_dynamic": dynamic}), CPU)
    assert list(made.state_dict()) == names and [name for name, _ in made.named_modules()] == ["", "a", "b"]
    torch.testing.assert_close(made(x), wanted)
    made(torch.randn(7, 3))
    made(torch.randn(9, 3))
    # One code serves all sizes, or the first size has its own, or each has.
    assert counters["stats"]["unique_graphs"] == {"auto": 2, "true": 1, "false": 3}[dynamic]


def test_many_sizes_are_still_compiled() -> None:
    made = Network()
    compiling.compile_network(made, EAGER.model_copy(update={"compile_dynamic": "false"}), CPU)
    counters.clear()
    for size in range(2, 22):
        made(torch.randn(size, 3))
    assert counters["stats"]["unique_graphs"] == 20, "torch's own limit of 8 is not ours"


def test_previews_run_plain_code() -> None:
    made, x = Network(), torch.randn(4, 3)
    with compiling.plain_code(made):
        wanted = made(x)
    compiling.compile_network(made, EAGER, CPU)
    counters.clear()
    with compiling.plain_code(made), torch.no_grad():
        torch.testing.assert_close(made(x), wanted)
    assert counters["stats"]["unique_graphs"] == 0
    made(x)
    assert counters["stats"]["unique_graphs"] == 1


def test_an_error_of_the_compiler_is_a_sentence_and_others_pass() -> None:
    made = Network()
    made.compile(backend=broken)
    with pytest.raises(TrainingError, match=r"cannot be compiled here \(.*no such program.*turn compile off"), compiling.explained():
        made(torch.randn(4, 3))
    with pytest.raises(ZeroDivisionError), compiling.explained():
        _ = 1 / 0


def test_a_missing_compiler_is_told_before_anything_is_loaded() -> None:
    from torch._inductor import config

    with config.patch("cpp.cxx", ("no-such-compiler",)):
        assert compiling.check(EAGER, CPU) == compiling.check(CompileOptions(), CPU) == ""
        with pytest.raises(OptionError, match=r"compile_backend: inductor needs a C\+\+ compiler .* turn compile off"):
            compiling.check(CompileOptions(compile=True), CPU)
        assert "a C++ compiler" in compiling.check(CompileOptions(compile=True, compile_fallback=True), CPU)


@pytest.mark.parametrize(
    "given", [{"compile_backend": "cudagraphs"}, {"compile_mode": "reduce-overhead"}, {"compile_mode": "max-autotune"}], ids=str
)
def test_cuda_graphs_need_cuda(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(given))}: .* replays CUDA graphs, and this run is on CPU"):
        compiling.check(CompileOptions(compile=True, **given), CPU)


def test_the_launchers_own_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(OptionError, match=r"compile: the launcher compiles too \(dynamo_backend inductor\)"):
        compiling.check(EAGER, CPU)
    compiling.check(CompileOptions(), CPU)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    compiling.check(EAGER, CPU)


# The code of blocks.


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


class Stack(torch.nn.Module):
    """Blocks, as a transformer of diffusers lists them."""

    _repeated_blocks = ("Block",)

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(6) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BLOCKS = EAGER.model_copy(update={"compile_scope": "blocks"})


@pytest.mark.parametrize(
    ("asked", "device", "swapped", "wanted"),
    [
        ("auto", "cpu", False, "network"),
        ("auto", "cuda", False, "blocks"),
        ("auto", "cpu", True, "blocks"),
        ("network", "cuda", False, "network"),
        ("blocks", "cpu", False, "blocks"),
    ],
)
def test_auto_takes_what_was_found_faster(asked: Any, device: str, swapped: bool, wanted: str) -> None:
    options = EAGER.model_copy(update={"compile_scope": asked})
    assert compiling.scope_of(options, torch.device(device), swapped, Stack(2)) == wanted
    assert compiling.scope_of(options, torch.device(device), swapped, Network()) == "network", "it has no blocks"


def test_blocks_of_a_kind_share_their_code() -> None:
    graphs = {}
    for depth in (2, 7):
        torch._dynamo.reset()
        made, x = Stack(depth), torch.randn(3, 6)
        wanted, names = made(x), list(made.state_dict())
        code = compiling.compile_network(made, BLOCKS, CPU)
        torch.testing.assert_close(made(x), wanted)
        assert list(made.state_dict()) == names and compiling.is_compiled(made)
        graphs[depth] = code.take().graphs
        code.close()
    # The first block's input needs no gradient, those of the others do.
    assert graphs == {2: 2, 7: 2}


def test_what_surrounds_the_code_of_a_block_is_not_traced() -> None:
    """Hooks and a replaced forward run as Python in each call, as swapping needs it."""
    made, calls = Stack(3), list[str]()
    compiling.compile_network(made, BLOCKS.model_copy(update={"compile_fullgraph": True}), CPU)
    for block in made.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append("hook"))
        block.forward = (lambda inner: lambda x: calls.append("forward") or inner(x))(block.forward)
    for _ in range(2):
        made(torch.randn(3, 6))
    assert calls == ["hook", "forward"] * 6


def test_weights_may_be_exchanged_between_calls() -> None:
    made, x = Stack(2), torch.randn(3, 6)
    code = compiling.compile_network(made, BLOCKS, CPU)
    made(x)
    code.take()
    fresh = Stack(2)
    for weight, other in zip(made.parameters(), fresh.parameters(), strict=True):
        weight.data = other.data.clone()
    torch.testing.assert_close(made(x), fresh(x))
    assert code.take().graphs == 0
    code.close()


def test_a_limit_of_versions_that_is_reached_is_told_once() -> None:
    made = Network()
    code = compiling.compile_network(made, EAGER.model_copy(update={"compile_dynamic": "false", "compile_cache_size_limit": 2}), CPU)
    code.expect(2)
    said = []
    for size in range(2, 7):
        made(torch.randn(size, 3))
        said += code.warnings(code.take())
    code.close()
    assert len(said) == 1 and "has 2 versions, and the plain code runs" in said[0] and code.graphs == 2


def test_more_graphs_than_expected_are_told_once() -> None:
    made = Network()
    code = compiling.compile_network(made, EAGER.model_copy(update={"compile_dynamic": "false"}), CPU)
    code.expect(1)
    said = []
    for size in range(2, 6):
        made(torch.randn(size, 3))
        said += code.warnings(code.take())
    code.close()
    assert len(said) == 1 and "has made 2 graphs, where 1 were expected at most" in said[0]


def test_compiled_code_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Set before it is taken away, so that what is set below does not outlive the test.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    compiling.keep_code()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_dir() and tmp_path in folder.parents
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    compiling.keep_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


# In training.


def broken(_graph: object, _inputs: object) -> Any:
    raise OSError("no such program: c++")


def broken_backward() -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.exc import InductorError

    def backward(_graph: object, _inputs: object) -> Any:
        # As inductor tells it, which is asked for the backward pass when that begins.
        raise InductorError(OSError("no such program: c++"), inspect.currentframe())

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward)


def trainer_of(folder: Path, steps: int) -> Trainer:
    """A trainer of few blocks with few adapters, whose code is made soon."""
    trainer = make(("flux", "network"), folder, target_modules=("to_out",))
    trainer.timetable = replace(trainer.timetable, total_steps=steps)
    return trainer


@pytest.fixture(scope="module")
def plainly_trained(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights after two steps of a run that compiles nothing."""
    trainer = trainer_of(tmp_path_factory.mktemp("plain"), 2)
    assert trainer.fit()
    return weights_of(trainer)


@pytest.mark.parametrize(
    ("where", "scope"),
    [
        ("forward", "blocks"),
        ("backward", "network"),
        pytest.param("forward", "network", marks=pytest.mark.long),
        pytest.param("backward", "blocks", marks=pytest.mark.long),
    ],
)
def test_training_goes_on_with_plain_code_where_compiling_fails(
    scope: str, where: str, tmp_path: Path, plainly_trained: torch.Tensor
) -> None:
    trainer = trainer_of(tmp_path, 2)
    backend = broken if where == "forward" else broken_backward()
    options = EAGER.model_copy(update={"compile_scope": scope, "compile_backend": backend, "compile_fallback": True})
    trainer.compilation = compiling.compile_network(trainer.parts.backbone, options, CPU)
    assert trainer.fit()
    assert torch.equal(weights_of(trainer), plainly_trained)
    warnings = [event["text"] for event in trainer.run.events()[0] if event["kind"] == "warning"]
    assert len(warnings) == 1 and "the plain code runs" in warnings[0] and "no such program" in warnings[0]


def test_training_stops_where_compiling_fails_and_nothing_else_is_asked_for(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 2)
    options = EAGER.model_copy(update={"compile_backend": broken})
    trainer.compilation = compiling.compile_network(trainer.parts.backbone, options, CPU)
    with pytest.raises(TrainingError, match="no such program"), compiling.explained():
        trainer.fit()
    assert trainer.step == 0


def test_no_memory_is_no_failure_of_compiling(tmp_path: Path) -> None:
    def full(_graph: object, _inputs: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = Network()
    options = EAGER.model_copy(update={"compile_backend": full, "compile_fallback": True})
    code = compiling.compile_network(made, options, CPU)
    with pytest.raises(Exception, match="out of memory") as caught:
        made(torch.randn(4, 3))
    assert code.gives_up(caught.value) == "" and not code.given_up
    code.close()


def test_steps_that_compile_are_told_and_do_not_count_for_the_speed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 3)
    trainer.compilation = compiling.compile_network(trainer.parts.backbone, BLOCKS, CPU)
    assert trainer.fit()
    events = trainer.run.events()[0]
    (compiled,) = [event for event in events if event["kind"] == "compiled"]
    assert compiled["step"] == 1 and compiled["graphs"] == compiled["total"] > 0 and compiled["seconds"] > 0
    (session,) = [event for event in events if event["kind"] == "session"]
    assert session["compile_seconds"] == pytest.approx(compiled["seconds"], abs=1e-2)
    first = next(event for event in events if event["kind"] == "step")
    assert first["trained_seconds"] == pytest.approx(first["step_total"], abs=1e-2), "without what compiling took"


# Every family.


def a_step(name: str, parts: Parts, trained: list[torch.Tensor], side: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of a random batch."""
    x_t, t, conditions = a_call(name, parts, 2, side, seed=side)
    loss = families.family(name).denoise(parts, x_t, t, conditions).square().mean()
    return loss.detach(), [gradient for gradient in torch.autograd.grad(loss, trained, allow_unused=True) if gradient is not None]


# test_swapping does so with FLUX.
def test_compiled_code_computes_the_same_and_three_sizes_and_previews_need_few_graphs() -> None:
    check_compiled("sdxl", "blocks", (64, 96, 128), ("to_out.0", "proj_out"))


@pytest.mark.long
@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("scope", ["blocks", "network"])
def test_so_do_four_sizes_with_adapters_on_all_layers(name: str, scope: str) -> None:
    check_compiled(name, scope, (64, 96, 128, 160), ("",))


def check_compiled(name: str, scope: str, sides: tuple[int, ...], layers: tuple[str, ...]) -> None:
    parts, trained = trainable(name, layers)
    wanted = {side: a_step(name, parts, trained, side) for side in sides}
    options = CompileOptions(compile=True, compile_backend="aot_eager", compile_scope=scope, compile_fullgraph=True)  # type: ignore[arg-type]
    code = compiling.compile_network(parts.backbone, options, CPU)
    run = RUNS[name, "network" if (name, "network") in RUNS else "scratch"]
    memory = run.model_fields["memory"].default
    varying = 3 if isinstance(memory, UNetMemoryOptions) else 2
    for side in sides:
        loss, gradients = a_step(name, parts, trained, side)
        torch.testing.assert_close(loss, wanted[side][0], rtol=1e-5, atol=1e-6)
        for gradient, other in zip(gradients, wanted[side][1], strict=True):
            assert float((gradient - other).norm()) <= 1e-5 * float(other.norm()) + 1e-8
    made = code.take()
    controls = (Image.new("RGB", (64, 64)),) if name in ("lgt", "qwen_edit") else ()
    with compiling.plain_code(parts.backbone), torch.no_grad():
        families.family(name).preview(parts, [Preview("line", width=64, height=64, steps=1, controls=controls)])
    after = code.take()
    code.close()
    assert not made.full and (after.graphs, after.full) == (0, False), "previews run plain code"
    assert 0 < made.graphs <= code.pieces * (1 + varying)
    if scope == "blocks" and name in ("flux", "sdxl"):
        assert made.graphs <= {"flux": 8, "sdxl": 16}[name]
