"""The toy Krea 2 recipe: captions are read as Krea2Pipeline and the family read them, and its loss is that of what is expected."""

from __future__ import annotations

import pytest
import torch
from diffusers import Krea2Pipeline

from sd_scripts.toy import krea2, qwen_vae
from sd_scripts.toy.krea2 import CaptionReader
from sd_scripts.toy.tokens import KREA2_MAX_TOKENS

CAPTIONS = ["a red circle at the top left", "", "Square"]


@pytest.fixture(scope="module")
def reader() -> CaptionReader:
    return krea2.new_reader(0)


def test_captions_are_read_as_the_pipeline_reads_them(reader: CaptionReader) -> None:
    vae = qwen_vae.new_vae(0)
    pipeline = Krea2Pipeline(None, vae, reader.encoder, reader.tokenizer, None)
    text, seen = reader.known(CAPTIONS)
    with torch.no_grad():
        wanted, mask = pipeline.get_text_hidden_states(CAPTIONS, KREA2_MAX_TOKENS)
    for rows, own, theirs, real in zip(text, seen, wanted, mask, strict=True):
        torch.testing.assert_close(rows[own], theirs[real], rtol=0, atol=1e-5)
