"""Whether somebody who looks at the page sees a thing: its box on the screen, not its text in the document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

PATIENCE_MS = 30_000
ATTEMPTS = 3
"""A list that is being filled moves its rows."""

_SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Eyes:
    """Looks at a page."""

    page: Page

    def _ask(self, call: str, *given: Any) -> Any:
        question = f"given => window.sight ? window.sight.{call}(...given) : null"
        answer = self.page.evaluate(question, list(given))
        if answer is None:
            # A page that was not looked at yet.
            self.page.evaluate(f"() => {{ {_SCRIPT} }}")
            answer = self.page.evaluate(question, list(given))
        return answer

    def buttons(self) -> list[str]:
        """Names of all buttons that can be seen, with scrolling."""
        return list(self._ask("names"))

    def flaws(self) -> list[str]:
        """What should be nowhere: empty headings, sideways scrolling, small images that are blown up and blurred."""
        return list(self._ask("flaws", PATIENCE_MS))

    def press(self, name: str, place: str = "") -> list[str]:
        """Clicks a button with the mouse. name: a regular expression for all of its name. Gives what is wrong with it."""
        for _ in range(ATTEMPTS):
            found = self._ask("button", name, place, PATIENCE_MS)
            if isinstance(found[0], str):
                return list(found)
            self.page.mouse.click(*found)
            if self.page.evaluate("window.sight ? window.sight.clicked : true"):
                return []
        return [f"{name} moves away from the mouse"]

    def faults(self, css: str, says: str = "", at_once: bool = True) -> list[str]:
        """What keeps somebody from seeing a thing: empty when all of it is in its column and the window and lies open.

        It may be scrolled to up and down; at_once: its head must be in the window without that.
        """
        return list(self._ask("thing", css, says, at_once, PATIENCE_MS))
