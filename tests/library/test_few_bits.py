"""Weights that files of other programs hold in few bits, and files that are no models."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.library.loading.few_bits import packed_in
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.weights import Reader, entries
from sd_scripts.runs.model_files import problems_of_file
from sd_scripts.schema.errors import OptionError

# bitsandbytes 0.50.2 wrote it (functional.quantize_4bit of 32 x 128 numbers, with and without factors in 8 bits), `expected` is what its
# dequantize_4bit gives back on a CPU.
BITSANDBYTES = Path(__file__).parents[1] / "data" / "bitsandbytes-4bit.safetensors"

# comfy_kitchen 0.2.40, ComfyUI's own, wrote it (QuantizedTensor.from_float of 160 x 96 and 24 x 64 numbers); of what its dequantize gives
# back the file has the SHA-256, or the numbers where adding them up in another order may change the last bit.
COMFY = Path(__file__).parents[1] / "data" / "comfy-few-bits.safetensors"


def test_weights_of_comfyui_become_the_numbers_that_it_gives_itself(tmp_path: Path) -> None:
    header = read_header(COMFY, "model")
    found, read = entries(header, "model"), Reader()
    names = sorted(name.removesuffix(".weight") for name in found if name.endswith(".weight"))
    assert names == ["int8", "mxfp8", "nvfp4", "rows", "turned"]
    for name in names[:-1]:
        numbers = read(found[f"{name}.weight"])
        assert numbers.shape == found[f"{name}.weight"].shape
        assert hashlib.sha256(numbers.numpy().tobytes()).hexdigest() == header.metadata[name], name
    turned, expected = read(found["turned.weight"]), read(found["turned.expected"])
    assert torch.allclose(turned, expected, rtol=0, atol=1e-6) and expected.abs().max() > 0.1
    # The marks may stand in the header instead.
    tensors = load_file(COMFY)
    mark = json.loads(bytes(tensors.pop("turned.comfy_quant").tolist()))
    metadata = {"_quantization_metadata": json.dumps({"layers": {"turned": mark}})}
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    assert torch.equal(read(entries(read_header(tmp_path / "model.safetensors", "model"), "model")["turned.weight"]), turned)


def test_damaged_weights_of_comfyui_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """Each tensor of the file in other kinds and shapes, and marks that say something else."""
    whole, path, wrong = load_file(COMFY), tmp_path / "model.safetensors", []
    marks = ('{"format": "nvfp4"}', '{"format": "int8_tensorwise", "params": 3}', '{"format": "int8_tensorwise", "convrot": true}', "[]")
    others = [torch.ones(shape, dtype=kind) for shape in ((), (3,), (2, 2), (1, 1, 1)) for kind in (torch.float32, torch.uint8, torch.int8)]
    for name, tensor in whole.items():
        told = [torch.tensor(list(mark.encode()), dtype=torch.uint8) for mark in marks] if name.endswith("quant") else []
        same = [tensor.float(), tensor.half(), tensor.float().to(torch.int8)] if tensor.dtype != torch.float32 else [tensor.half()]
        for other in (None, *others, *told, *same):
            save_file(whole | {name: other} if other is not None else {key: one for key, one in whole.items() if key != name}, path)
            try:
                read = Reader()
                for entry in entries(read_header(path, "model"), "model").values():
                    assert read(entry).shape == entry.shape
            except OptionError:
                pass
            except Exception as err:
                wrong.append(f"{name} as {other if other is None else (other.dtype, other.shape)}: {err!r}"[:200])
    assert not wrong, "\n".join(wrong)


def test_weights_of_bitsandbytes_become_the_numbers_that_it_gives_itself(tmp_path: Path) -> None:
    found, read = entries(read_header(BITSANDBYTES, "model"), "model"), Reader()
    names = sorted(name.removesuffix(".weight") for name in found if name.endswith(".weight"))
    assert names == ["fp4", "nested", "nf4"]
    for name in names:
        numbers = read(found[f"{name}.weight"])
        assert numbers.shape == found[f"{name}.weight"].shape == (32, 128)
        assert torch.equal(numbers.bfloat16(), read(found[f"{name}.expected"])), name
    lacking = {name: tensor for name, tensor in load_file(BITSANDBYTES).items() if name != "nf4.weight.absmax"}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(OptionError, match=r"lacks nf4\.weight\.absmax, a part of a weight of 4 bits"):
        packed_in(read_header(tmp_path / "model.safetensors", "model"), "model")


def test_what_is_no_model_is_named_for_what_it_is(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 6938078334\n"
    files = {
        "is a git-lfs pointer": pointer,
        "is a web page": b"\n<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>",
        "is an answer of a server": b'{"error":"Invalid credentials in Authorization header"}',
        "is a pickle or zip file under another name": b"",
        "is not a safetensors file": b"something else entirely",
    }
    path, wrong = tmp_path / "model.safetensors", []
    for said, content in files.items():
        path.write_bytes(content)
        if not content:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("archive/data.pkl", b"")
        try:
            read_header(path, "vae")
            wrong.append(said)
        except OptionError as err:
            wrong += [str(err)] if f"vae: {path.name} {said}" not in str(err).replace(f" ({path.stat().st_size:,} bytes)", "") else []
    assert not wrong


def test_a_header_whose_length_begins_as_a_pickle_does_is_read(tmp_path: Path) -> None:
    path, tensors = tmp_path / "model.safetensors", {"a": torch.ones(2)}
    for length in (0x0280, 0x0380, 0x0480):
        save_file(tensors, path, metadata={"padding": ""})
        short = int.from_bytes(path.read_bytes()[:8], "little")
        save_file(tensors, path, metadata={"padding": "x" * (length - short)})
        assert path.read_bytes().startswith(length.to_bytes(2, "little"))
        assert read_header(path, "model").shapes == {"a": (2,)}


def test_scaled_weights_of_a_compiled_network_are_found_by_their_names_in_the_file(tmp_path: Path) -> None:
    path, weight = tmp_path / "model.safetensors", torch.randn(4, 8).to(torch.float8_e4m3fn)
    save_file({"_orig_mod.a.weight": weight, "_orig_mod.a.scale_weight": torch.tensor([0.5])}, path)
    (entry,) = entries(read_header(path, "model"), "model").values()
    assert torch.equal(Reader()(entry), weight.float() * 0.5)


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for bad in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            whole = torch.zeros(3, 4, dtype=dtype)
            whole[1, 2] = bad
            save_file({"good": torch.full((300, 300), 60000.0, dtype=dtype), "a.bad": whole}, path)
            found, read = entries(read_header(path, "model"), "model"), Reader()
            read(found["good"])
            with pytest.raises(OptionError, match=r"a\.bad holds NaN or infinity"):
                read(found["a.bad"])


def test_a_form_that_cannot_be_read_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path, bits, one = tmp_path / "ae.safetensors", torch.zeros(4, 32, dtype=torch.uint8), torch.ones(())
    scaled = {"a.weight": bits.to(torch.float8_e4m3fn), "a.weight_scale": one}
    square = torch.zeros(32, 64, dtype=torch.uint8)
    # ComfyUI's of 2026 in shapes that they do not have, and GPTQ's.
    forms = {
        r"a\.weight in U8": {"a.weight": bits, "a.weight_scale": one},
        r"scales a\.weight by \(4, 1, 2\)": {**scaled, "a.weight_scale": torch.ones(4, 1, 2)},
        r"scales a\.weight by \(32, 2\).* each 32 numbers": {
            "a.weight": square.to(torch.float8_e4m3fn),
            "a.weight_scale": square[:, :2].contiguous(),
        },
        r"scales a\.weight by \(128, 4\).* each 16 numbers": {
            "a.weight": square,
            "a.weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
            "a.weight_scale_2": one,
        },
        r"\(a\.weight_scale_2\)": {**scaled, "a.weight_scale_2": one.clone()},
        r"\(a\.qweight\)": {"a.qweight": bits},
    }
    for said, tensors in forms.items():
        save_file(tensors, path)
        (problem,) = problems_of_file("flux", "ae", str(path), wants_adapter=False)
        with pytest.raises(OptionError, match=said) as caught:
            entries(read_header(path, "ae"), "ae")
        assert [problem.message] == [one.message for one in caught.value.problems]
    save_file(scaled, path)
    assert problems_of_file("flux", "ae", str(path), wants_adapter=False) == []
    assert problems_of_file("flux", "ae", str(BITSANDBYTES), wants_adapter=False) == []
