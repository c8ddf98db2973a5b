"""Whether lab/lora.py computes what peft and bitsandbytes do, where they are installed."""

from __future__ import annotations

import copy
import importlib
import itertools
from typing import Any

import torch
from torch import nn

from lab.lora import BLOCK, LEVELS, Lora, adapt, dequantize, quantize


def round_trip() -> dict[str, float]:
    """What 4 bits lose of normal weights: the worst error against its bound, and the mean one."""
    weight = torch.randn(512, 768)
    packed = quantize(weight)
    error = (dequantize(packed) - weight).view(-1, BLOCK)
    gaps = [high - low for low, high in itertools.pairwise(LEVELS)]
    bound = max(gaps) / 2 * packed.scales[:, None]
    root = (error.square().mean() / weight.square().mean()).sqrt()
    again = quantize(dequantize(packed))  # each level is its own nearest
    held = (packed.codes.nbytes + packed.scales.nbytes) / weight.numel()
    return {
        "worst error over its bound": float((error.abs() / bound).max()),
        "root mean square, relative": float(root),
        "codes changed by a second round trip": float((again.codes != packed.codes).sum()),
        "bits a weight": 8 * held,
    }


def against_bitsandbytes() -> str:
    """The same weights by bitsandbytes: how many codes and how much of a value differ."""
    try:
        library: Any = importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # whatever an extension without its device raises
        return f"not checked: {type(error).__name__}"
    weight = torch.randn(256, 192)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed, wide = quantize(weight), dequantize(quantize(weight))
    codes, state = library.quantize_4bit(weight.to(device), blocksize=BLOCK, quant_type="nf4")
    other = library.dequantize_4bit(codes, state).cpu()
    differ = int((codes.cpu().flatten() != packed.codes).sum())
    return f"{differ} of {codes.numel()} bytes differ, values by {(other - wide).abs().max():.0e}"


def against_peft(model: nn.Module, block_type: type[nn.Module], tokens: torch.Tensor) -> str:
    """The same LoRA by peft on every linear layer of the blocks: its numbers and the output."""
    try:
        peft: Any = importlib.import_module("peft")
    except Exception as error:
        return f"not checked: {type(error).__name__}"
    ours = copy.deepcopy(model).eval()
    count = adapt(ours, block_type, rank=4, alpha=8)
    names = sorted({n.rpartition(".")[2] for n, m in ours.named_modules() if isinstance(m, Lora)})
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)
    theirs = peft.inject_adapter_in_model(config, copy.deepcopy(model)).eval()
    other = {n: m for n, m in theirs.named_modules() if hasattr(m, "lora_A")}
    with torch.no_grad():
        for name, layer in ours.named_modules():
            if isinstance(layer, Lora):
                layer.up.normal_()
                other[name].lora_A["default"].weight.copy_(layer.down)
                other[name].lora_B["default"].weight.copy_(layer.up)
        distance = (ours(tokens) - theirs(tokens)).abs().max() / ours(tokens).abs().max()
    trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    return f"{count - trained} numbers more are trained, outputs differ by {distance:.0e}"
