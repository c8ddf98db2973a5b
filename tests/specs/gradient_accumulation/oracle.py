"""The contract of gradient_accumulation as slow and obvious code; its divisors differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.laws.trace import Planted, PlantedInterrupt, World, autocast_on


class Window(NamedTuple):
    loss: Any
    grad_norm: Tensor
    skipped: bool


def retried(call: Callable[[], Any], w: World) -> Any:
    """The call; in a world of this kind the next one, after a good one or the planted error."""
    if "twice" in w.tags:
        call()
        w.visits("next window")
    try:
        return call()
    except BaseException as error:
        if "planted" in w.tags:
            anew = "" if error.__context__ is None else "raised anew: "
            w.notes["error"] = f"{anew}{error!r}"
        if "retried" not in w.tags or not isinstance(error, (Planted, PlantedInterrupt)):
            raise
    w.tags.discard("planted")
    return call()


def accumulate(w: World) -> Any:
    """A sample counts 1 / samples of the window."""
    samples = _samples(w.batches)
    _clear(w)
    loss = sum(_add(w.loss_fn(w.model(x), y) * len(x) / samples) for x, y in w.batches)
    w.optimizer.step()
    torch.clear_autocast_cache()
    return loss


def accumulate_tokens(w: World) -> Any:
    """A labelled token counts 1 / labelled tokens of the window."""
    return accumulate_on_ranks(w, 0, [w.batches])


def accumulate_on_ranks(w: World, rank: int, windows: list[Any]) -> Any:
    """A labelled token counts 1 / labelled tokens of all ranks; a twin runs those of the others."""
    _refuse_unless(all(windows))
    tokens = sum(_labels(w, batch) for window in windows for batch in window)
    _refuse_unless(tokens > 0)
    _clear(w)
    twin = copy.deepcopy(w.model) if len(windows) > 1 else w.model
    loss = sum(_token_backward(w, w.model, *batch, tokens) for batch in windows[rank])
    for number, window in enumerate(windows):
        for batch in window if number != rank else ():
            _token_backward(w, twin, *batch, tokens)
    for p, other in zip(w.model.parameters(), twin.parameters(), strict=True):
        if p is not other and p.grad is not None and other.grad is not None:
            p.grad += other.grad
    w.optimizer.step()
    torch.clear_autocast_cache()
    return loss


def train_epoch(w: World) -> list[Window]:
    """Windows of one micro-batch after another, until there are none."""
    size, max_norm, loader = w.options["window"], w.options.get("max_norm"), data(w)
    _refuse_unless(size >= 1)
    _refuse_unless(w.dtype in (torch.float32, torch.bfloat16, torch.float16))
    has_scaler = w.grad_scaler is not None and w.grad_scaler.is_enabled()
    _refuse_unless(has_scaler == (w.dtype == torch.float16))
    _refuse_unless(max_norm is None or max_norm > 0)
    torch.clear_autocast_cache()
    results, source = list[Window](), iter(loader)
    try:
        while window := [batch for _, batch in zip(range(size), source, strict=False)]:
            results.append(_window(w, window))
            torch.clear_autocast_cache()
            if w.scheduler is not None and not results[-1].skipped:
                w.scheduler.step()
    finally:
        if w.batches:
            _clear(w)
    _refuse_unless(len(results) > 0)
    return results


class Loader:
    """What it is made with, in an iterator; each begins with a random number, as a DataLoader's."""

    def __init__(self, requested: Callable[[], Iterator[Any]]) -> None:
        self.requested = requested

    def __iter__(self) -> Iterator[Any]:
        torch.empty(()).uniform_()
        return self.requested()


def data(w: World) -> Any:
    """The micro-batches as a loader, which notes how many steps were taken at each request."""
    requests = w.notes["steps taken at each request"] = list[int]()
    modes = w.notes["modes when data are taken"] = set[str]()

    def requested() -> Any:
        for batch in w.batches:
            requests.append(len(w.steps))
            grad = "with" if torch.is_grad_enabled() else "without"
            modes.add(f"{grad} grad{autocast_on(w.device.type)}")
            w.visits("data")
            yield batch
        requests.append(len(w.steps))

    return w.batches if "list" in w.tags else Loader(requested)


def _window(w: World, window: list[Any]) -> Window:
    samples, scaler, max_norm = _samples(window), w.grad_scaler, w.options.get("max_norm")
    _clear(w)
    parts = [_backward(w, *batch, samples) for batch in window]
    if scaler is not None:
        scaler.unscale_(w.optimizer)
    gradients = [p.grad for p in _held(w) if p.grad is not None]
    norms = [g.double().norm() for g in gradients] or [torch.zeros(())]
    norm = torch.stack(norms).norm().float()
    if max_norm is not None and norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    if scaler is None:
        w.optimizer.step()
        return Window(sum(parts), norm, False)
    before = scaler.get_scale()
    try:
        scaler.step(w.optimizer)
    except BaseException:
        scaler.update(before)
        raise
    scaler.update()
    return Window(sum(parts), norm, scaler.get_scale() < before)


def _autocast(w: World, *, enabled: bool) -> AbstractContextManager[None]:
    """In 16 bits; in float32 that of the caller stays."""
    if w.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(w.device.type, w.dtype, enabled=enabled)


def _backward(w: World, inputs: Tensor, targets: Tensor, samples: int) -> Tensor:
    """Add the gradients of these samples' part of the window's mean; the part."""
    with _autocast(w, enabled=True):
        output = w.model(inputs)
        loss = w.loss_fn(output if w.dtype == torch.float32 else output.float(), targets)
    part = loss * len(inputs) / samples
    with _autocast(w, enabled=False):
        (part if w.grad_scaler is None else w.grad_scaler.scale(part)).backward()
    return part.detach().float()


def _token_backward(w: World, model: Any, inputs: Tensor, targets: Tensor, tokens: int) -> Tensor:
    logits, ignored = model(inputs).flatten(0, 1), w.options.get("ignore_index", -100)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, reduction="none")
    return _add(losses.sum() / tokens)


def _add(part: Tensor) -> Tensor:
    part.backward()
    return part.detach()


def _held(w: World) -> list[Tensor]:
    return [p for group in w.optimizer.param_groups for p in group["params"]]


def _clear(w: World) -> None:
    for p in _held(w):
        p.grad = None


def _samples(window: list[Any]) -> int:
    _refuse_unless(len(window) > 0)
    for batch in window:
        _check_pair(batch)
        _refuse_unless(len(batch[0]) == len(batch[1]) > 0)
    return sum(len(inputs) for inputs, _ in window)


def _labels(w: World, batch: Any) -> int:
    _check_pair(batch)
    _refuse_unless(batch[0].shape == batch[1].shape and batch[0].numel() > 0)
    return int((batch[1] != w.options.get("ignore_index", -100)).sum())


def _check_pair(batch: Any) -> None:
    _refuse_unless(isinstance(batch, (tuple, list)) and len(batch) == 2)


def _refuse_unless(ok: bool) -> None:
    if not ok:
        raise ValueError("the contract refuses this")
