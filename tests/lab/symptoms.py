"""What shows that a program of `lab.broken` is faulty: timelines, tensors, gradients, times."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from kit.laws.toys import mlp
from kit.memory.ruler import human, measure
from kit.private_torch import DispatchMode, allocation_history
from lab import broken
from lab.measure import cuda_budget, solution

COUNT = 16  # batches
POINTS = 64  # of a timeline in a plot
GROUPS = 128
OUTLIER = 10_000  # times as large are the inputs of one batch


def _sizes(device: torch.device) -> tuple[int, int]:
    """Samples in a batch, and the width of the model; float16 is slow on a cpu."""
    return (4096, 1024) if device.type == "cuda" else (128, 128)


def _model(device: torch.device) -> nn.Sequential:
    width = _sizes(device)[1]
    return mlp(width, 4 * width, width, device=device, activation=nn.GELU)


def _batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    size = _sizes(device)
    pairs = [(torch.randn(size), torch.randn(size)) for _ in range(COUNT)]
    return [(x.to(device), y.to(device)) for x, y in pairs]


def timeline_of(device: torch.device, program: Callable[..., object]) -> list[int]:
    """Bytes that a program adds, at POINTS of its time; gradients are there before."""
    model, batches = _model(device), _batches(device)
    F.mse_loss(model(batches[0][0]), batches[0][1]).backward()
    reading = measure(lambda: program(model, batches), device, known=[model, batches])
    return _thinned([size - reading.baseline for size in reading.timeline])


def _thinned(sizes: Sequence[int]) -> list[int]:
    """POINTS of them, each the highest of its stretch."""
    edges = [len(sizes) * number // POINTS for number in range(POINTS + 1)]
    return [max(sizes[start:end]) for start, end in pairwise(edges)]


def growth(timeline: Sequence[int]) -> str:
    """Growth a batch: from the highest of the second quarter to the highest of the last."""
    quarter = len(timeline) // 4
    grown = max(timeline[-quarter:]) - max(timeline[quarter : 2 * quarter])
    return human(round(grown / (COUNT / 2)))


def leak_of(device: torch.device, program: Callable[..., object]) -> dict[str, Any]:
    """The timeline, and what is alive while the program still runs, after its last batch."""
    model, batches = _model(device), _batches(device)
    optimizer = Adam(model.parameters())
    broken.train_with_a_mended_hook(model, batches[:1], optimizer)
    found, before = dict[str, Any](), _shapes()

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches
        grown = _shapes() - before
        found["tensors"] = {shape: n for shape, n in grown.items() if n >= COUNT - 1}
        found["lines"] = history() if device.type == "cuda" else {}

    with lines_that_hold(device) as history:
        reading = measure(
            lambda: program(model, watched(), optimizer),
            device,
            known=[model, optimizer, batches],
        )
    found["timeline"] = _thinned([size - reading.baseline for size in reading.timeline])
    return found


def _shapes() -> Counter[str]:
    """How many tensors of each shape Python holds."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return Counter(" x ".join(map(str, tensor.shape)) or "a number" for tensor in tensors)


def _nan_batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Targets that can be learned, and one batch with large inputs after a third of them."""
    batches = [(x, x.roll(1, dims=-1)) for x, _ in _batches(device)]
    third = COUNT // 3
    batches[third] = (batches[third][0] * OUTLIER, batches[third][1] * OUTLIER)
    return batches


def overflows_of(device: torch.device, program: Callable[..., list[float]]) -> dict[str, list[Any]]:
    """The losses, None for one that is no number, and bad gradients in each step."""
    model, bad = _model(device), list[bool]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: bad.append(p.grad is not None and not bool(p.grad.isfinite().all()))
        )
    losses = program(model, _nan_batches(device), Adam(model.parameters()))
    each = len(list(model.parameters()))
    counts = [sum(bad[start : start + each]) for start in range(0, len(bad), each)]
    return {"losses": [x if math.isfinite(x) else None for x in losses], "bad": counts}


def largest_in_forward(device: torch.device) -> float:
    """The largest output of a layer on the batch with large inputs, in float16."""
    model, outputs = _model(device), list[float]()
    for layer in model:
        layer.register_forward_hook(lambda *call: outputs.append(call[-1].abs().max().item()))
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
        model(_nan_batches(device)[COUNT // 3][0])
    return max(outputs)


def groups(device: torch.device, width: int) -> dict[str, Callable[[], object]]:
    """Both programs that map groups, as steps."""
    x = torch.randn(64, GROUPS, width).to(device)
    weights = torch.randn(GROUPS, width, width).to(device)
    programs = (broken.map_groups_one_by_one, broken.map_groups_at_once)
    return {program.__name__: partial(program, x, weights) for program in programs}


def operations(device: torch.device, width: int) -> dict[str, int]:
    """How many operators each of them calls: the ruler sees each."""
    # A point for each operation, one before and one after.
    steps = groups(device, width)
    return {name: len(measure(step, device).timeline) - 2 for name, step in steps.items()}


def precisions(device: torch.device, width: int) -> dict[str, Callable[[], object]]:
    """A training step of a model so wide in two precisions."""
    model = mlp(width, 4 * width, width, device=device, activation=nn.GELU)
    x = torch.randn(_sizes(device)[0], width).to(device)
    step = partial(solution("amp_loop").train_step, model, (x, x), F.mse_loss)
    optimizer = Adam(model.parameters())
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {name: partial(step, optimizer, dtype=dtype) for name, dtype in dtypes.items()}


@contextmanager
def lines_that_hold(device: torch.device) -> Iterator[Callable[[], dict[str, int]]]:
    """Record allocations; yields what gives bytes alive for each line of the lab that made them.

    Elsewhere than on cuda there is none.
    """
    if device.type != "cuda":
        yield dict
        return
    with allocation_history(device) as snapshot:
        yield lambda: _alive_by_line(snapshot())


def _alive_by_line(snapshot: dict[str, Any]) -> dict[str, int]:
    found = Counter[str]()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            # Innermost first; what was allocated before the record began has no frames.
            frames = block.get("frames") or []
            if block["state"] == "active_allocated" and (line := _line(frames)):
                found[line] += block["size"]
    return dict(found.most_common(4))


def _line(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        path = Path(frame["filename"])
        if Path(__file__).parent in path.parents:
            return f"{path.name}:{frame['line']} {frame['name']}"
    return ""


def reserved_by(
    program: Callable[[torch.device, int], object], device: torch.device, segments: int
) -> dict[str, Any]:
    """Bytes reserved and allocated after each operation of a program within a budget.

    The budget is what is reserved already, `segments` of 20 MiB, and a tenth of these. `failed`:
    whether it ran out of memory; `wanted`: the bytes of its last request.
    """
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved(device)
    budget = start + int(segments * 20 * 2**20 * 1.1)
    mode, failed = _Counters(device), False
    try:
        with cuda_budget(device, budget), mode:
            program(device, segments)
    except torch.OutOfMemoryError:
        failed = True  # what its traceback holds is freed at the end of this block
    gc.collect()
    torch.cuda.empty_cache()
    return {**mode.counts, "failed": failed, "wanted": segments * 10 * 2**20}


class _Counters(DispatchMode):
    """Reads the allocator's counters before each operation, and after the last."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.counts: dict[str, list[int]] = {"reserved": [], "allocated": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before, so that the last reading is what the last request found.
        self.counts["reserved"].append(torch.cuda.memory_reserved(self._device))
        self.counts["allocated"].append(torch.cuda.memory_allocated(self._device))
        return func(*args, **(kwargs or {}))
