"""The Help tab: a short guide, and every option with search, from the schema."""

from __future__ import annotations

import gradio as gr

from sd_scripts.families import FACTS, RUNS

from .. import page


def _families(*methods: str) -> list[str]:
    """The families with runs of these methods."""
    return [facts.label for name, facts in FACTS.items() if any((name, method) in RUNS for method in methods)]


_OF_BASES, _FROM_NOTHING = _families("network", "full"), _families("scratch")
GUIDE = f"""
<div class="kl-card kl-guide">
<h2>From a folder of images to a LoRA or a model</h2>
<ol>
<li><strong>Images.</strong> Put 15 or more into one folder, each with a text file of the same name (<code>cat.jpg</code>,
<code>cat.txt</code>) that says what is on it. Kohya's sub-folders <code>10_token class</code> work too.</li>
<li><strong>Family and training mode.</strong>
{", ".join(_OF_BASES)}: a LoRA beside the model, or the model itself with DreamBooth for one subject,
fine-tuning for many captioned images. From nothing: {", ".join(_FROM_NOTHING)}. What you have typed goes along.</li>
<li><strong>Base model.</strong> Give a <code>.safetensors</code> file, a diffusers folder or a hub id. <code>toy</code> is a small
model of each family that is built in and trains on any computer.</li>
<li><strong>Preset.</strong> Choose one that fits your graphics card. You see what it would change before it does.</li>
<li><strong>Check data set</strong> shows how many images there are, how they will be cut, and which cannot be read.</li>
<li><strong>Start training.</strong> The curve and the previews appear beside the form. You may close the browser, and even the studio:
the run goes on, and the Runs tab finds it again.</li>
<li><strong>Use the file.</strong> It lies in the run's folder and works in ComfyUI, A1111, Forge, diffusers and kohya's scripts.</li>
</ol>
<h2>Good to know</h2>
<dl>
<dt>Stop and go on</dt><dd>Stop finishes the step, saves the state and ends. Resume in the Runs tab continues from there; on a CPU to the
same bits as if it had never stopped.</dd>
<dt>The same run elsewhere</dt><dd>Print command shows what Start runs. Paste it into a terminal here, or take the TOML to another
computer.</dd>
<dt>From kohya, or from a LoRA</dt><dd>Drop a configuration or a LoRA file on the Train tab: the form fills, and a report says what became
of every key.</dd>
<dt>Which setting first?</dt><dd>The learning rate and the number of steps decide most. If previews look burnt, halve the rate; if nothing
is learned, double the steps.</dd>
<dt>Out of memory</dt><dd>In this order: gradient_checkpointing on, train_batch_size down, blocks_to_swap up, transformer_quantization, then
resolution down. oom_fallback does the first three by itself, in the step that did not fit.</dd>
<dt>Nothing leaves this computer</dt><dd>No analytics, no fonts or scripts from elsewhere. Only a hub id as base model, or W&amp;B when you
choose it, uses the network.</dd>
</dl>
</div>
"""


def build() -> None:
    """Makes the tab inside the surrounding gr.Tab."""
    gr.HTML(GUIDE, apply_default_css=False)
    page.part("reference")
