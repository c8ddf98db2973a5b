"""Puts torch back as a fresh process has it, so that no answer can disturb the spec after it."""

from __future__ import annotations

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from kit.answers.settings import SETTINGS
from kit.laws import draw
from kit.private_torch import dispatch_modes, pop_dispatch_mode, pop_saved_tensors_hooks


def reset_torch() -> None:
    """Reset the modes, hooks, defaults and random state that an answer may have left behind."""
    while in_force := dispatch_modes():
        pop_dispatch_mode()
        del in_force  # torch 2.6 crashes where it pops a mode that nobody else holds
    while saved_tensors_hooks_in_force():
        pop_saved_tensors_hooks()
    for setting in SETTINGS.values():
        if setting.fresh is not None and setting.read() != setting.fresh:
            setting.write(setting.fresh)
    # An autocast that was entered and never left would keep its cache, and every later one too.
    depth = torch.autocast_increment_nesting()
    while depth > 0:
        depth = torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    draw.seed(0)


def saved_tensors_hooks_in_force() -> bool:
    """Whether anybody listens to what autograd saves."""
    try:
        with disable_saved_tensors_hooks("some are in force"):
            return False
    except RuntimeError:
        return True
