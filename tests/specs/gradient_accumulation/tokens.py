"""What the specs about tokens share: a model, micro-batches with few labels, the slow truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw
from specs.gradient_accumulation.common import Batch

CLASSES = 5
# Samples, length, labelled tokens: 12, 6, 3 and 1, and as many tokens without a label.
UNEQUAL = ((3, 4, 12), (2, 5, 6), (1, 9, 3), (4, 3, 1))


def language_model(device: torch.device | str) -> nn.Sequential:
    """From (samples, length) to logits (samples, length, 5), each token by itself."""
    draw.seed(4)
    return nn.Sequential(nn.Embedding(8, 6), nn.Tanh(), nn.Linear(6, CLASSES)).to(device)


def labelled(
    shapes: Sequence[tuple[int, int, int]],
    device: torch.device | str,
    ignore_index: int = -100,
    seed: int = 5,
) -> list[Batch]:
    """Micro-batches of (samples, length) with so many labels at random places.

    Micro-batch n has tokens from n to n + 3 only, so that no two have similar gradients. Pairs are
    lists, as DataLoader's are. Targets are a slice of a wider tensor, which view(-1) does not take.
    """
    generator = draw.generator(seed)
    classes = torch.tensor([label for label in range(CLASSES) if label != ignore_index])
    batches = []
    for number, (samples, length, labels) in enumerate(shapes):
        inputs = draw.randint(4, (samples, length), generator=generator) + number % 5
        targets = torch.full((samples * length,), ignore_index)
        places = torch.randperm(samples * length, generator=generator)[:labels]
        targets[places] = classes[draw.randint(len(classes), (labels,), generator=generator)]
        wider = F.pad(targets.view(samples, length), (1, 0)).to(device)
        batches.append([inputs.to(device), wider[:, 1:]])
    return batches


def token_losses(model: nn.Module, batch: Batch, ignore_index: int = -100) -> Tensor:
    """-log p(label) of each labelled token: the definition, slow and obvious."""
    inputs, targets = batch
    probabilities = model(inputs).softmax(-1)
    losses = [
        -probabilities[sample, place, targets[sample, place]].log()
        for sample, place in (targets != ignore_index).nonzero().tolist()
    ]
    return torch.stack(losses) if losses else probabilities.new_zeros(0)


def window_loss(model: nn.Module, batches: Sequence[Batch], ignore_index: int = -100) -> Tensor:
    """The mean over all labelled tokens of the window."""
    return torch.cat([token_losses(model, batch, ignore_index) for batch in batches]).mean()


def wide_model(device: torch.device) -> nn.Module:
    draw.seed(4)
    return nn.Sequential(nn.Embedding(64, 24), nn.Linear(24, 512)).to(device)


def deep_language_model(device: torch.device) -> nn.Module:
    """Gradients are nearly all that it needs for a few tokens: 12 weights of 64 x 64."""
    draw.seed(4)
    layers = [nn.Linear(64, 64) for _ in range(10)]
    return nn.Sequential(nn.Embedding(64, 64), *layers, nn.Linear(64, 64)).to(device)


def many_tokens(device: torch.device, count: int) -> list[Batch]:
    """Micro-batches of (4, 96) tokens, every third of them without a label."""
    inputs = draw.randint(64, (count, 4, 96), device=device)
    targets = draw.randint(512, (count, 4, 96), device=device)
    targets[..., ::3] = -100
    return list(zip(inputs, targets, strict=True))
