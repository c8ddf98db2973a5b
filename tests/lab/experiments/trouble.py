"""Four programs with a fault, and a fifth on cuda: what shows it, and what mends it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kit.memory.ruler import human
from lab import broken, draw, symptoms
from lab.notebook import Lab

ORDER = 8
TITLE = "When it goes wrong"
QUESTION = "Which instrument shows what is wrong, and what mends it?"
SECONDS = {"quick": 18, "full": 14}
CLAIMS = ()

SEGMENTS = 50  # of the caching allocator, 20 MiB each
HALF_MAX = torch.finfo(torch.float16).max


def run(lab: Lab) -> None:
    """A section for each fault: the program, its mend, the plot."""
    lab.say(
        "Each pair is a faulty program beside its mend, as they ran. The memory "
        "plots are the timeline of kit/memory/ruler.py."
    )
    _graph(lab)
    _leak(lab)
    _nan(lab)
    _speed(lab)
    _fragmentation(lab)


def _graph(lab: Lab) -> None:
    programs = (broken.mean_loss_with_graphs, broken.mean_loss, broken.train_with_graphs)
    found = _samples(lab, symptoms.timeline_of, *programs)
    _show(lab, "A graph that is kept alive", *programs[:2])
    held, mended, trained = (found[program.__name__] for program in programs)
    title = (
        f"An undetached loss holds {symptoms.growth(held)} of graph a batch; after backward() "
        f"the same line holds {symptoms.growth(trained)}, without a graph {symptoms.growth(mended)}"
    )
    _plot_timelines(lab, "graph", title, found)
    lab.say(
        "total_loss += loss makes the sum the end of a chain of all graphs. Where backward() has "
        "run, the graphs have freed the tensors that they saved, and only their nodes are left. It "
        "hurts where nothing runs backward: in an evaluation without no_grad()."
    )


def _leak(lab: Lab) -> None:
    programs = (broken.train_with_a_hook, broken.train_with_a_mended_hook)
    found = _samples(lab, symptoms.leak_of, *programs)
    _show(lab, "A leak in a hook", *programs)
    steps = {name: symptoms.growth(sample["timeline"]) for name, sample in found.items()}
    held, mended = steps.values()
    title = f"The leak is a staircase of {held} a batch; mended it is {mended}"
    timelines = {name: sample["timeline"] for name, sample in found.items()}
    _plot_timelines(lab, "leak", title, timelines)
    rows = [
        [name, shape, str(number), steps[name]]
        for name, sample in found.items()
        for shape, number in sample["tensors"].items()
    ]
    lab.table(
        "Tensors that are alive after the last batch, and were not before the first",
        ["program", "shape", "how many", "growth a batch"],
        rows,
    )
    if lab.device.type == "cuda":
        held_by = [
            [name, line, human(size)]
            for name, sample in found.items()
            for line, size in sample["lines"].items()
        ]
        lab.table(
            "Who allocated what is alive, by torch.cuda.memory._record_memory_history",
            ["program", "line", "bytes"],
            held_by,
        )
    else:
        lab.say(
            "The height of a step and a shape that comes once a batch say which tensor is kept. On "
            "cuda torch.cuda.memory._record_memory_history names the line that allocated it."
        )


def _nan(lab: Lab) -> None:
    programs = (broken.train_at_one_scale, broken.train_with_a_scaler)
    found = _samples(lab, symptoms.overflows_of, *programs)
    _show(lab, "NaN under float16", *programs)
    figure, (losses, gradients) = draw.figure(columns=2)
    steps = list(range(1, len(found[programs[0].__name__]["losses"]) + 1))
    known = {
        name: [math.nan if loss is None else loss for loss in sample["losses"]]
        for name, sample in found.items()
    }
    draw.lines(losses, steps, known)
    losses.set_yscale("log")
    for panel in (losses, gradients):
        panel.set_xticks(steps[::3])
    losses.set(xlabel="step", ylabel="loss (a gap is no number)")
    draw.lines(gradients, steps, {name: sample["bad"] for name, sample in found.items()})
    gradients.set_xlabel("step")
    gradients.set_ylabel("gradients with inf or NaN")
    gradients.set_yticks(range(max(max(sample["bad"]) for sample in found.values()) + 1))
    lost, kept = (sum(loss is None for loss in found[p.__name__]["losses"]) for p in programs)
    bad = found[programs[0].__name__]["bad"]
    first = next((step for step, count in zip(steps, bad, strict=True) if count), 0)
    title = (
        f"After an overflow in step {first}, {lost} of {len(steps)} losses are NaN, "
        f"and {kept} with a scaler"
    )
    if not first:
        title = f"No overflow in {len(steps)} steps on this device"
    lab.plot("nan", figure, title, "Loss and number of bad gradients in each step, two programs.")
    largest = lab.sample("largest", lambda: symptoms.largest_in_forward(lab.device))
    where = (
        "the forward pass fits, and the scaled gradients overflow. A look at activations and "
        "losses finds nothing before the weights are gone"
        if largest <= HALF_MAX
        else "the forward pass overflows already"
    )
    lab.say(
        f"One batch of {len(steps)} has inputs {symptoms.OUTLIER:,} times as large. The largest "
        f"output of a layer on it is {largest:,.0f}, and float16 goes to {HALF_MAX:,.0f}: {where}. "
        "A hook on every gradient names the step."
    )


def _speed(lab: Lab) -> None:
    programs = (broken.map_groups_one_by_one, broken.map_groups_at_once)
    names = [program.__name__ for program in programs]
    widths = [4, 8, 16, 32, 64] if lab.device.type == "cpu" else [4, 16, 64, 128, 256]
    groups = {w: partial(symptoms.groups, lab.device, w) for w in widths}
    found = {w: lab.seconds(f"groups {w}", make, rounds=50) for w, make in groups.items()}
    counts = lab.sample("operations", lambda: symptoms.operations(lab.device, widths[0]))
    sizes = [32, 128, 512] if lab.device.type == "cpu" else [64, 256, 1024, 4096]
    steps = {size: partial(symptoms.precisions, lab.device, size) for size in sizes}
    amp = {size: lab.seconds(f"AMP {size}", make) for size, make in steps.items()}
    _show(lab, "No speed-up: many small operations", *programs)
    figure, (left, right) = draw.figure(columns=2)
    # The fastest of each: a busy machine can only make these short ones slower.
    ms = {name: [1e3 * min(found[width][name]) for width in widths] for name in names}
    draw.lines(left, widths, ms)
    left.set_xscale("log", base=2)
    left.set_xticks(widths, [str(width) for width in widths])
    left.set(yscale="log", xlabel="width of a group", ylabel="milliseconds")
    faster = [min(seconds["fp32"]) / min(seconds["bf16"]) for seconds in amp.values()]
    draw.lines(right, sizes, {"bfloat16": faster, "no speed-up": [1.0] * len(sizes)})
    right.set_xscale("log", base=2)
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.set(xlabel="width of the model", ylabel="times as fast as float32", ylim=(0, None))
    slow = [one / other for one, other in zip(*ms.values(), strict=True)]
    title = (
        f"{symptoms.GROUPS} products of {widths[0]} x {widths[0]} take {slow[0]:.1f} times as long "
        f"as one batched, of {widths[-1]} x {widths[-1]} {slow[-1]:.1f} times; bfloat16 is "
        f"{faster[0]:.1f} times as fast at width {sizes[0]}, {faster[-1]:.1f} at {sizes[-1]}"
    )
    alt = "Time against the width of a group for both programs; speed of bfloat16 against width."
    lab.plot("speed", figure, title, alt)
    growth = (widths[-1] / widths[0]) ** 2
    times = ms[names[0]][-1] / ms[names[0]][0]
    lab.say(
        f"The ruler counts {counts[names[0]]} operations in the first program and "
        f"{counts[names[1]]} in the second. {growth:.0f} times the arithmetic takes the first "
        f"{times:.1f} times as long: where time does not follow size, it goes into starting "
        "operations, and no precision makes that faster."
    )


def _fragmentation(lab: Lab) -> None:
    if lab.device.type != "cuda":
        lab.say(
            "Out of memory by fragmentation is shown on cuda only: on the cpu the system's pages "
            "are joined at will, and no budget is split into segments."
        )
        return
    programs = (broken.scatter_what_stays, broken.make_what_stays_first)
    found = {
        program.__name__: lab.sample(
            program.__name__, partial(symptoms.reserved_by, program, lab.device, SEGMENTS)
        )
        for program in programs
    }
    _show(lab, "Out of memory by fragmentation", *programs)
    figure, panels = draw.figure(columns=2)
    for panel, (name, sample) in zip(panels, found.items(), strict=True):
        most = {word: [size / 2**20 for size in sample[word]] for word in ("reserved", "allocated")}
        draw.lines(panel, range(len(sample["reserved"])), most)
        _thin_marks(panel)
        panel.set_title(f"{name}: {'out of memory' if sample['failed'] else 'fits'}", fontsize=8)
        panel.set(xlabel="operation", ylabel="MiB")
    at_end = found[programs[0].__name__]
    reserved, used = at_end["reserved"][-1], at_end["allocated"][-1]
    title = (
        f"{human(reserved - used)} of {human(reserved)} reserved are free, and a request "
        f"of {human(at_end['wanted'])} {'fails' if at_end['failed'] else 'is met'}"
    )
    lab.plot("fragments", figure, title, "Reserved and allocated bytes after each operation.")


def _samples(
    lab: Lab, symptom: Callable[..., Any], *programs: Callable[..., Any]
) -> dict[str, Any]:
    """What an instrument shows of each program, by the program's name."""
    return {p.__name__: lab.sample(p.__name__, partial(symptom, lab.device, p)) for p in programs}


def _show(lab: Lab, title: str, *programs: Callable[..., object]) -> None:
    """The source of what runs: the faulty program, and its mend."""
    sources = [inspect.getsource(program).rstrip() for program in programs]
    lab.code(title, dict(zip(("faulty", "mended"), sources, strict=True)))


def _plot_timelines(lab: Lab, name: str, title: str, found: dict[str, list[int]]) -> None:
    figure, (axes,) = draw.figure()
    unit, word = draw.unit_of(max(map(max, found.values())))
    shares = [100 * (number + 1) / symptoms.POINTS for number in range(symptoms.POINTS)]
    draw.lines(axes, shares, {who: [size / unit for size in line] for who, line in found.items()})
    _thin_marks(axes)
    axes.set_xlabel("% of the program's operations")
    axes.set_ylabel(f"above the start, {word}")
    axes.set_ylim(bottom=0)
    lab.plot(name, figure, title, f"Live bytes over time in {' and '.join(found)}.")


def _thin_marks(axes: Any) -> None:
    for line in axes.lines:
        line.set_markevery(max(1, len(line.get_xdata()) // 10))
