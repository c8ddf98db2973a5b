"""Programs with a fault, each beside its mend: the experiment `trouble` runs and shows both."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.measure import solution

Batches = Iterable[tuple[Tensor, Tensor]]  # inputs and targets, both (batch, width)


def mean_loss_with_graphs(model: nn.Module, batches: Batches) -> Tensor:
    """The loss over all batches, which holds each batch's graph."""
    total_loss = torch.zeros((), device=device_of(model))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        total_loss += loss
    return total_loss


def mean_loss(model: nn.Module, batches: Batches) -> Tensor:
    """The same without a graph."""
    total_loss = torch.zeros((), device=device_of(model))
    with torch.no_grad():
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            total_loss += loss
    return total_loss


def train_with_graphs(model: nn.Module, batches: Batches) -> Tensor:
    """In training: backward() frees what each graph has saved, and the graph stays."""
    total_loss = torch.zeros((), device=device_of(model))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        total_loss += loss
    return total_loss


def train_at_one_scale(model: nn.Module, batches: Batches, optimizer: Optimizer) -> list[float]:
    """Float16 with a loss scale that stays; Adam divides it out again."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        (65536 * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_a_scaler(model: nn.Module, batches: Batches, optimizer: Optimizer) -> list[float]:
    """The reference: who finds an infinity skips the step and halves the scale."""
    amp, losses = solution("amp_loop"), []
    scaler = amp.LossScaler()
    for batch in batches:
        result = amp.train_step(model, batch, F.mse_loss, optimizer, scaler, dtype=torch.float16)
        losses.append(result.loss.item())
    return losses


def map_groups_one_by_one(x: Tensor, weights: Tensor) -> Tensor:
    """x (batch, groups, width), a map for each group: weights (groups, width, width)."""
    parts = []
    for group in range(len(weights)):
        part = x[:, group] @ weights[group]
        parts.append(torch.tanh(part))
    return torch.stack(parts, dim=1)


def map_groups_at_once(x: Tensor, weights: Tensor) -> Tensor:
    """The same as one batched product."""
    return torch.tanh(torch.einsum("bgi,gio->bgo", x, weights))


def train_with_a_hook(model: nn.Sequential, batches: Batches, optimizer: Optimizer) -> Tensor:
    """Train, and look afterwards at the first layer's mean outputs."""
    seen = []
    hook = model[0].register_forward_hook(lambda *call: seen.append(call[-1]))
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    hook.remove()
    return torch.stack([output.mean() for output in seen])


def train_with_a_mended_hook(
    model: nn.Sequential, batches: Batches, optimizer: Optimizer
) -> Tensor:
    """The same: the hook keeps a number, without a graph."""
    seen = []
    hook = model[0].register_forward_hook(lambda *call: seen.append(call[-1].detach().mean()))
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    hook.remove()
    return torch.stack(seen)


def scatter_what_stays(device: torch.device, segments: int) -> Tensor:
    """Of each segment of 20 MiB a fifth stays in use; then half of the whole is wanted."""
    stays, goes = [], []
    for _ in range(segments):
        stays.append(torch.empty(4 * 2**20, dtype=torch.uint8, device=device))
        goes += [torch.empty_like(stays[0]) for _ in range(4)]
    goes.clear()
    return torch.empty(segments * 10 * 2**20, dtype=torch.uint8, device=device)


def make_what_stays_first(device: torch.device, segments: int) -> Tensor:
    """The same tensors: what stays shares segments, and whole ones become free."""
    stays = [torch.empty(4 * 2**20, dtype=torch.uint8, device=device) for _ in range(segments)]
    goes = [torch.empty_like(stays[0]) for _ in range(4 * segments)]
    goes.clear()
    return torch.empty(segments * 10 * 2**20, dtype=torch.uint8, device=device)


def device_of(model: nn.Module) -> torch.device:
    """Where its first parameter is."""
    return next(model.parameters()).device
