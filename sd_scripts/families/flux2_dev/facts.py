"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.families.common.flux2_signs import DEV, is_flux2
from sd_scripts.families.common.transformer_facts import TransformerFacts, TransformerMarks, TransformerNetworkFacts
from sd_scripts.schema.facts import PublishedBase, Sign, TensorNames

TEXT_ENCODER = "a Mistral text encoder"


def _is_mistral(names: TensorNames) -> bool:
    """Layers with Llama's names: without Qwen's norms of queries and its biases. A Llama's heads are together as wide as its states; those
    of Mistral Small 3 are not (config.json: 32 heads of 128 at a width of 5120)."""
    rows, widths = (
        [shape[0] for name, shape in names.shapes.items() if name.endswith(f"layers.0.{end}.weight")]
        for end in ("self_attn.q_proj", "input_layernorm")
    )
    return rows not in ([], widths) and names.has("layers.0.mlp.gate_proj.weight") and not names.has("q_norm", "q_proj.bias")


FACTS = TransformerFacts(
    label="FLUX.2 dev",
    place=32,
    edits=True,
    demo=None,
    kohya=None,
    # Layers have Klein's names, so that they tell nothing.
    adapters=TransformerMarks(architectures=("flux_2_dev", "flux-2-dev", "flux2-dev", "flux.2-dev"), layers=r"(?!)"),
    companions=("vae", "text_encoder"),
    network=TransformerNetworkFacts(
        text_lengths_vary=lambda model: False, always_masked=False, mostly_weights=True, guided_together=False, quantized_encoder="te1"
    ),
    lora_module="networks.lora_flux_2",
    signs=(Sign(DEV, lambda names: is_flux2(names, guided=True)), Sign(TEXT_ENCODER, _is_mistral, companion=True)),
    bases=(
        PublishedBase(
            pieces=(), licence="FLUX's: the model and what is trained from it for non-commercial use, images are free", undistilled=None
        ),
    ),
)
