"""Names of devices: what this machine has is taken, anything else is a sentence."""

from __future__ import annotations

import pytest
import torch

from sd_scripts.library.core.devices import device_of
from sd_scripts.schema.errors import OptionError


def test_a_device_that_is_there_is_taken_and_none_takes_the_default() -> None:
    assert device_of("vae_device", "cpu", torch.device("meta")) == torch.device("cpu")
    assert device_of("vae_device", None, torch.device("meta")) == torch.device("meta")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "vae_device: cuda:5 asked, 2 GPUs here; write cuda:0 to cuda:1, or cpu, or leave it empty"),
        (1, "vae_device: cuda:5 asked, 1 GPU here; write cuda:0 or cpu"),
        (0, "vae_device: cuda:5 asked, no GPU here; write cpu"),
    ],
)
def test_a_gpu_that_is_not_there_is_a_sentence(count: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(OptionError) as caught:
        device_of("vae_device", "cuda:5", torch.device("cpu"))
    assert words in str(caught.value) and caught.value.problems[0].option == "vae_device"
    if count:
        assert device_of("vae_device", f"cuda:{count - 1}", torch.device("cpu")).index == count - 1
