"""What the page asks about sweeps: what the form could try, what that takes, a start, how far each is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.runs.early_checks import check_early
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.labels import label
from sd_scripts.schema.runs import RunOptions

from . import dataset_view, form, sweeps
from .answers import JsonAnswer
from .context import Context
from .datasets import order_of, said

Order = Mapping[str, Any]


def routes(context: Context, options_of: Callable[[Order], RunOptions]) -> list[Route]:
    """All of them; the guard asks each for the token of the page. options_of: the options in a form, or OptionError."""
    kept = sweeps.Sweeps(context.supervisor)
    context.supervisor.listeners.append(kept.hear)

    def axes(order: Order) -> dict[str, Any]:
        run = form.run_of_key(order["form"].get("run"))
        shown = order["form"].get("values") or {}
        return {"axes": [{"name": name, "label": label(name, run.family) or name, "now": shown.get(name)} for name in sweeps.axes_of(run)]}

    def tried(sweep: sweeps.Sweep, member: sweeps.Member) -> dict[str, Any]:
        return {"tried": sweep.tried(member), "own": not member.values}

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
            return {"problems": [{"option": problem.option, "message": str(problem)} for problem in err.problems]}
        return {"text": sweeps.described(planned), "runs": [tried(planned, member) for member in planned.members]}

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
                    **tried(sweep, one.member),
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

    def done(what: str, order: Order) -> Response:
        try:
            return JsonAnswer(work[what](order))
        except OptionError as err:
            return JsonAnswer({"detail": said(err)}, 409)
        except (AttributeError, KeyError, TypeError, ValueError):
            return JsonAnswer({"detail": "This is not an order of the page; reload it."}, 400)

    async def ordered(request: Request) -> Response:
        what = request.path_params["what"]
        if what not in work:
            return JsonAnswer({"detail": "There is no such order."}, 404)
        return await run_in_threadpool(done, what, await order_of(request))

    return [Route("/kl/sweeps/{what}", ordered, methods=["POST"])]
