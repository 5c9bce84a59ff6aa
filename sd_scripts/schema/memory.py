"""What a run keeps where, and which kernels compute it: options that trade speed for memory, or the other way round."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .fields import Section, Show, WholeNumber

_RECOMPUTED = Show(needs="gradient_checkpointing")

DECIDES_FIT = frozenset(
    """blocks_to_swap transformer_quantization text_encoder_quantization gradient_checkpointing gradient_checkpointing_cpu_offload
    fused_backward_pass full_bf16 distributed_strategy vae_tiling train_batch_size optimizer_type""".split()
)
"""Options that decide whether a run fits into memory: what contradicts them gives way where a file of another program has both."""


class MemoryOptions(Section):
    """What is kept on the GPU, and which kernels compute it. docs/memory.md says what options cost, docs/equivalence.md what they do."""

    title: ClassVar[str] = "Memory"

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory, about a third slower, same result."""
    gradient_checkpointing_share: Annotated[float, Field(gt=0, le=1), _RECOMPUTED] = 1.0
    """Share of the blocks that are recomputed, spread evenly; others keep their activations, which costs memory and saves time."""
    gradient_checkpointing_cpu_offload: Annotated[bool, _RECOMPUTED] = False
    """Keep what a recomputed block begins with in host RAM until the backward pass. Saves what is left of the memory of activations,
    which counts with large images and many blocks."""
    blocks_to_swap: WholeNumber = 0
    """Keep this many of the network's blocks in host RAM and bring each to the GPU when it is due, while the block before computes.
    Same result, less GPU memory, and some of the speed. The largest number is that of the blocks."""
    attention_backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """PyTorch's kernels for attention. auto takes the fastest that can compute a call; one that is named is tried before the run, which
    stops with a sentence where it does not work. math is the slow reference, which keeps all attention weights in memory."""
    cuda_allow_tf32: bool = False
    """Let NVIDIA GPUs multiply float32 numbers with ten bits of precision: faster with mixed_precision no, no difference with bf16."""
    cuda_cudnn_benchmark: bool = False
    """Let cuDNN try its kernels for convolutions on each new size and keep the fastest. Helps U-Nets with few sizes."""
    vae_tiling: bool = False
    """Decode previews in tiles: large ones then need little memory. Seams are blended, so previews differ a little; training does not."""
    preflight: Literal["auto", "on", "off"] = "auto"
    """Before the first step, try the largest batch with the longest texts and one preview, and throw the results away, so that a run that
    does not fit says so at once and not after hours. Changes nothing. auto tries on a GPU."""
    oom_fallback: bool = False
    """When memory runs out in a step, turn on the next memory option that leaves the result as it is (gradient_checkpointing, its offload,
    smaller batches with as many accumulation steps, more blocks_to_swap), say so, and do the same step again instead of ending the run."""

    of_convolutions: ClassVar[bool] = False
    """Whether the network sees both sides of an image, and not only how many places it has."""

    @property
    def in_channels_last(self) -> bool:
        """Whether the channels of the network's images lie side by side in memory."""
        return False

    @property
    def steps_in_backward(self) -> bool:
        """Whether each weight is moved as soon as its gradient is there."""
        return False

    @property
    def weights_in_bf16(self) -> bool:
        """Whether the trained weights are kept in bf16 and rounded stochastically."""
        return False


class FullMemoryOptions(MemoryOptions):
    """Memory options of a full fine-tune; gradients and weights of an adapter are small, and 16 bits would lose its updates."""

    fused_backward_pass: bool = False
    """Move each weight as soon as its gradient is there, and let go of the gradient: gradients of the whole model are never in memory
    together. Same result. Gradients cannot be clipped together then (max_grad_norm = 0), nor summed over several batches or GPUs."""
    full_bf16: bool = False
    """Keep the trained weights in bf16, which halves their memory, and round them stochastically after each step, so that small updates are
    not lost on average. Without it they are float32. Needs mixed_precision bf16."""

    @property
    def steps_in_backward(self) -> bool:
        return self.fused_backward_pass

    @property
    def weights_in_bf16(self) -> bool:
        return self.full_bf16


class UNetMemoryOptions(MemoryOptions):
    """Memory options of a network with convolutions."""

    of_convolutions: ClassVar[bool] = True

    channels_last: bool = False
    """Keep the channels of the network's images side by side in memory, which convolutions on recent GPUs like better. Same result up to
    rounding."""

    @property
    def in_channels_last(self) -> bool:
        return self.channels_last


class UNetFullMemoryOptions(UNetMemoryOptions, FullMemoryOptions):
    """Memory options of a full fine-tune of a U-Net."""
