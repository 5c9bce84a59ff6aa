"""The page of an exported Space: the Generate tab on one base model and its own LoRA files, and the same as an API endpoint.

No path can be typed, no process is started, and what visitors give and get is removed after an hour. The model runs in this process;
app.py of the Space hands in how, so that this module imports no torch.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from sd_scripts.schema.errors import OptionError

from . import app, page, predict_routes
from .inference import Backend, Event
from .predict_routes import LoraFile, Menu
from .predictions import ENDED, PredictionQueue
from .tabs import inference as inference_tab

SHOWN = frozenset({"prompt", "negative_prompt", "steps", "true_cfg_scale", "seed", "size", "num_images"})
MOST = {"steps": 100, "size": 2048, "num_images": 4, "true_cfg_scale": 20}
"""More would take the device from the next visitor for too long."""
KEEP_SECONDS = 3600.0
WAIT_SECONDS = 1800.0
"""A call of the endpoint waits this long for its image."""


@dataclass(frozen=True)
class Lent:
    """A backend whose requests go through a function of its own: one that gets a GPU for the time of the call."""

    events: Callable[[Mapping[str, Any]], Iterator[Event]]
    engine: Backend

    def submit(self, request: Mapping[str, Any]) -> Iterator[Event]:
        return self.events(request)

    def cancel(self, ident: str) -> None:
        self.engine.cancel(ident)

    def free(self) -> None:
        self.engine.free()

    def holds_memory(self) -> bool:
        # On a page for everybody nobody frees what the others use.
        return False


def menu_of(base: str, loras: Sequence[Path]) -> Menu:
    """What the page of a Space offers."""
    offered = [LoraFile(path.name, path, "This Space", path.stem) for path in loras]
    return Menu(loras=lambda: offered, roots=None, fixed={"pretrained_model_name_or_path": base}, shown=SHOWN, most=MOST)


def make_page(title: str, token: str, menu: Menu, queue: PredictionQueue) -> gr.Blocks:
    """The page, with the endpoint `/predict`."""
    with page.blocks(title, (600, 3600)) as demo:
        page.part("top", {"token": token, "title": title, "tag": ""})
        inference_tab.build()
        with gr.Row(visible=False):
            image = gr.Image(type="filepath", label="image")
            prompt, negative = gr.Textbox(label="prompt"), gr.Textbox(" ", label="negative_prompt")
            steps, cfg, seed = gr.Number(20, label="steps"), gr.Number(4.0, label="true_cfg_scale"), gr.Number(-1, label="seed")
            size, weight = gr.Textbox("", label="size"), gr.Number(1.0, label="lora_weight")
            made, used = gr.Image(type="filepath", format="png", label="result"), gr.Number(label="seed")
            gr.Button().click(
                endpoint(menu, queue),
                inputs=[image, prompt, negative, steps, cfg, seed, size, weight],
                outputs=[made, used],
                api_name="predict",
                concurrency_limit=4,
            )
    return demo


def endpoint(menu: Menu, queue: PredictionQueue) -> Callable[..., tuple[str, int]]:
    """What a call of `/predict` does: one image, with the LoRA files of the Space."""

    def predict(
        image: str | None,
        prompt: str,
        negative_prompt: str,
        steps: float,
        true_cfg_scale: float,
        seed: float,
        size: str,
        lora_weight: float,
    ) -> tuple[str, int]:
        """One image made from another by an instruction. A seed below 0 is drawn; size is width,height or empty; the strength is that
        of every LoRA file of this Space, and 0 is the base model alone."""
        session = secrets.token_hex(16)
        texts = {"prompt": prompt, "negative_prompt": negative_prompt, "true_cfg_scale": f"{true_cfg_scale:g}", "size": size}
        texts |= {"steps": f"{steps:g}", "seed": "" if seed < 0 else f"{int(seed)}"}
        loras = [{"name": item.name, "weight": lora_weight} for item in menu.loras()] if lora_weight else []
        try:
            images = [queue.take_image(Path(image).read_bytes())[0]] if image else []
            asked = {"texts": texts, "images": images, "loras": loras}
            prediction = queue.submit(predict_routes.order_of(menu, queue, asked, session), session)
        except OptionError as err:
            raise gr.Error("\n".join(str(problem) for problem in err.problems)) from err
        deadline = time.monotonic() + WAIT_SECONDS
        while prediction.state not in ENDED:
            if time.monotonic() > deadline:
                queue.cancel(prediction)
                raise gr.Error("This took too long and was cancelled; ask for fewer steps or a smaller size.")
            time.sleep(0.05)
        if prediction.state != "done":
            raise gr.Error(prediction.text or "This was cancelled.")
        result = queue.entry(prediction.folder)["results"][0]
        return str(queue.results / prediction.folder / result["file"]), int(result["seed"])

    return predict


def server_of(environment: Mapping[str, str]) -> app.Server:
    """Where the page listens: on a Space as the platform says, elsewhere on this computer only."""
    host = environment.get("GRADIO_SERVER_NAME", "0.0.0.0" if "SPACE_ID" in environment else "127.0.0.1")
    port = environment.get("GRADIO_SERVER_PORT", "7860" if "SPACE_ID" in environment else "")
    names = tuple(name for name in (environment.get("SPACE_HOST", ""),) if name)
    return app.Server(host=host, port=int(port) if port else None, allowed_hosts=names, embedded="SPACE_ID" in environment)


def serve(title: str, base: str, loras: Sequence[Path], backend: Backend) -> None:
    """Shows the page until the process is ended."""
    with tempfile.TemporaryDirectory(prefix="predictions-") as folder:
        queue = PredictionQueue(backend, Path(folder), keep_results_seconds=KEEP_SECONDS)
        menu, token = menu_of(base, loras), secrets.token_urlsafe(24)
        routes = [page.route(), *predict_routes.routes(menu, queue)]
        demo, local, _ = app.serve(make_page(title, token, menu, queue), routes, token, server_of(os.environ))
        sys.stdout.write(f"The page is at {local}\n")
        sys.stdout.flush()
        app.until_ended()
        demo.close(verbose=False)
        queue.close()
