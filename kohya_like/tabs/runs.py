"""The Runs tab: all runs on disk, and one of them in full. web/runs/runs.js draws it; only "Use these settings" passes through gradio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from .. import page
from ..context import Context


def build(context: Context) -> gr.HTML:
    """Makes the tab inside the surrounding gr.Tab. "Use these settings" goes through context.train, where there is one."""
    view = page.part("runs", {"run": ""}, look="kl-live", elem_id="kl-runs")
    door = context.train
    if door is not None:
        view.submit(using(context), inputs=view, outputs=list(door.outputs), queue=False, show_progress="hidden", api_visibility="private")
    return view


def using(context: Context) -> Callable[[Mapping[str, Any] | None], Any]:
    """What "Use these settings" does with the value of the view: the form gets the config.toml of the run of that name.

    option: a field of the form that is shown then.
    """

    def use(value: Mapping[str, Any] | None) -> Any:
        door = context.train
        assert door is not None, "wired only with a Train tab"
        job = context.supervisor.find(str((value or {}).get("run", "")))
        if job is None:
            return gr.skip()
        return door.fill(job.run.config, str((value or {}).get("option", "")))

    return use
