"""Orders of the page to the studio's own routes, and answers as JSON: a file on the disk that holds what JSON cannot say never keeps the
page from the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

Order = Mapping[str, Any]


class JsonAnswer(JSONResponse):
    """An answer as JSON; numbers that are none (NaN, infinity) become null, halves of characters the replacement character."""

    def render(self, content: Any) -> bytes:
        try:
            text = _written(content)
        except ValueError:
            text = _written(_finite(content))
        return text.encode("utf-8", "replace")


async def sent(request: Request) -> dict[str, Any] | None:
    """The order that the page has sent as JSON; None for anything else."""
    try:
        order = json_of(await request.body())
    except ValueError:
        return None
    return order if isinstance(order, dict) else None


async def order_of(request: Request) -> dict[str, Any]:
    """The same; empty for anything else."""
    return await sent(request) or {}


def said(err: OptionError) -> str:
    """The sentences of an error."""
    return " ".join(problem.message for problem in err.problems)


def as_lines(told: Iterable[object]) -> Response:
    """Values as JSON, one a line, each sent as soon as it is there."""
    lines = (json.dumps(one) + "\n" for one in told)
    return StreamingResponse(lines, media_type="application/x-ndjson", headers={"cache-control": "no-store"})


def ordered(path: str, known: Container[str], done: Callable[[str, Order], Response]) -> Route:
    """The route of orders by these names, the `what` of its path; done answers one, in a thread."""

    async def answer(request: Request) -> Response:
        what = request.path_params["what"]
        if what not in known:
            return JsonAnswer({"detail": "There is no such order."}, 404)
        return await run_in_threadpool(done, what, await order_of(request))

    return Route(path, answer, methods=["POST"])


def orders(path: str, work: Mapping[str, Callable[[Order], Any]]) -> Route:
    """The same where what is wrong is told as a whole, and so is an order that lacks something."""

    def done(what: str, order: Order) -> Response:
        try:
            return JsonAnswer(work[what](order))
        except OptionError as err:
            return JsonAnswer({"detail": said(err)}, 409)
        except (AttributeError, KeyError, TypeError, ValueError):
            return JsonAnswer({"detail": "This is not an order of the page; reload it."}, 400)

    return ordered(path, work, done)


def _written(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
