"""What kohya's memory options become: bits of weights, swapped blocks, checkpointing, fused backward passes, compiling."""

from __future__ import annotations

from sd_scripts.schema import kohya_words as words
from sd_scripts.schema.sheet import is_empty, is_off, shown, unless_off

from .sheet import KohyaSheet, Table, families_of, named, rules

MEMORY: Table = {}
rule = rules(MEMORY)

_FUSED = named("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")


@rule("fp8_base", "fp8_base_unet", "fp8_scaled")
@unless_off
def _few_bits(sheet: KohyaSheet, key: str) -> None:
    if sheet.run.method == "full":
        sheet.skip(key, "it is for adapters: weights that are trained themselves stay as they are")
    elif key in words.LACKING.get(sheet.run.script, ()):
        sheet.skip(key, "sd-scripts leaves it out for this family; set transformer_quantization if it is meant")
    elif key != "fp8_scaled" and sheet.on("fp8_scaled"):
        sheet.skip(key, "fp8_scaled says it, with a scale")
    else:
        sheet.take(key, "transformer_quantization", words.SWITCHES[key]["transformer_quantization"])


@rule("cpu_offload_checkpointing", "unsloth_offload_checkpointing")
@unless_off
def _offloaded_checkpoints(sheet: KohyaSheet, key: str) -> None:
    sheet.put("gradient_checkpointing", True, key)
    sheet.take(key, "gradient_checkpointing_cpu_offload", True, "with gradient_checkpointing, which it turns on")


@rule("gradient_checkpointing")
def _checkpoints(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value(key)) and sheet.on("cpu_offload_checkpointing", "unsloth_offload_checkpointing"):
        sheet.skip(key, "offloading checkpoints turns it on, there as well")
    else:
        sheet.plain(key)


@rule("blocks_to_swap", "double_blocks_to_swap", "single_blocks_to_swap", "split_mode")
def _swapped(sheet: KohyaSheet, key: str) -> None:
    pairs = sheet.kohya is not None and sheet.kohya.swaps_pairs
    single, double = (int(sheet.number(f"{kind}_blocks_to_swap") or 0) for kind in ("single", "double"))
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is 0 or off")
    elif key == "blocks_to_swap":
        there = int(sheet.number(key) or 0)
        more = f"there it means {there // 2} double and {2 * (there - there // 2)} single blocks; raise it if memory runs short"
        sheet.take(key, key, sheet.value(key), more if pairs else "")
    elif not pairs:
        sheet.skip(key, "it is for families with double and single blocks")
    elif not is_off(sheet.value("blocks_to_swap")):
        sheet.skip(key, "blocks_to_swap is given, which wins")
    elif key == "split_mode":
        sheet.take(key, "blocks_to_swap", 18, "which keeps as much of the model away from the device")
    else:
        sheet.take(key, "blocks_to_swap", single + double, "double and single blocks are counted together")


@rule(*_FUSED)
@unless_off
def _fused(sheet: KohyaSheet, key: str) -> None:
    if sheet.is_of_others(key):
        sheet.skip(key, f"it is for {families_of(key)}")
    elif sheet.run.method != "full":
        sheet.skip(key, "an adapter's gradients are small")
    else:
        note = "gradients are never there together, so max_grad_norm = 0" if "max_grad_norm" not in sheet.given else ""
        sheet.put("max_grad_norm", 0.0, key)
        sheet.take(key, "fused_backward_pass", True, note)


@rule("max_grad_norm")
def _clipping(sheet: KohyaSheet, key: str) -> None:
    on = next((name for name in _FUSED if not is_off(sheet.value(name))), None) if sheet.run.method == "full" else None
    if on and not is_off(sheet.value(key)):
        sheet.take(key, key, 0.0, f"{on} lets go of each gradient before all are known, so they cannot be clipped together")
    elif sheet.page and is_off(sheet.value(key)) and not is_empty(sheet.value(key)):
        sheet.take(key, key, sheet.value(key), "kohya_ss lost zeros on the way to its trainer, here 0 means 0")
    else:
        sheet.plain(key)


@rule("full_fp16")
def _half(sheet: KohyaSheet, key: str) -> None:
    if sheet.run.method == "full" and not is_off(sheet.value(key)):
        sheet.take(key, "full_bf16", True, "which takes as little memory, and whose rounding keeps small updates")
    else:
        sheet.plain(key)


# --- compiling --------------------------------------------------------------------------------------------------------

_OPTION = {
    "mode": "compile_mode",
    "use_fullgraph": "compile_fullgraph",
    "fullgraph": "compile_fullgraph",
    "use_dynamic": "compile_dynamic",
    "dynamic": "compile_dynamic",
}


def _compiles(sheet: KohyaSheet) -> bool:
    """Whether the file has the network compiled, by the script or by accelerate."""
    return sheet.on("torch_compile", "compile") or not is_off(sheet.value("dynamo_backend"))


@rule("torch_compile", "dynamo_backend")
@unless_off
def _compiling(sheet: KohyaSheet, key: str) -> None:
    backend = str(sheet.value(key)).lower()
    if key == "torch_compile":
        sheet.take(key, "compile", True)
    elif not sheet.on("torch_compile") and not sheet.page and backend == "inductor":
        # sd-scripts has inductor as its default, which means nothing without torch_compile.
        sheet.skip(key, "it is for torch_compile, which is off")
    elif backend not in sheet.known["compile_backend"].choices:
        sheet.refuse(key, f"{shown(sheet.value(key))} is not here; the network is not compiled. compile with inductor is the usual way")
    else:
        sheet.put("compile", True, key)
        sheet.take(key, "compile_backend", backend, "with compile on")


@rule(*(f"dynamo_{name}" for name in _OPTION))
def _how_compiled(sheet: KohyaSheet, key: str) -> None:
    option = _OPTION[key.removeprefix("dynamo_")]
    if is_off(sheet.value(key)) or not _compiles(sheet):
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "the network is not compiled")
    else:
        sheet.take(key, option, "true" if option == "compile_dynamic" else sheet.value(key))
