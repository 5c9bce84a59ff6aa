"""The page: tabs, theme, guard and own routes put together. Everything with a mind of its own lies elsewhere."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.routing import Route

from . import (
    browsing,
    comparison_routes,
    datasets,
    desk,
    drawing,
    files,
    guide,
    live,
    notices,
    page,
    pick_routes,
    predict_routes,
    theme,
    tools,
    vote_links,
)
from .comparisons import Comparisons
from .context import Context
from .data_room import routes as data_room
from .guard import Guard
from .inference import WorkerBackend
from .kept import Kept
from .predictions import PredictionQueue
from .supervisor import JobSupervisor
from .tabs import data as data_tab
from .tabs import help as help_tab
from .tabs import inference as inference_tab
from .tabs import runs as runs_tab
from .tabs import tools as tools_tab
from .tabs import train as train_tab

TITLE = "kohya_like"


@dataclass(frozen=True)
class Server:
    """Where the studio listens and who may come in."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None takes the first free one from 7860."""
    share: bool = False
    auth: tuple[str, str] | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Host names under which the studio may be reached, besides localhost and, when it listens beyond it, IP addresses."""
    embedded: bool = False
    """The page may stand in a frame of another site."""
    trust_proxy: bool = False
    """A proxy stands in front of the studio, and who asks is who the proxy says."""

    @property
    def is_private(self) -> bool:
        """Only somebody at this computer can open the page."""
        return not self.share and self.host in ("127.0.0.1", "localhost", "::1")


def make_context(output_dir: Path, allowed_dirs: Sequence[Path], is_private: bool) -> Context:
    """What the tabs share. Without --allowed_dir, a private studio may use every folder, any other one only its own."""
    output_dir = output_dir.expanduser().resolve()
    output_dir.mkdir(parents=True, exist_ok=True)
    given = tuple(folder.expanduser().resolve() for folder in allowed_dirs)
    roots = (output_dir, *given) if given or not is_private else files.everything()
    queue = PredictionQueue(WorkerBackend(), output_dir)
    return Context(JobSupervisor(output_dir), secrets.token_urlsafe(24), output_dir, roots, queue, is_private)


def make_app(context: Context) -> gr.Blocks:
    """The page."""
    with page.blocks(TITLE, (3600, 86400)) as demo:
        page.part("top", {"token": context.token})
        with gr.Tabs(elem_classes=["kl-tabs"]):
            with gr.Tab("Train", id="train"):
                train_tab.build(context, demo)
            with gr.Tab("Data", id="data"):
                data_tab.build()
            with gr.Tab("Runs", id="runs"):
                runs_tab.build()
            with gr.Tab("Tools", id="tools"):
                tools_tab.build()
            with gr.Tab("Generate", id="generate"):
                inference_tab.build()
            with gr.Tab("Help", id="help"):
                help_tab.build()
    return demo


def make_inference_app(context: Context) -> gr.Blocks:
    """The page of --inference_only: the Generate tab and nothing else."""
    with page.blocks(TITLE, (3600, 86400)) as demo:
        page.part("top", {"token": context.token})
        inference_tab.build()
    return demo


def own_routes(context: Context, inference_only: bool = False) -> list[Route]:
    """Our routes beside gradio's: the page's modules, and the live data, which needs the token."""
    menu = predict_routes.studio_menu(context)
    compared = Comparisons(menu, context.predictions, context.output_dir)
    context.at_end.append(compared.close)
    links = None if context.is_private else vote_links.VoteLinks(compared)
    routes = [
        page.route(),
        *predict_routes.routes(menu, context.predictions),
        # Before those of the grids, whose last one takes any deed.
        *pick_routes.routes(pick_routes.Picks(compared, context.supervisor, context.output_dir, context.roots)),
        *comparison_routes.routes(compared, links),
        *(vote_links.routes(links) if links is not None else ()),
        *browsing.routes(context),
    ]
    if inference_only:
        return routes
    return [
        *routes,
        *live.routes(context.supervisor, context.token),
        *desk.routes(context.supervisor),
        *notices.routes(context, notices.Notices(context.output_dir, context.is_private)),
        *train_tab.routes(context),
        *tools.routes(context),
        *drawing.routes(context),
        *datasets.routes(context),
        *guide.routes(context),
        *data_room.routes(context),
    ]


def until_ended() -> None:
    """Waits for Ctrl-C or SIGTERM."""
    ended = threading.Event()
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), lambda *_: ended.set())
    # With a timeout, because on Windows a wait without one hears no signal.
    while not ended.wait(1.0):
        continue


def wait(demo: gr.Blocks, context: Context) -> None:
    """Serves until Ctrl-C or SIGTERM, then ends the server in good order. Trainings go on without it."""
    until_ended()
    demo.close(verbose=False)
    for end in context.at_end:
        end()
    context.predictions.close()
    context.supervisor.close()


def launch(context: Context, server: Server, inference_only: bool = False) -> tuple[gr.Blocks, str, str | None]:
    """Starts the server and returns the page, its address, and the public one with share."""
    return serve(
        make_inference_app(context) if inference_only else make_app(context), own_routes(context, inference_only), context.token, server
    )


def serve(demo: gr.Blocks, routes: list[Route], token: str, server: Server) -> tuple[gr.Blocks, str, str | None]:
    """Starts the server of a page behind the guard."""

    def knows(cookies: Mapping[str, str]) -> bool:
        """Whether gradio has given one of these cookies to somebody who logged in."""
        app = demo.app
        return any(cookies.get(f"{name}-{app.cookie_id}") in app.tokens for name in ("access-token", "access-token-unsecure"))

    # A Space is reached through its host's proxy alone.
    trust_proxy = server.trust_proxy or server.embedded
    guard = Middleware(
        Guard,
        token=token,
        names=list(server.allowed_hosts),
        open_to_network=not server.is_private,
        share=server.share,
        embedded=server.embedded,
        trust_proxy=trust_proxy,
        knows=knows if server.auth else None,
    )
    if not trust_proxy:
        # Read by uvicorn, which otherwise takes a local client's word for its address.
        os.environ["FORWARDED_ALLOW_IPS"] = ""
    app_kwargs: dict[str, Any] = {
        "routes": routes,
        "middleware": [guard, Middleware(Kept)],
        "docs_url": None,
        "redoc_url": None,
        "openapi_url": None,
    }
    # Gradio looks for orders a thousand times a second and for progress a hundred times, which takes a twelfth of a core day and night.
    # Of ours, only a check of a data set goes through its queue.
    demo._queue.sleep_when_free, demo._queue.progress_update_sleep_when_free = 0.1, 0.1
    _, local, public = demo.launch(
        server_name=server.host,
        server_port=server.port,
        share=server.share,
        auth=server.auth,
        theme=theme.make(),
        css=page.style_sheet(),
        head=page.head(),
        app_kwargs=app_kwargs,
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
        footer_links=[],
        max_file_size="50mb",
        inbrowser=False,
        quiet=True,
        prevent_thread_lock=True,
    )
    # Gradio puts its own middleware around ours, and its CORS one answers preflights for any origin before the guard hears of them.
    demo.app.user_middleware.sort(key=lambda item: (item.cls is not Guard, item.cls is not Kept))
    demo.app.middleware_stack = demo.app.build_middleware_stack()
    return demo, local, public
