"""What all parts of amp_loop share: gradients as a list."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
