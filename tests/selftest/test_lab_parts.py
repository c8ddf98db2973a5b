"""What the lab's experiments are made of: the search, LoRA, 4-bit weights and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.memory.account import account
from kit.ranks.simulated import dry_run
from lab import closed_form, decoder, lora
from lab.closed_form import Setting, Shape
from lab.experiments.largest_batch import padded
from lab.largest import largest_batch
from lab.measure import ratio


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100])
def test_the_largest_batch_is_found_in_few_tries(most):
    for answer in range(130):
        tried = list[int]()

        def fits(batch: int, answer: int = answer, tried: list[int] = tried) -> bool:
            tried.append(batch)
            return batch <= answer

        assert largest_batch(fits, most) == min(answer, most)
        assert max(tried) <= most
        assert len(set(tried)) == len(tried) <= 2 * math.log2(most + 1) + 2


def test_a_search_up_to_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        largest_batch(lambda batch: True, 0)


def test_sizes_are_padded_to_the_next_multiple():
    assert [padded(size, 128) for size in (1, 64, 128, 129)] == [128, 128, 128, 256]


def test_a_ratio_counts_the_rounds_that_both_have():
    assert ratio([4.0, 6.0, 9.0], [2.0, 3.0]) == (2.0, 0.0)


def test_four_bits_are_the_nearest_of_sixteen_levels():
    weight = draw.randn(48, 128) * torch.logspace(-3, 3, 48)[:, None]
    weight[3, :64] = 0.0
    packed = lora.quantize(weight)
    assert packed.codes.numel() == weight.numel() // 2
    blocks = weight.view(-1, lora.BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    choices = scales[..., None] * torch.tensor(lora.LEVELS)
    nearest = (blocks[..., None] - choices).abs().amin(-1)
    error = (lora.dequantize(packed).view_as(blocks) - blocks).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-4, atol=1e-7)
    assert lora.dequantize(packed)[3, :64].count_nonzero() == 0
    with pytest.raises(ValueError, match="63 weights are no multiple of 64"):
        lora.quantize(torch.ones(63))


class Pair(nn.Sequential):
    """A block."""


@pytest.mark.parametrize("four_bit", [False, True])
def test_lora_starts_as_the_base_and_trains_two_thin_matrices_a_layer(four_bit):
    draw.seed(0)
    model = nn.Sequential(nn.Embedding(11, 64), Pair(nn.Linear(64, 128), nn.Linear(128, 64)))
    x = torch.arange(11)
    before = model(x)
    trained = lora.adapt(model, Pair, rank=4, alpha=8.0, four_bit=four_bit)
    assert trained == 2 * 4 * (64 + 128)
    close = {"rtol": 0.0, "atol": 0.2 if four_bit else 0.0}
    torch.testing.assert_close(model(x), before, **close)
    model(x).square().sum().backward()
    learning = [name for name, p in model.named_parameters() if p.grad is not None]
    assert len(learning) == 4
    assert all(name.endswith((".down", ".up")) for name in learning)


def test_the_gradient_through_four_bits_is_that_of_the_wide_weight():
    layer = lora.Linear4bit(draw.randn(64, 128), draw.randn(64))
    wide = lora.dequantize(lora.FourBit(layer.codes, layer.scales, layer.shape))
    x = draw.randn(5, 128, requires_grad=True)
    twin = x.detach().requires_grad_()
    layer(x).square().sum().backward()
    nn.functional.linear(twin, wide, layer.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


# Neither is a shape that the formulas were written for.
SHAPES = {
    "gpt": Shape(5, 320, 1280, heads=5, kv_heads=5, words=700, longest=256),
    "llama": Shape(3, 512, 1376, heads=8, kv_heads=2, words=900),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "setting",
    [Setting(), Setting(amp=True), Setting(checkpoint=True), Setting(amp=True, checkpoint=True)],
    ids=["fp32", "amp", "checkpointed", "both"],
)
def test_a_closed_form_is_the_peak_of_a_dry_run(shape, setting):
    """Within 4 %: the small things that it leaves out weigh more in a small model."""
    with dry_run(1):
        model, optimizer, tokens = decoder.make(shape, setting, (4, 256))

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=setting.amp):
                logits = model(tokens)
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()

        step()
        books = account(step, model=model, optimizer=optimizer, known=[tokens])
    count = sum(p.numel() for p in model.parameters())
    assert closed_form.parameters(shape) == count
    assert closed_form.peak_bytes(shape, setting, 4 * 256) == pytest.approx(books.peak, rel=0.04)
