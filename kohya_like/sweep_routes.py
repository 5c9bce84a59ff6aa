"""What the page asks about sweeps: what the form could try, what that takes, a start, how far each is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.routing import Route

from sd_scripts.runs.early_checks import check_early
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.labels import label
from sd_scripts.schema.runs import RunOptions

from . import dataset_view, form, sweeps
from .answers import Order, orders
from .context import Context


def routes(context: Context, options_of: Callable[[Order], RunOptions]) -> list[Route]:
    """All of them; the guard asks each for the token of the page. options_of: the options in a form, or OptionError."""
    kept = sweeps.Sweeps(context.supervisor)
    context.supervisor.listeners.append(kept.hear)

    def axes(order: Order) -> dict[str, Any]:
        run = form.run_of_key(order["form"].get("run"))
        shown = order["form"].get("values") or {}
        return {"axes": [{"name": name, "label": label(name, run.family) or name, "now": shown.get(name)} for name in sweeps.axes_of(run)]}

    def plan(order: Order) -> dict[str, Any]:
        """What a sweep would take, or its name where it is to start; or what is wrong."""
        try:
            options = options_of(order["form"])
            planned = sweeps.planned(options, sweeps.read_axes(type(options), order["axes"]))
            check_early(planned.base)
            if order.get("starts") is True:
                dataset_view.check(planned.base, context.output_dir)
                return {"sweep": kept.begin(planned).name}
        except OptionError as err:
            return {"problems": err.at_options()}
        return {"text": sweeps.described(planned), "runs": [asdict(planned.tried(member)) for member in planned.members]}

    def listed(_order: Order) -> dict[str, Any]:
        return {"sweeps": kept.names()}

    def shown(order: Order) -> dict[str, Any]:
        name = str(order["name"])
        sweep, jobs = kept.read(name), kept.jobs()
        progress = sweeps.progress_of(sweep, jobs)
        return {
            "name": name,
            "steps": sweep.rungs.steps,
            "notes": [*sweep.notes, *kept.trouble(name)],
            "is_ended": sweep.is_ended,
            "verdict": sweeps.verdict(sweep, progress, jobs),
            "runs": [
                {
                    **asdict(sweep.tried(one.member)),
                    "run": one.member.run if one.member.run in jobs else "",
                    "state": one.state,
                    "step": one.step,
                    "losses": one.losses,
                    "out": one.out,
                    "won": place == progress.winner,
                }
                for place, one in enumerate(progress.standings)
            ],
        }

    def end(order: Order) -> dict[str, Any]:
        kept.end(str(order["name"]))
        return {}

    def discard(order: Order) -> dict[str, Any]:
        return {"runs": kept.discard_others(str(order["name"]))}

    work: dict[str, Callable[[Order], dict[str, Any]]] = {
        "axes": axes,
        "plan": plan,
        "list": listed,
        "show": shown,
        "end": end,
        "discard": discard,
    }

    return [orders("/kl/sweeps/{what}", work)]
