"""One training step, drawn from an answer's figures, beside what the ruler sees."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.optim import Adam

from kit.laws import draw
from kit.laws.toys import mlp, mse
from kit.memory.account import KINDS, Account, Change, account
from kit.memory.ruler import Reading

TITLE = "One step with Adam: by the ruler (plain), and by the figures of the answers"


def timeline(answer: ModuleType, reference: ModuleType, device: torch.device) -> dict[str, Account]:
    """The plain account is the ruler's: it looks at every operation."""
    model = mlp(*[256] * 6, 8, device=device)
    x, y = (draw.randn(4096, width, device=device) for width in (256, 8))
    optimizer = Adam(model.parameters(), foreach=True)

    def step() -> None:
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured(by: Any) -> Account:
        state = by.state_bytes(model, optimizer)
        moments = [m for held in optimizer.state.values() for m in held.values()]
        found = by.peak_memory(step, device, [x, y, *model.parameters(), *moments])
        saved = by.saved_bytes(lambda: mse(model(x), y), model)
        return _stack(state, saved - x.nbytes - y.nbytes, found)

    step()
    plain = account(step, device, model=model, optimizer=optimizer, known=(x, y))
    return {"plain": plain, "reference": measured(reference), "yours": measured(answer)}


def _stack(state: Any, saved: int, found: Any) -> Account:
    """The state, what forward saves, the peak, and what is left."""
    owned = {
        "shards": state.parameters + state.buffers,
        "gradients": state.gradients,
        "optimizer state": state.optimizer,
    }
    owned["activations"] = found.baseline - sum(owned.values())  # the data
    before = dict.fromkeys(KINDS, 0) | owned
    more = found.peak - found.baseline - saved
    after = before | {"gradients": state.gradients + found.retained}
    changes = (
        *(Change(0, kind, size, False) for kind, size in before.items()),
        Change(1, "activations", saved, True),
        Change(2, "activations", more, False),
        Change(3, "activations", -saved, True),
        Change(3, "activations", -more, False),
        Change(3, "gradients", found.retained, False),
    )
    at_peak = before | {"activations": before["activations"] + saved + more}
    reading = Reading("figures", found.baseline, found.peak, found.retained, ())
    return Account(reading, before, at_peak, at_peak, after, changes)
