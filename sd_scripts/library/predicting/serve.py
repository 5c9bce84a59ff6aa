"""The worker that `qwen_image_predict.py --serve` is: requests as JSON lines on standard input, events as JSON lines on standard output.

Standard output carries events and nothing else; what libraries print, and lines for people, go to standard error. One request is worked on
at a time, in the order of arrival. The worker ends when standard input closes (what runs is cancelled), on `quit`, and on SIGTERM.
Pictures travel as paths of files on this machine. Unknown keys of a request are refused with a sentence, unknown events are to be ignored.

Requests
--------

`{"op": "predict", "id": "a1", ...}`: make pictures. `id` is any text that is not in use. All other keys are optional:

* every option of `schema/predict.py` under its flat name: `prompt`, `images`, `negative_prompt`, `steps`, `true_cfg_scale`, `seed`, `size`
  ([width, height]), `num_images`, `out` (folder of the files), `lora`, `lora_weight`, and those of the model:
  `pretrained_model_name_or_path`, `model_version`, `vae`, `text_encoder`, `control_resolution`, `transformer_quantization`,
  `text_encoder_quantization`, `vae_device`, `text_encoder_device`, `transformer_device`, `precision`, `vae_dtype`, `offload`, ...
  A key that is absent has its value from the worker's command line, or else its default. The model is loaded with the first request and
  again only when one of its options changes; other adapters or strengths never load it again.
* `variants`: compare mode, a list of `{"lora": [...], "lora_weight": [...], "label": "..."}` in place of lora and lora_weight; `{}` is the
  base model alone. Every variant makes the same pictures from the same seeds; label defaults to the names of its files.
* `preview_every`: steps between two thumbnails, 0 for none; 1 when absent.

`{"op": "cancel", "id": "a1"}`: ends that request, between two steps when it runs, at once while it waits.
`{"op": "free", "id": "f1"}`: lets go of the model and its memory after what was asked before it; `id` is optional.
`{"op": "quit"}`: cancels everything and ends the worker.

Events
------

Every event has `event`, and `id` where it belongs to a request. Each predict request ends with exactly one of done, failed, cancelled.

* `{"event": "ready", "protocol": 1, "pid": 123, "devices": ["cpu", "cuda:0"]}`: the first line, before anything heavy is loaded.
* `{"event": "queued", "id", "ahead": 2}`: accepted; `ahead` requests are before it. Sent again whenever that number changes; 0 is next.
* `{"event": "loading", "id", "text": "toy"}`, then `{"event": "loaded", "id", "model_version": "edit-2509", "seconds": 3.1,
  "devices": {"transformer": "cuda:0", "vae": "cpu", "text_encoder": "cpu"}, "precision": "bf16", "controls": [1, 3]}`: only when the model
  is loaded. `controls`: fewest and most control pictures of this model.
* `{"event": "started", "id", "size": [1024, 768], "seeds": [7], "steps": 40, "pictures": 2, "variants": ["base", "my lora"]}`: checked and
  under way. `pictures` counts over all variants.
* `{"event": "step", "id", "step": 3, "steps": 40, "variant": 0, "done": 0, "pictures": 2, "seconds": 1.2,
  "preview": "data:image/jpeg;..."}`: one step more of the picture at hand. `done`: pictures that are finished. `seconds`: since the start
  of the request. `preview`: a thumbnail of what the picture will be, or null.
* `{"event": "picture", "id", "file": "/…/1.png", "seed": 7, "variant": 0, "index": 0, "width": 1024, "height": 768}`: a picture is written.
* `{"event": "warning", "id", "text"}`: something is less than was asked for.
* `{"event": "done", "id", "files": [...], "seeds": [...], "variants": [{"label", "lora", "lora_weight", "files": [...]}], "grid": null,
  "size": [1024, 768], "seconds": 9.5}`: `files` in the order of variants, then of seeds. `grid`: one picture of all, in compare mode:
  variants are its columns, seeds its rows.
* `{"event": "failed", "id", "text", "problems": [{"option": "steps", "message": "..."}], "remedy": ""}`: sentences for a person; `problems`
  where options are wrong, empty otherwise. `id` is null for a line that is no request.
* `{"event": "cancelled", "id", "files": [...]}`: `files` that were finished before.
* `{"event": "freed", "id"}`: the model is gone from memory.

`InProcess` (in_process.py) gives the same events from the same requests without a second process.
"""

from __future__ import annotations

PROTOCOL = 1
"""Number of this protocol; a worker says it with ready."""
