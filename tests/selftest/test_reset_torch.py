"""An answer that leaves everything on must not disturb the spec after it."""

from __future__ import annotations

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from kit.answers.reset_torch import note_classes, reset_torch
from kit.memory.ruler import measure


class Passive(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_reset_torch_after_an_answer_that_left_everything_on() -> None:
    for left_on in (
        saved_tensors_hooks(lambda t: t, lambda t: t),
        saved_tensors_hooks(lambda t: t, lambda t: t),
        Passive(),
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        left_on.__enter__()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)

    reset_torch()

    assert not _get_current_dispatch_mode_stack()
    with disable_saved_tensors_hooks("a hook is still in force"):
        pass
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_weights_that_autocast_has_cached_are_freed_after_an_autocast_was_left_on() -> None:
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    reset_torch()
    model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)

    assert measure(step, known=[model, x]).retained == 0


def test_classes_that_an_answer_has_patched_are_as_before() -> None:
    note_classes()
    plain = torch.nn.Linear.forward
    torch.nn.Linear.forward = lambda self, x: x  # type: ignore[method-assign]
    torch.nn.Linear.patched = True  # type: ignore[attr-defined]
    del torch.nn.ReLU.forward

    reset_torch()

    assert torch.nn.Linear.forward is plain
    assert not hasattr(torch.nn.Linear, "patched")
    assert torch.nn.ReLU.forward is vars(torch.nn.ReLU)["forward"]
