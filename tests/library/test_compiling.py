"""torch.compile of a network in place: names stay, previews run plain code, and a compiler that is missing is a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from sd_scripts.library import compiling
from sd_scripts.library.errors import TrainingError
from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError

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
    compiling.compile_network(made, EAGER.model_copy(update={"compile_dynamic": dynamic}))
    assert list(made.state_dict()) == names and [name for name, _ in made.named_modules()] == ["", "a", "b"]
    torch.testing.assert_close(made(x), wanted)
    made(torch.randn(7, 3))
    made(torch.randn(9, 3))
    # One code serves all sizes, or the first size has its own, or each has.
    assert counters["stats"]["unique_graphs"] == {"auto": 2, "true": 1, "false": 3}[dynamic]


def test_many_sizes_are_still_compiled() -> None:
    made = Network()
    compiling.compile_network(made, EAGER.model_copy(update={"compile_dynamic": "false"}))
    counters.clear()
    for size in range(2, 22):
        made(torch.randn(size, 3))
    assert counters["stats"]["unique_graphs"] == 20, "torch's own limit of 8 is not ours"


def test_previews_run_plain_code() -> None:
    made, x = Network(), torch.randn(4, 3)
    with compiling.plain_code(made):
        wanted = made(x)
    compiling.compile_network(made, EAGER)
    counters.clear()
    with compiling.plain_code(made), torch.no_grad():
        torch.testing.assert_close(made(x), wanted)
    assert counters["stats"]["unique_graphs"] == 0
    made(x)
    assert counters["stats"]["unique_graphs"] == 1


def test_an_error_of_the_compiler_is_a_sentence_and_others_pass() -> None:
    def broken(_graph: object, _inputs: object) -> Any:
        raise OSError("no such program: c++")

    made = Network()
    made.compile(backend=broken)
    with pytest.raises(TrainingError, match=r"cannot be compiled here \(.*no such program.*turn compile off"), compiling.explained():
        made(torch.randn(4, 3))
    with pytest.raises(ZeroDivisionError), compiling.explained():
        _ = 1 / 0


def test_a_missing_compiler_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    compiling.check(EAGER, CPU)
    compiling.check(CompileOptions(), CPU)
    with pytest.raises(OptionError, match=r"compile_backend: inductor needs a C\+\+ compiler .* turn compile off"):
        compiling.check(CompileOptions(compile=True), CPU)
