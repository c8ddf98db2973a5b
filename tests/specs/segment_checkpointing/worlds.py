"""An answer and plain PyTorch in the same world, and what is observed of each.

A world is a step: a function that calls what it is given and returns a loss. If the loss has a
graph, backward runs afterwards. All tensors and modules that the step uses are observed.
"""

import inspect
import sys
from collections import Counter
from functools import partial, reduce

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import SpecFailure, check_equal
from kit.laws.equal import same
from kit.laws.scenarios import scenarios
from kit.laws.trace import Probe
from kit.laws.untouched import observed
from kit.memory.ruler import measure

TWICE = "twice the gradient: an argument is not detached, or counts once per place it is given in"


class Layer(nn.Module):
    """Linear, tanh, dropout: (rows, width) to the same shape. Each run is noted in `log`."""

    def __init__(self, number, log, width, dropout):
        super().__init__()
        self.number, self.log, self.dropout = number, log, dropout
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        self.log.append(self.number)
        return nn.functional.dropout(self.linear(x).tanh(), self.dropout, self.training)


def chain(count, device, *, width=5, dropout=0.25):
    """`count` layers, the same ones each time, and the list of their runs."""
    draw.seed(11)
    log = []
    layers = [Layer(number, log, width, dropout) for number in range(count)]
    return nn.ModuleList(layers).to(device), log


def plain(layers, x, segments=1):
    return reduce(lambda value, layer: layer(value), layers, x)


def plain_call(function, *args):
    return function(*args)


def loss_of(out):
    """A scalar with a different gradient everywhere."""
    out = torch.view_as_real(out) if out.is_complex() else out
    return out.float().square().mean()


def data(*shape, dtype=None):
    """Drawn on the CPU, moved to the spec's device."""
    with torch.device("cpu"):
        numbers = draw.randn(*shape, dtype=dtype)
    return numbers.to(torch.get_default_device())


def leaf(*shape, dtype=None):
    return data(*shape, dtype=dtype).requires_grad_()


def probed(*layers):
    """Layers with a probe that counts runs behind the first; tanh needs the probe's result."""
    return nn.Sequential(layers[0], Probe(), nn.Tanh(), *layers[1:])


def used(step):
    """The tensors and modules in the closure of a function, and of the functions it uses."""
    found = {}
    todo, seen = [step], set()
    while todo:
        seen.add(function := todo.pop())
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        around = {name: c.cell_contents for name, c in zip(names, cells, strict=True)}
        lists = {n: v for n, v in around.items() if isinstance(v, (list, tuple))}
        around |= {n: nn.ModuleList(v) for n, v in lists.items() if isinstance(v[0], nn.Module)}
        found |= {n: v for n, v in around.items() if isinstance(v, (Tensor, nn.Module))}
        todo += [v for v in around.values() if inspect.isfunction(v) and v not in seen]
    return found


def named(things):
    """The tensors themselves, and the parameters of modules."""
    modules = {name: thing for name, thing in things.items() if isinstance(thing, nn.Module)}
    parts = {f"{name}.{n}": p for name, m in modules.items() for n, p in m.named_parameters()}
    return {name: thing for name, thing in things.items() if name not in modules} | parts


def described(result):
    """A result by value: its type, and copies of its tensors."""
    items = result if isinstance(result, tuple) else (result,)
    tensors = {f"output {n}": t for n, t in enumerate(items) if isinstance(t, Tensor)}
    return {
        "type": "Tensor" if isinstance(result, Tensor) else type(result).__name__,
        "what is no tensor": [item for item in items if not isinstance(item, Tensor)],
        **{name: t.detach().clone() for name, t in tensors.items()},
    }


