"""What the program knows of the family without loading it."""

from __future__ import annotations

from sd_scripts.schema.facts import FamilyFacts, NetworkFacts

FACTS = FamilyFacts(
    label="Style transfer",
    place=80,
    edits=False,
    evaluates=True,
    demo=None,
    labels={
        "caption_dropout_rate": "Style dropout rate",
        "sample_every_n_epochs": "Evaluate every N epochs",
        "sample_every_n_steps": "Evaluate every N steps",
        "sample_at_first": "Evaluate before the first step",
        "sample_steps": "Evaluation steps",
        "sample_sampler": "Evaluation sampler",
        "sample_strength": "Evaluation strength",
        "sample_start": "Evaluation start",
        "sample_start_noise": "Evaluation start noise",
        "sample_cfg_scale": "Evaluation CFG scale",
        "sample_temperature": "Evaluation temperature",
        "target": "Target style",
        "source": "Source style",
    },
    kohya=None,
    adapters=None,
    companions=("vae",),
    whole_files=True,
    network=NetworkFacts(
        head_sizes=lambda model: (model.attention_head_dim,),
        text_lengths_vary=lambda model: False,
        always_masked=False,
        mostly_weights=False,
        guided_together=True,
        quantized_encoder=None,
        vae_in_16_bits=True,
    ),
    lora_module=None,
    signs=(),
    bases=(),
)
