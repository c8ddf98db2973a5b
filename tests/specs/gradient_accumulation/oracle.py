"""The contract of gradient_accumulation as slow and obvious code."""

import copy
from collections import namedtuple

import torch
import torch.nn.functional as F

Window = namedtuple("Window", "loss grad_norm skipped")


def accumulate(w):
    """A sample counts 1 / samples of the window."""
    _begin(w)
    samples = sum(len(x) for x, _ in w.batches)
    loss = sum(_add(w.loss_fn(w.model(x), y) * len(x) / samples) for x, y in w.batches)
    w.optimizer.step()
    return loss


def accumulate_tokens(w):
    """A labelled token counts 1 / labelled tokens of the window."""
    return accumulate_on_ranks(w, 0, [w.batches])


def accumulate_on_ranks(w, rank, windows):
    """A labelled token counts 1 / labelled tokens of all ranks; a copy runs the other windows."""
    _begin(w)
    ignored = w.options.get("ignore_index", -100)
    tokens = sum(int((y != ignored).sum()) for window in windows for _, y in window)
    copied = copy.deepcopy(w.model) if len(windows) > 1 else w.model
    loss = sum(_token_backward(w.model, *batch, ignored, tokens) for batch in windows[rank])
    for number, window in enumerate(windows):
        for batch in window if number != rank else ():
            _token_backward(copied, *batch, ignored, tokens)
    for p, other in zip(w.model.parameters(), copied.parameters(), strict=True):
        if p is not other and p.grad is not None and other.grad is not None:
            p.grad += other.grad
    w.optimizer.step()
    return loss


def _token_backward(model, inputs, targets, ignored, tokens):
    logits = model(inputs).flatten(0, 1).float()
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, reduction="none")
    return _add(losses.sum() / tokens)


def train_epoch(w):
    """One window after another, until the data ends."""
    results, source, size = [], iter(data(w)), w.options["window"]
    _begin(w)
    try:
        while window := [batch for _, batch in zip(range(size), source, strict=False)]:
            results.append(_window(w, window))
            if w.scheduler is not None and not results[-1].skipped:
                w.scheduler.step()
    finally:
        _clear(w)
    return results


def data(w):
    """Yield the micro-batches, and note how many steps were taken at each request."""
    requests = w.notes["steps taken at each request"] = []
    for batch in w.batches:
        requests.append(len(w.steps))
        w.visits("data")
        yield batch
    requests.append(len(w.steps))


def _window(w, window):
    _begin(w)
    samples = sum(len(inputs) for inputs, _ in window)
    scaler, max_norm = w.grad_scaler, w.options.get("max_norm")
    parts = [_backward(w, *batch, samples) for batch in window]
    if scaler is not None:
        scaler.unscale_(w.optimizer)
    gradients = [p.grad for p in _held(w) if p.grad is not None]
    norm = torch.stack([g.double().norm() for g in gradients]).norm().float()
    if max_norm is not None and norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    if scaler is None:
        w.optimizer.step()
        return Window(sum(parts), norm, False)
    before = scaler.get_scale()
    scaler.step(w.optimizer)
    scaler.update()
    return Window(sum(parts), norm, scaler.get_scale() < before)


def _backward(w, inputs, targets, samples):
    """Backward of these samples' share of the window's mean; return the share."""
    half = w.dtype != torch.float32
    with torch.autocast(w.device.type, w.dtype, enabled=half):
        output = w.model(inputs)
        loss = w.loss_fn(output.float() if half else output, targets)
    part = loss * len(inputs) / samples
    (part if w.grad_scaler is None else w.grad_scaler.scale(part)).backward()
    return part.detach().float()


def _add(part):
    part.backward()
    return part.detach()


def _begin(w):
    """Refuse a bad window, or clear older gradients."""
    if w.refused_at == len(w.steps):
        raise ValueError("the contract refuses this")
    _clear(w)


def _clear(w):
    for p in _held(w):
        p.grad = None


def _held(w):
    return [p for group in w.optimizer.param_groups for p in group["params"]]
