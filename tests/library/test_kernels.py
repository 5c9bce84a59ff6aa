"""Kernels that are chosen by name: which of them computes, that the result stays, and that everything is as before afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.memory import kernels
from sd_scripts.library.train.checkpoint import read_state
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.memory import MemoryOptions
from tests.library.batches import a_call
from tests.library.small_trainers import make, options_of, samples_of, trained

CPU = torch.device("cpu")
FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"


def operations(call: Any) -> set[str]:
    """Names of what PyTorch computed, in the forward and in the backward pass."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        # One by turns; all with --all.
        pytest.param(family, name, marks=pytest.mark.long if (row + column) % 2 else ())
        for row, family in enumerate(families.NAMES)
        for column, name in enumerate(("flash", "math"))
    ],
)
def test_the_named_backend_computes_every_attention_of_the_network(family: str, name: str) -> None:
    used, unused = (FLASH, MATH) if name == "flash" else (MATH, FLASH)
    known = families.family(family)
    parts = known.tiny()
    # Texts of different lengths, where the family has them.
    parts.settings["apply_t5_attn_mask"] = True
    x_t, t, conditions = a_call(family, parts, size=2, seed=random.getrandbits(20))
    plain = known.denoise(parts, x_t, t, conditions)
    kernels.use_attention(parts.backbone, name)
    parts.backbone.requires_grad_(True)
    found = []
    done = operations(lambda: found.append(known.denoise(parts, x_t, t, conditions)) or found[0].sum().backward())
    assert used in done and unused not in done
    torch.testing.assert_close(found[0].detach(), plain, rtol=1e-4, atol=1e-5)


def test_what_is_recomputed_uses_it_too_and_the_vae_does_not() -> None:
    known = families.family("sdxl")
    parts = known.tiny()
    kernels.use_attention(parts.backbone, "math")
    parts.backbone.requires_grad_(True).train()
    parts.backbone.enable_gradient_checkpointing()
    x_t, t, conditions = a_call("sdxl", parts)
    assert FLASH not in operations(lambda: known.denoise(parts, x_t, t, conditions).sum().backward())
    assert FLASH in operations(lambda: known.decode(parts, x_t))


# That weights with channels side by side train as others, test_equivalence says.
def test_the_layout_reaches_convolutions_of_adapters_and_what_they_make(tmp_path: Path) -> None:
    trainer = make(("sdxl", "network"), tmp_path, channels_last=True, conv_dim=2)
    adapters = [weight for name, weight in trainer.learner.weights.items() if weight.ndim == 4 and weight.shape[-1] > 1]
    assert adapters and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in adapters)
    seen = []
    handle = trainer.learner.model.parts.backbone.conv_norm_out.register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0])
    )
    trainer.steps.step(0)
    handle.remove()
    assert seen[0].is_contiguous(memory_format=torch.channels_last) and not seen[0].is_contiguous()


@pytest.mark.parametrize("kind", [("sd", "full"), ("sdxl", "network")], ids="/".join)
def test_weights_with_channels_side_by_side_go_on_from_a_state_to_the_same_bits(kind: tuple[str, str], tmp_path: Path) -> None:
    given = {"channels_last": True, "optimizer_type": "AdamW", "learning_rate": 1e-3, **({"conv_dim": 2} if kind[1] == "network" else {})}
    whole, part = (make(kind, tmp_path / name, **given) for name in ("whole", "part"))
    trained(whole)
    part.load_state_dict(read_state(whole.checkpointer.save_state(whole.step, whole.state_dict()))[0])
    (losses, weights), (other_losses, others) = trained(whole), trained(part)
    assert losses == other_losses and torch.equal(weights, others)


@pytest.mark.parametrize("kind", RUNS, ids="/".join)
def test_a_backend_that_does_not_work_is_refused_with_those_that_do(kind: tuple[str, str]) -> None:
    for name in ("auto", "flash", "math"):
        kernels.check(options_of(kind, attention_backend=name), CPU)
    with pytest.raises(OptionError, match=r"attention_backend: cudnn cannot compute heads .* on this CPU.*; here work auto, flash, math"):
        kernels.check(options_of(kind, attention_backend="cudnn"), CPU)


def test_weights_that_are_sharded_have_no_other_layout() -> None:
    shared = {"multi_gpu": True, "num_gpus": 2, "distributed_strategy": "fsdp2"}
    kernels.check(options_of(("sd", "full"), **shared), CPU)
    with pytest.raises(OptionError, match="channels_last: distributed_strategy fsdp2"):
        kernels.check(options_of(("sd", "full"), channels_last=True, **shared), CPU)


def test_a_probe_has_a_mask_where_texts_differ_in_length() -> None:
    def refused(kind: tuple[str, str], **given: Any) -> str:
        with pytest.raises(OptionError) as caught:
            kernels.check(options_of(kind, attention_backend="cudnn", **given), CPU)
        return str(caught.value)

    assert "mask" in refused(("ddpm", "scratch"), train_batch_size=1)
    assert "mask" in refused(("flux", "network"), apply_t5_attn_mask=True)
    assert "mask" not in refused(("flux", "network")) and "mask" not in refused(("sdxl", "network"))
    assert "mask" in refused(("qwen_edit", "network")) and "mask" not in refused(("qwen_edit", "network"), train_batch_size=1)


def test_heads_are_those_of_the_network_once_it_is_there() -> None:
    known = {"sd": (8, 16), "sdxl": (16,), "flux": (16,), "lgt": (8,)}
    for family, sizes in known.items():
        assert kernels.head_sizes_of(families.family(family).tiny().backbone) == sizes, family
    with pytest.raises(OptionError, match="heads of 16 numbers"):
        kernels.check(options_of(("flux", "network"), attention_backend="cudnn"), CPU, families.family("flux").tiny().backbone)


def test_a_call_without_gradient_falls_back_to_a_kernel_that_can_and_one_with_gradient_is_explained() -> None:
    known = families.family("flux")
    parts = known.tiny()
    call = a_call("flux", parts)
    plain = known.denoise(parts, *call)
    kernels.use_attention(parts.backbone, "efficient")
    with torch.no_grad():
        torch.testing.assert_close(known.denoise(parts, *call), plain)
    refused = pytest.raises(TrainingError, match=r"attention_backend efficient cannot compute .* choose auto")
    with refused, kernels.chosen(MemoryOptions(attention_backend="efficient"), CPU), torch.enable_grad():
        known.denoise(parts, *call)


def switches() -> tuple[Any, ...]:
    backends = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        backends.cudnn.benchmark,
    )


def test_switches_of_a_gpu_are_set_for_the_run_alone() -> None:
    before, gpu = switches(), torch.device("cuda")
    with kernels.chosen(MemoryOptions(cuda_allow_tf32=True, cuda_cudnn_benchmark=True), gpu):
        assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "tf32"
        assert torch.backends.cudnn.benchmark
        # What inductor asks for.
        assert torch.get_float32_matmul_precision() == "high"
    assert switches() == before
    with pytest.raises(KeyError), kernels.chosen(MemoryOptions(cuda_allow_tf32=True, cuda_cudnn_benchmark=True), gpu):
        raise KeyError
    assert switches() == before
    with kernels.chosen(MemoryOptions(), gpu):
        assert switches() == before
    with kernels.chosen(MemoryOptions(cuda_allow_tf32=True, cuda_cudnn_benchmark=True), CPU):
        assert switches() == before


def test_the_samples_of_these_tests_have_texts_of_different_lengths() -> None:
    assert len({len(condition["text"]) for _, condition in samples_of("qwen_edit", 0)}) > 1
