"""One training step and everything that can be seen of it, with checkpoints and without."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kit.laws import draw
from kit.laws.equal import Raised, same
from kit.laws.untouched import observed
from kit.private_torch import tree_flatten

WIDTH = 16  # of all models
SHAPE = (3, 5, WIDTH)  # of inputs, unless bytes are measured
HALVES = (torch.bfloat16, torch.float16)
ARGUMENTS = "arguments that reached the block"


@dataclass
class Step:
    """A forward and a backward pass."""

    model: nn.Module  # gradients, buffers and modes are compared
    forward: Callable[[], Any]  # returns tensors, also in containers
    counted: Sequence[nn.Module] = ()  # their runs are counted: a child of each block
    leaves: Sequence[Tensor] = ()  # tensors besides the parameters that get gradients
    generators: Sequence[Generator] = ()
    outer: Callable[[], Any] = nullcontext  # a context around the forward pass
    between: Callable[..., Any] | None = None  # changes the model after the forward pass
    late: Callable[..., Any] | None = None  # the same between two backward passes, if there are two
    backward: Callable[..., Any] = lambda loss, leaves: loss.backward()


def see(step, device):
    """Run a step from a fixed seed, and note everything that can be seen of it."""
    draw.seed(4)
    streams = [torch.default_generator, *step.generators]
    if device.type == "cuda":
        streams.append(torch.cuda.default_generators[device.index or torch.cuda.current_device()])
    ran = []
    for module in step.counted:
        module.register_forward_pre_hook(lambda module, args: ran.append(module))
    before = observed(step.model)
    with step.outer():
        output = step.forward()
    parts, structure = tree_flatten(output)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    heard = {name for module in step.model.modules() for name in getattr(module, "heard", ())}
    seen = {
        ARGUMENTS: sorted(heard),
        "runs in the forward pass": [*map(ran.count, step.counted)],
        "output": [t.detach().clone() for t in tensors],
        "other results": [part for part in parts if not isinstance(part, Tensor)],
        "structure of the output": str(structure),
        "requires_grad of the output": [t.requires_grad for t in tensors],
        **_buffers(step.model, "after the forward pass"),
        "numbers drawn after the forward pass": [_next(stream) for stream in streams],
    }
    ran.clear()
    if step.between:
        step.between(step.model)
    own = dict(step.model.named_buffers())
    seen["backward pass"] = _outcome(step, tensors)
    others = [name for name, b in step.model.named_buffers() if b is not own.get(name)]
    seen["buffers that the backward pass replaced"] = others
    seen["runs in the backward pass"] = [*map(ran.count, step.counted)]
    leaves = {f"input {number}": leaf for number, leaf in enumerate(step.leaves)}
    for name, p in [*step.model.named_parameters(), *leaves.items()]:
        seen[f"gradient of {name}"] = None if p.grad is None else p.grad.clone()
    seen |= _buffers(step.model, "after the backward pass")
    seen["numbers drawn after the backward pass"] = [_next(stream) for stream in streams]
    after = observed(step.model)
    seen["changed besides"] = sorted(name for name in after if after[name] != before[name])
    return seen


def _outcome(step, tensors):
    """Run the backward pass; an error of torch is part of what is seen."""
    losses = [t.float().square().mean() for t in tensors if t.requires_grad]
    if not losses:
        return "no graph"
    try:
        loss = torch.stack(losses).sum()
        if step.late:
            loss.backward(retain_graph=True)
            step.late(step.model)
        step.backward(loss, [*step.model.parameters(), *step.leaves])
    except RuntimeError as error:  # CheckpointError is one
        return Raised(error)
    return "returns"


def _next(stream):
    """What the stream would draw next."""
    state = stream.get_state()
    numbers = torch.rand(2, generator=stream, device=stream.device).tolist()
    stream.set_state(state)
    return numbers


def _buffers(model, when):
    return {f"buffer {name} {when}": buffer.clone() for name, buffer in model.named_buffers()}


def compared(mine, true, runs):
    """What is seen of a step, and what should be; `runs` of a block for each plain one."""
    again = [n * ((runs or 1) - 1) for n in true["runs in the forward pass"]]
    key = "runs in the backward pass"
    return mine, true | {key: mine[key] if runs is None else again}


def draw_on(model):
    """Draw from torch's stream and from each generator of the model."""
    draw.next_random(torch.get_default_device())
    for module in model.modules():
        for generator in getattr(module, "generators", ()):
            torch.rand(3, generator=generator, device=generator.device)


def autocast(dtype):
    """On the device under test, which is a scenario's default device."""
    return lambda: torch.autocast(torch.get_default_device().type, dtype)


def under_autocast(loss, leaves):
    """Only the backward pass is under autocast."""
    with autocast(torch.bfloat16)():
        loss.backward()


def meaning(got, want):
    """The only possible cause of the first difference, or None."""
    if lost := [name for name in want.get(ARGUMENTS, ()) if name not in got[ARGUMENTS]]:
        return f"keyword argument `{lost[0]}` never reached the block"
    name = next((name for name in want if not same(got.get(name), want[name])), "")
    if name == "output" and [t.shape for t in got[name]] == [t.shape for t in want[name]]:
        return "even the first run draws or computes something other than a plain call"
    if name.startswith("numbers drawn after the backward pass"):
        return "the random stream is not restored after the second run"
    if name.startswith("buffers that the backward pass replaced"):
        return "buffers that were put in for the second run are left there"
    if name.startswith("runs in the backward pass"):
        if got[name] == [2 * count for count in want[name]] and any(got[name]):
            return "every block runs again twice: there is a checkpoint inside a checkpoint"
        if not any(got[name]):
            return "nothing runs again: this call is not checkpointed"
        plain = [n for n, count in enumerate(got[name]) if count < want[name][n]]
        return f"block {plain[0]} does not run again: it is not checkpointed" if plain else None
    return None
