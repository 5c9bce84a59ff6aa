"""JSON routes of the grids of checkpoints; web/inference/compare.js draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sd_scripts.schema.errors import OptionError, of_disk

from . import comparison_files
from .answers import JsonAnswer, order_of, sent
from .comparisons import Comparisons
from .guard import VOTES
from .predict_routes import problems_of, session_of, thumbnail
from .vote_links import VoteLinks

KINDS = {"html": "text/html", "png": "image/png"}


def gone() -> Response:
    """The answer about a grid that is not there."""
    return JsonAnswer({"detail": "This comparison is not on disk any more."}, 404)


def routes(comparisons: Comparisons, links: VoteLinks | None = None) -> list[Route]:
    """The guard asks all of them for the token of the page. links: None where nobody beyond this computer could follow one."""

    def listed(_request: Request) -> Response:
        return JsonAnswer({"comparisons": comparisons.listed()})

    async def start(request: Request) -> Response:
        session, asked = session_of(request), await sent(request)
        if asked is None or not session:
            return JsonAnswer({"detail": "This is not an order of the page. Reload the page."}, 400)
        try:
            return JsonAnswer({"name": await run_in_threadpool(comparisons.start, asked, session)})
        except OptionError as err:
            return problems_of(err)

    def known(work: Callable[[Request, str], Response]) -> Callable[[Request], Response]:
        def answered(request: Request) -> Response:
            try:
                return work(request, str(request.path_params["name"]))
            except (KeyError, FileNotFoundError):
                return gone()
            except OptionError as err:
                return problems_of(err)
            except OSError as err:
                return problems_of(of_disk(err))

        return answered

    def one(_request: Request, name: str) -> Response:
        return JsonAnswer(comparisons.one(name))

    def cell(request: Request, name: str) -> Response:
        path = comparisons.cell(name, str(request.path_params["key"]))
        # What a key stands for never changes.
        cached = {"cache-control": "private, max-age=31536000, immutable"}
        if request.query_params.get("size") == "thumb":
            return Response(thumbnail(path), media_type="image/webp", headers=cached)
        return FileResponse(path, media_type="image/png", headers=cached) if path.is_file() else Response(status_code=404)

    def act(request: Request, name: str) -> Response:
        acts: dict[str, Callable[[str], Any]] = {"stop": comparisons.stop, "continue": comparisons.go_on, "delete": comparisons.delete}
        comparisons.one(name)
        acts[str(request.path_params["act"])](name)
        return JsonAnswer({"comparisons": comparisons.listed()})

    def voting(name: str) -> dict[str, Any]:
        return {**comparisons.voting(name), "invites": links is not None}

    def question(_request: Request, name: str) -> Response:
        return JsonAnswer(voting(name))

    def invite(_request: Request, name: str) -> Response:
        if links is None:
            raise OptionError("nobody else reaches this studio, which answers this computer alone; start it with --listen or --share")
        return JsonAnswer({"path": f"{VOTES}{links.invite(name)}"})

    async def vote(request: Request) -> Response:
        name = str(request.path_params["name"])
        try:
            await run_in_threadpool(comparisons.vote, name, await order_of(request))
        except KeyError:
            return gone()
        except (OptionError, ValueError) as err:
            return JsonAnswer({**await run_in_threadpool(voting, name), "detail": str(err)}, 409)
        return JsonAnswer(await run_in_threadpool(voting, name))

    def file(request: Request, name: str) -> Response:
        kind = str(request.path_params["kind"])
        shown = comparisons.one(name)
        made = comparison_files.page(shown, comparisons.cells) if kind == "html" else comparison_files.image(shown, comparisons.cells)
        headers = {"content-disposition": f'attachment; filename="comparison-{name}.{kind}"'}
        return Response(made, media_type=KINDS[kind], headers=headers)

    return [
        Route("/kl/compare", listed),
        Route("/kl/compare/start", start, methods=["POST"]),
        Route("/kl/compare/{name}", known(one)),
        Route("/kl/compare/{name}/cell/{key}", known(cell)),
        Route("/kl/compare/{name}/vote", vote, methods=["POST"]),
        Route("/kl/compare/{name}/vote", known(question)),
        Route("/kl/compare/{name}/invite", known(invite), methods=["POST"]),
        Route("/kl/compare/{name}/{act}", known(act), methods=["POST"]),
        Route("/kl/compare/{name}/file.{kind}", known(file)),
    ]
