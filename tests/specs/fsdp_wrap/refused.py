"""What a refused call of wrap leaves behind: nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kit.laws.checks import check, check_equal, check_raises
from kit.private_torch import forward_hooks
from specs.fsdp_wrap.models import adamw


def check_refused(
    answer: Any,
    model: nn.Module,
    mesh: DeviceMesh,
    block_types: Any,
    words: list[str],
    when: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fail unless wrap raises ValueError, and has left the model as it was."""
    __tracebackhide__ = True
    made: list[object] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(parameters)
        return adamw(parameters)

    before = _anatomy(model)
    check_raises(
        lambda: answer.wrap(model, mesh, block_types, make_optimizer, dtype=dtype),
        ValueError,
        mentions=words,
        when=when,
    )
    changed = [name for name, what in _anatomy(model).items() if before.get(name) != what]
    check(
        not changed,
        expected=f"a model as it was before the refused call, {when}",
        got=f"{', '.join(repr(name) for name in changed[:3])} changed",
        cause="units are made before all of them have been checked",
    )
    cause = "the optimizer is made before the check"
    check_equal(len(made), 0, "calls of make_optimizer", cause=cause)


def _anatomy(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks and parameters, by which a sharded model differs."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = type(module), sorted(vars(module)), *forward_hooks(module)
        for own, p in module.named_parameters(recurse=False):
            found[f"{name}.{own}"] = id(p), p.dtype, p.requires_grad, p.shape
    return found
