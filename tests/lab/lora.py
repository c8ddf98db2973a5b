"""LoRA and blockwise 4-bit weights, each in a few readable lines.

    adapt(model, GPT2Block, rank=8, alpha=16)                       # LoRA
    adapt(model, GPT2Block, rank=8, alpha=16, four_bit=True)        # a 4-bit base with LoRA

Sources: Hu et al. (arXiv 2106.09685) and Dettmers et al. (arXiv 2305.14314, NF4). The second
quantisation, of the scales, is left out: a weight takes 4 bits and its share of a scale, 32 / 64.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64  # weights that share a scale


def nf4_levels() -> list[float]:
    """The 16 values of NF4, from -1 to 1: quantiles of a normal distribution, and an exact zero.

    The outermost quantile is the mean of 1 - 1/30 and 1 - 1/32; one level more is positive.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    positive = torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1]
    negative = torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1]
    levels = torch.cat(
        [-torch.special.ndtri(negative), torch.zeros(1), torch.special.ndtri(positive).flip(0)]
    )
    return [float(level) for level in levels / levels.max()]


LEVELS = nf4_levels()
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(LEVELS)]


class FourBit(NamedTuple):
    """A matrix in 4 bits: `codes` uint8 (elements / 2), `scales` float32 (elements / BLOCK)."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size


def quantize(weight: Tensor) -> FourBit:
    """The nearest level for each weight, in units of the largest of its block.

    Raises ValueError if the number of weights is no multiple of BLOCK.
    """
    if weight.numel() % BLOCK:
        raise ValueError(f"{weight.numel()} weights are no multiple of {BLOCK}")
    blocks = weight.detach().float().contiguous().view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    # A block of zeros has the scale 0, and 0 / 1 is its code.
    units = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    middles = torch.tensor(MIDDLES, device=weight.device)
    codes = torch.bucketize(units, middles).to(torch.uint8).flatten()
    return FourBit(codes[::2] << 4 | codes[1::2], scales, weight.shape)


def dequantize(packed: FourBit, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix again, each weight at most half a gap between levels, times its scale, away."""
    levels = torch.tensor(LEVELS, device=packed.codes.device, dtype=dtype)
    codes = torch.stack([packed.codes >> 4, packed.codes & 15], 1).flatten()
    blocks = levels[codes.int()].view(-1, BLOCK)
    return (blocks * packed.scales[:, None].to(dtype)).view(packed.shape)


class _Product(torch.autograd.Function):
    """x W^T + b with W in 4 bits: autograd would keep the wide W of each layer for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, shape: Any, bias: Any) -> Any:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return F.linear(x, dequantize(FourBit(codes, scales, shape), x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        weight = dequantize(FourBit(codes, scales, ctx.shape), gradient.dtype)
        return gradient @ weight, None, None, None, None


class Linear4bit(nn.Module):
    """A frozen linear layer whose weights wait in 4 bits: (..., inputs) to (..., outputs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        packed = quantize(weight)
        self.shape = packed.shape
        # Frozen parameters and no buffers: of those, a checkpointed block keeps a copy.
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product in the dtype of x, or of autocast."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        multiply: Any = _Product.apply
        product: Tensor = multiply(x, self.codes, self.scales, self.shape, bias)
        return product


class Lora(nn.Module):
    """base(x) + alpha / rank * up(down(x)): two thin float32 matrices learn, the base is frozen."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))  # it starts as the base alone
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """The base's result with what has been learned."""
        update = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
        out: Tensor = self.base(x)
        return out + (update * self.scale).to(out.dtype)


def adapt(
    model: nn.Module,
    block_type: type[nn.Module],
    *,
    rank: int,
    alpha: float,
    four_bit: bool = False,
) -> int:
    """Freeze the model, and put LoRA on each linear layer of its blocks; how many numbers learn.

    Embeddings, norms and head stay as they are, also with `four_bit`. Linear and the transformers
    library's Conv1D, whose weight is (inputs, outputs), are linear layers.
    """
    model.requires_grad_(False)
    blocks = [module for module in model.modules() if isinstance(module, block_type)]
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
                    setattr(parent, name, _adapted(layer, rank, alpha, four_bit))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _adapted(layer: nn.Module, rank: int, alpha: float, four_bit: bool) -> Lora:
    weight: Any = layer.weight
    bias: Any = layer.bias
    if not isinstance(layer, nn.Linear):
        weight = weight.T
    outputs, inputs = weight.shape
    with weight.device:
        return Lora(Linear4bit(weight, bias) if four_bit else layer, inputs, outputs, rank, alpha)
