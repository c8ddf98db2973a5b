"""Puts torch back as a fresh process has it, so that no answer can disturb the spec after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks

from kit.answers.settings import SETTINGS
from kit.laws import draw
from kit.private_torch import dispatch_modes, pop_dispatch_mode, pop_saved_tensors_hooks

_classes: dict[type[nn.Module], dict[str, Any]] = {}  # what was in them before an answer


def reset_torch() -> None:
    """Reset the modes, hooks, defaults, classes and random state that an answer may have left."""
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
    _reset_classes()
    draw.seed(0)


def note_classes(parent: type[nn.Module] = nn.Module) -> None:
    """Remember how the classes of modules are, those of torch and of specs, before an answer."""
    for kind in parent.__subclasses__():
        is_ours = kind.__module__.startswith(("torch.nn.", "specs.", "kit."))
        if is_ours and kind not in _classes and "<locals>" not in kind.__qualname__:
            _classes[kind] = dict(vars(kind))
        note_classes(kind)


def _reset_classes() -> None:
    for kind, fresh in _classes.items():
        if vars(kind) != fresh:
            for name in vars(kind).keys() - fresh.keys():
                delattr(kind, name)
            for name in fresh:
                if vars(kind).get(name) is not fresh[name]:
                    setattr(kind, name, fresh[name])


def saved_tensors_hooks_in_force() -> bool:
    """Whether anybody listens to what autograd saves."""
    try:
        with disable_saved_tensors_hooks("some are in force"):
            return False
    except RuntimeError:
        return True