def observe(call, step, device, runs=1):
    """One forward and backward pass; each forward run counts `runs` times."""
    things, results = used(step), []
    leaves = named(things)
    modules = [*nn.ModuleList(t for t in things.values() if isinstance(t, nn.Module)).modules()]
    probes = [module for module in modules if isinstance(module, Probe)]
    for each in leaves.values():
        each.grad = None
    for probe in probes:
        probe.forwards, probe.backwards = [], []
    draw.seed(29)
    before = observed()
    loss = step(lambda *args: (result := call(*args), results.append(described(result)))[0])
    returned = {f"call {n}": result for n, result in enumerate(results, 1)}
    between = draw.next_random(device)
    if loss.requires_grad and torch.is_grad_enabled():
        loss_of(loss).backward()
    return {
        "results": returned,
        "loss": loss.detach(),
        "the random numbers after the call": between,
        **{f"gradient of {name}": leaf.grad for name, leaf in leaves.items()},
        "the random numbers after the backward pass": draw.next_random(device),
        **{f"{name} as before": now == before[name] for name, now in observed().items()},
        "modules": [(repr(m), m.training, sorted(vars(m))) for m in modules],
        "runs": Counter(run for probe in probes for run in probe.forwards * runs),
        "backward": [run for probe in probes for run in probe.backwards],
    }


def cause_of(got, want):
    """What a difference can only mean."""
    other = next((name for name in want if not same(got[name], want[name])), "")
    mine, true = got.get(other), want.get(other)
    if other.startswith("the random numbers"):
        return "torch's random stream is put back at the wrong moment, or to the wrong state"
    if other.startswith("gradient") and getattr(mine, "shape", 0) == getattr(true, "shape", 1):
        if true.any() and same(mine, 2 * true):
            return TWICE
        there = ~mine.isnan()
        if same(mine[there], true[there]):
            return "an unused output gets zeros for a gradient: 0 times infinity is NaN"
    return None


def raised(step, kind):
    """The name of the error, or what came instead."""
    try:
        step()
    except (NotImplementedError, SpecFailure):
        raise
    except Exception as error:
        return kind.__name__ if isinstance(error, kind) else repr(error)
    return "no error"


@scenarios("what comes of it")
def refuses(answer, device, name, step):
    """A step that must end in a RuntimeError."""
    return raised(partial(step, answer.checkpoint), RuntimeError), "RuntimeError"


@scenarios("the plain step, or the refusal")
def right_or_refuses(answer, device, name, kind, step):
    """The plain call's gradients, or an error of that kind; no other gradients either way."""
    leaves, seen = named(used(step)), []
    for call in (plain_call, answer.checkpoint):
        for leaf in leaves.values():
            leaf.grad = None
        error = raised(partial(step, call), kind)
        seen.append({"error": error} | {f"gradient of {n}": t.grad for n, t in leaves.items()})
    want, got = seen
    if got["error"] == kind.__name__:  # then what has no gradient in the plain step has none here
        want = {name: None if value is None else got[name] for name, value in want.items()}
    return got, want


def check_not_torchs_own(step):
    """Fail if a function of torch.utils.checkpoint runs in `step`."""
    __tracebackhide__ = True
    before, seen = sys.getprofile(), set()
    sys.setprofile(lambda frame, *_: seen.add(frame.f_globals.get("__name__", "")))
    try:
        step()
    finally:
        sys.setprofile(before)
    runs, cause = "torch.utils.checkpoint" in seen, "write the checkpoint yourself"
    check_equal(runs, False, "whether a function of torch.utils.checkpoint runs", cause=cause)


@scenarios("the plain step", cause_of)
def as_plain(answer, device, name, step):
    """A checkpoint, and the plain call in its place."""
    want = observe(plain_call, step, device, runs=2 if torch.is_grad_enabled() else 1)
    return observe(answer.checkpoint, step, device), want


def zero_grads(*things):
    """Allocate gradients first, so that a peak is one of activations; returns `things`."""
    for part in named({str(number): thing for number, thing in enumerate(things)}).values():
        part.grad = torch.zeros_like(part) if part.requires_grad else None
    return list(things)


def bytes_left(step, device, *known):
    """A function of a call that reads the bytes after the step; the step keeps things in a list."""
    return lambda call: measure(partial(step, call, []), device, known=known).retained


def peak_of(step, device, *known):
    """Bytes above the baseline."""
    return measure(step, device, known=known).above_baseline


def big_chain(count, device):
    """Layers, and an input so large that activations outweigh all else; gradients allocated."""
    rows, width = (4096, 128) if device.type == "cuda" else (256, 32)
    layers = chain(count, device, width=width)[0]
    return layers, zero_grads(layers, draw.randn(rows, width, device=device, requires_grad=True))[1]
