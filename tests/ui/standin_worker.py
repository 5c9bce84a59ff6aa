"""A process that speaks the protocol of the prediction worker and predicts nothing: what the backend and the queue are tried on.

It paints in the colour of the seed. Words in the prompt make it misbehave: `slow`, `fail`, `die`, `chatter`, `hang`.
Given a file, it is slow until that is there.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

cancelled: set[str] = set()
orders: list[dict[str, Any]] = []
arrived = threading.Condition()


def tell(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def thumbnail(level: int) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), (level, level, level)).save(stream, format="JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()


def predict(order: dict[str, Any]) -> None:
    ident, prompt = order["id"], str(order.get("prompt") or order.get("prompt_list") or "")
    if "fail" in prompt:
        tell("failed", id=ident, text="steps: 0 is too few", problems=[{"option": "steps", "message": "steps: 0 is too few"}], advice="")
        return
    if "chatter" in prompt:
        sys.stdout.write("a library prints this\n")
    if "die" in prompt:
        sys.stderr.write("last words of the worker\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    variants = [
        {"label": v.get("label", ""), "lora": v.get("lora", []), "lora_weight": v.get("lora_weight", [])}
        for v in order.get("variants", [{}])
    ]
    steps, seed = int(order.get("steps", 40)), int(order.get("seed") or 7)
    tell("loading", id=ident, text=str(order.get("pretrained_model_name_or_path")))
    tell("loaded", id=ident, model_version="edit-2509", seconds=0.1, devices={}, precision="no", controls=[1, 3])
    tell("started", id=ident, size=[64, 64], seeds=[seed], steps=steps, images=len(variants), variants=[v["label"] for v in variants])
    files: list[str] = []
    for number, variant in enumerate(variants):
        for step in range(1, steps + 1):
            while "hang" in prompt and ident not in cancelled:
                time.sleep(0.01)
            time.sleep(0.2 if "slow" in prompt and not any(map(os.path.exists, sys.argv[1:])) else 0.002)
            if ident in cancelled:
                tell("cancelled", id=ident, files=files)
                return
            tell(
                "step",
                id=ident,
                step=step,
                steps=steps,
                variant=number,
                done=number,
                images=len(variants),
                seconds=0.1,
                preview=thumbnail(step),
            )
        file = Path(order["out"]) / f"{number + 1}.png"
        kept = PngImagePlugin.PngInfo()
        kept.add_text("prompt", prompt)
        Image.new("RGB", (64, 64), (seed % 256, 80 * number % 256, 99)).save(file, pnginfo=kept)
        files.append(str(file))
        variant["files"] = [str(file)]
        tell("image", id=ident, file=str(file), seed=seed, variant=number, index=0, width=64, height=64)
    tell("done", id=ident, files=files, seeds=[seed], variants=variants, grid=None, size=[64, 64], seconds=0.5)


def work() -> None:
    while True:
        with arrived:
            arrived.wait_for(lambda: bool(orders))
            order = orders.pop(0)
        predict(order)


def main() -> None:
    tell("ready", protocol=1, pid=os.getpid(), devices=["cpu"])
    threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "cancel":
            cancelled.add(order["id"])
        elif order["op"] == "predict":
            with arrived:
                orders.append(order)
                arrived.notify()


if __name__ == "__main__":
    main()
