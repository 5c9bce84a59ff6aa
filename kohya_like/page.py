"""The page's own files, which lie in web/, and the places on the page that they draw.

A module imports others by their place beside it, and is sent with them; see packing.py. The digest of all of them is a folder in their
addresses, so that a browser keeps each until one of them changes, and never mixes two versions.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.routes import App
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import form, packing
from .catalogues import catalogues, compiled

WEB = Path(__file__).resolve().parent / "web"
PLACE = "/kl/web/"
FIRST_LIBRARIES = ("vendor/preact/preact.module.js", "vendor/htm/htm.module.js")


@cache
def modules() -> dict[str, bytes]:
    """The page's modules by their paths. schema.js says what the options are; the others are files."""
    # "</" cannot stand in a script that somebody pastes into a page, and U+2028 ends a line in old engines.
    data = form.schema_json().replace("</", "<\\/").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    files = {path.relative_to(WEB).as_posix(): path.read_bytes() for path in WEB.rglob("*.js")}
    schema = f'import {{ schemaInWords }} from "./common/language.js";\nexport default schemaInWords({data});\n'
    return dict(sorted({**files, "schema.js": schema.encode()}.items()))


@cache
def folder() -> str:
    """The address under which the modules lie."""
    digest = hashlib.sha256()
    for name, content in modules().items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for path in catalogues().values():
        digest.update(path.read_bytes())
    return f"{PLACE}{digest.hexdigest()[:16]}/"


def _content(name: str) -> bytes:
    if name in catalogues():
        return compiled(catalogues()[name])
    return modules()[name] if name.startswith(packing.VENDOR) else packing.packed(_texts(), name, folder()).encode()


@cache
def _texts() -> dict[str, str]:
    return {name: content.decode() for name, content in modules().items() if not name.startswith(packing.VENDOR)}


@cache
def _packed(name: str) -> bytes:
    return gzip.compress(_content(name))


def route() -> Route:
    """The route of the modules. They are the same for everybody and need no token."""

    async def module(request: Request) -> Response:
        name = request.path_params["name"]
        if request.url.path != folder() + name or not (name in modules() or name in catalogues()):
            return Response(status_code=404)
        media_type = "application/json" if name in catalogues() else "text/javascript"
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(_content(name), media_type=media_type, headers=headers)
        return Response(_packed(name), media_type=media_type, headers={**headers, "content-encoding": "gzip"})

    return Route(PLACE + "{digest}/{name:path}", module)


def head() -> str:
    """Tags that let the browser fetch at once what it needs first, before it has read which imports which."""
    return "".join(f'<link rel="modulepreload" href="{folder()}{name}">' for name in (packing.FIRST, *FIRST_LIBRARIES))


def style_sheet() -> str:
    """All style sheets as one text, folder by folder. The one with the name of its folder comes first."""
    sheets = sorted(WEB.rglob("*.css"), key=lambda path: (path.parent.name, path.stem != path.parent.name, path.stem))
    return "\n".join(path.read_text(encoding="utf-8") for path in sheets)


@contextmanager
def blocks(title: str, delete_cache: tuple[int, int]) -> Iterator[gr.Blocks]:
    """A page that is made, without a server. Gradio makes one as a page is begun and another as it is done, which launch replaces: a fifth
    of the CPU time from here to the first answer.

    delete_cache: after how many seconds each time uploads are deleted that are older than how many.
    """
    create = App.create_app
    App.create_app = staticmethod(lambda *_args, **_options: None)
    try:
        with gr.Blocks(title=title, analytics_enabled=False, fill_width=True, delete_cache=delete_cache) as demo:
            yield demo
    finally:
        App.create_app = staticmethod(create)


def part(name: str, value: Any = None, events: tuple[str, ...] = (), look: str = "kl-part", **identity: Any) -> gr.HTML:
    """A gr.HTML whose inside is drawn by what main.js has under this name.

    events are the names of its own events; look is the class of its root: kl-part, or kl-live for runs. identity takes elem_id and
    elem_classes. A function, because gradio writes stub files for subclasses.
    """
    # Gradio learns the names of own events from the quoted words in this text, of which it makes a function. Chromium keeps functions that
    # are made of the same text over pages, with the place that they import from: a studio at another port would ask the one before.
    entry = f"location.origin + {json.dumps(folder() + packing.FIRST)}"
    given = f"{json.dumps(name)}, element, props, trigger, watch, {json.dumps(events)}"
    # One import for all parts keeps their order: of several that wait for a module, a browser lets any go on first, and the top has the
    # token that the others ask with.
    return gr.HTML(
        value,
        html_template=f"<div class='{look}'></div>",
        js_on_load=f"(window.kohyaLike ??= import({entry})).then((page) => page.mount({given}));",
        apply_default_css=False,
        **identity,
    )


def fieldset(group: str) -> gr.HTML:
    """The controls of one group; its value is {"run": kind of run, "values": {name: text}} and always what the person sees."""
    return part(f"fieldset:{group}", {"run": "", "values": {}}, elem_classes=["kl-fieldset"])
