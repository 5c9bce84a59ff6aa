"""The Data tab's routes. web/data asks them; the guard asks all of them for the token of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd_scripts.dataset.images import BadImage
from sd_scripts.schema.errors import OptionError

from ..answers import JsonAnswer, Order, as_lines, order_of, ordered, said
from ..context import Context
from ..tabs.train import TrainTab
from ..tools import ToolBench
from . import jobs, masks
from . import room as rooms

Answer = dict[str, Any]


def _indices(order: Mapping[str, Any], room: rooms.Room) -> list[int]:
    """The images that an order is for; all of them without a list."""
    given = order.get("indices")
    return [index for index in given if isinstance(index, int)] if isinstance(given, list) else list(range(len(room.paths)))


def _index(order: Mapping[str, Any], room: rooms.Room) -> int:
    index = order["index"]
    if not isinstance(index, int) or not 0 <= index < len(room.paths):
        raise OptionError("The data set has other images now; open it again.")
    return index


def _picture(order: Mapping[str, Any]) -> str | None:
    """The mask of an order; None takes it away."""
    picture = order["picture"]
    if picture is not None and not isinstance(picture, str):
        raise TypeError
    return picture


def _change(room: rooms.Room, order: Mapping[str, Any]) -> Answer:
    wanted, known = order.get("order"), order.get("known")
    return rooms.change(room, _indices(order, room), wanted if isinstance(wanted, dict) else {}, known if isinstance(known, str) else None)


_WORK: dict[str, Callable[[rooms.Room, Mapping[str, Any]], Answer]] = {
    "image": lambda room, order: rooms.image_of(room, int(order["index"])),
    "caption": lambda room, order: rooms.write(room, int(order["index"]), str(order.get("text") or ""), str(order.get("version"))),
    "change": _change,
    "news": lambda room, order: rooms.news(room, int(order["news"]), [int(each) for each in order.get("maskNews") or ()]),
    "undo": lambda room, order: rooms.undo(room),
    "weight": lambda room, order: masks.overlay(room, _index(order, room)),
    "mask": lambda room, order: masks.write(room, _index(order, room), _picture(order), str(order.get("version"))),
    "leave_out": lambda room, order: {"count": rooms.leave_out(room, _indices(order, room))},
    "bring_back": lambda room, order: {"count": rooms.bring_back(room)},
}
"""What a page may order for a data set that it has open."""


def routes(context: Context) -> list[Route]:
    """All of them."""
    kept = rooms.Rooms(context.output_dir)
    bench = ToolBench(context.output_dir, context.roots)
    tab = TrainTab(context)

    def opened(order: Mapping[str, Any]) -> Iterator[Answer]:
        try:
            form = order.get("form")
            yield from kept.open(tab.of_images([form if isinstance(form, dict) else {}]))
        except OptionError as err:
            yield {"problems": err.at_options()}

    def looked(order: Mapping[str, Any]) -> Iterator[Answer]:
        try:
            yield from rooms.look_through(kept.find(order.get("room")), kept.thumbnails)
        except OptionError as err:
            yield {"problem": said(err)}

    def done(what: str, order: Order) -> Response:
        try:
            return JsonAnswer(_WORK[what](kept.find(order.get("room")), order))
        except OptionError as err:
            return JsonAnswer({"problem": said(err)})
        except (KeyError, TypeError, ValueError):
            return JsonAnswer({"problem": "This is not an order of the page; reload it."})

    def lines(work: Callable[[Order], Iterator[Answer]]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return as_lines(work(await order_of(request)))

        return answer

    def worked(what: str, order: Order) -> Response:
        try:
            return JsonAnswer(jobs.WORK[what](jobs.Desk(bench, kept.find(order.get("room")), context), order))
        except OptionError as err:
            return JsonAnswer({"problems": err.at_options()})

    def drawn(name: str, index: int, control: str, is_large: bool) -> Response:
        try:
            path = kept.find(name).shown(index, control)
            if path is None:
                return Response(status_code=404)
            data = kept.thumbnails.large(path) if is_large else kept.thumbnails.small(path)
        except FileNotFoundError:
            # Left out, or moved by hand, since the page asked.
            return Response(status_code=204)
        except (BadImage, OptionError, OSError):
            return Response(status_code=404)
        # Whoever opens the data set again asks for other addresses.
        return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=86400"})

    async def image(request: Request) -> Response:
        values = request.path_params
        asked = request.query_params
        return await run_in_threadpool(drawn, values["room"], values["index"], asked.get("control", ""), "large" in asked)

    def mask(name: str, index: int) -> Response:
        try:
            room = kept.find(name)
            data = masks.drawn(room, _index({"index": index}, room))
        except (BadImage, OptionError, OSError) as err:
            return JsonAnswer({"problem": said(err) if isinstance(err, OptionError) else str(err)}, 409)
        return Response(data, 200 if data else 204, media_type="image/png", headers={"cache-control": "no-store"})

    async def mask_image(request: Request) -> Response:
        return await run_in_threadpool(mask, request.path_params["room"], request.path_params["index"])

    return [
        Route("/kl/data/mask/{room}/{index:int}", mask_image),
        Route("/kl/data/open", lines(opened), methods=["POST"]),
        Route("/kl/data/triage", lines(looked), methods=["POST"]),
        Route("/kl/data/image/{room}/{index:int}", image),
        ordered("/kl/data/tool/{what}", jobs.WORK, worked),
        ordered("/kl/data/{what}", _WORK, done),
    ]
