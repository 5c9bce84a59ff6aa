"""Steps that are done again where there is a way out: with plain code where compiling fails, with one more memory option where memory runs
out. Nothing of a step remains but gradients until the weights are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.memory.compiling import Compilation
from sd_scripts.library.memory.oom_advice import is_out_of_memory
from sd_scripts.library.memory.oom_fallback import OomFallback
from sd_scripts.runs.events import Compiled

from .learner import Learner
from .meter import StepLog

Result = TypeVar("Result")


class Steps:
    """The steps of a learner, as the loop takes them."""

    def __init__(self, learner: Learner, fallback: OomFallback | None = None) -> None:
        """fallback: what to do when a step has no memory, apart from ending the run."""
        self.learner, self.fallback = learner, fallback
        self._process = learner.process

    @property
    def _compilation(self) -> Compilation | None:
        return self.learner.model.compilation

    def step(self, step: int) -> StepLog:
        """Learner.step, done again with one more memory option each time that memory runs out before the weights are moved; its times
        are without what compiling took."""
        while True:
            try:
                log = self._or_with_plain_code(lambda: self.learner.step(step))
                return log.without_compiling(self.tell_compiled(step + 1))
            except (RuntimeError, MemoryError) as err:
                if self.fallback is None or self.learner.moving or not is_out_of_memory(err):
                    raise
                # Its frames keep the graph.
                failed = err.with_traceback(None)
            self.learner.optimizer.zero_grad(set_to_none=True)
            if not self.fallback.turn_on_next(f"step {step + 1}"):
                raise failed

    def try_out(self, batch: Batch) -> None:
        """Learner.try_out."""
        self._or_with_plain_code(lambda: self.learner.try_out(batch))

    def _or_with_plain_code(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except Exception as err:
            reason = "" if self._compilation is None or self.learner.moving else self._compilation.gives_up(err)
            if not reason:
                raise
        self._warn(reason)
        self.learner.optimizer.zero_grad(set_to_none=True)
        return work()

    def tell_compiled(self, step: int) -> float:
        """Says what was compiled since it was last asked, and what that means; seconds that it took. step: how many are done."""
        if self._compilation is None:
            return 0.0
        made = self._compilation.take()
        if made.graphs and self._process.is_main:
            seconds, total = round(made.seconds, 3), self._compilation.graphs
            self._process.log(Compiled(step=step, graphs=made.graphs, seconds=seconds, total=total))
        for text in self._compilation.warnings(made):
            self._warn(text)
        return made.seconds

    def close(self) -> None:
        """No code is made any more."""
        if self._compilation is not None:
            self._compilation.close()

    def _warn(self, text: str) -> None:
        if self._process.is_main:
            self._process.warn(text)
