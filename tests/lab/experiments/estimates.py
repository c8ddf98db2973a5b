"""What a step will need, by arithmetic and by a dry run: GPT-2 small, 7B and 70B."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kit.memory.account import account
from kit.memory.stack import KINDS, highest, stacked
from kit.ranks.simulated import dry_run
from lab import closed_form, draw
from lab.closed_form import Setting, Shape
from lab.decoder import SHAPES, make
from lab.measure import Made, books_at_full_size, solution
from lab.models import next_token, plain_step
from lab.notebook import Lab

ORDER = 9
TITLE = "Estimates"
QUESTION = "Can one work out on paper what a model needs, before any of it is made?"
SECONDS = {"quick": 30, "full": 58}
CLAIMS = ("l97-76gb",)

SETTINGS = {
    "fp32": Setting(),
    "AMP": Setting(amp=True),
    "checkpointed": Setting(checkpoint=True),
    "both": Setting(amp=True, checkpoint=True),
    "all in 16 bits": Setting(pure=True),
}
# What memory_measurement's training_bytes calls them; it has no recipe for 16-bit moments.
RECIPES = {"fp32": "adam", "checkpointed": "adam", "AMP": "amp_adam", "both": "amp_adam"}
TOKENS = (8, 1024)
QUICK = {"GPT-2 small": [*SETTINGS], "7B": ["fp32", "both"], "70B": []}
# L97 counts 2 bytes for each of four numbers a parameter, so everything has 16 bits. It does not
# say for how many tokens: with these the activations of a 7B model are its 20 GB.
L97_WAY, L97_TOKENS = "all in 16 bits", (4, 1024)
L97 = {"weights": 14.0, "gradients": 14.0, "optimizer state": 28.0, "activations": 20.0}
L97_TOTAL = 76.0
GB = 1e9


def run(lab: Lab) -> None:
    """The table, the peak of 7B against the number of tokens, and the article's four numbers."""
    wanted = QUICK if lab.quick else {name: [*SETTINGS] for name in SHAPES}
    found = {
        name: {way: lab.sample(f"{name}, {way}", partial(_dry, name, way, TOKENS)) for way in ways}
        for name, ways in wanted.items()
    }
    sizes = ", ".join(f"{name} {closed_form.parameters(SHAPES[name]):,}" for name in SHAPES)
    lab.say(
        f"Decoders by configuration, in parameters: {sizes}. One step of Adam with foreach on "
        f"{TOKENS[0]} x {TOKENS[1]} tokens. The closed form adds up the tensors that are "
        "alive at each moment of a step that can be the highest (lab/closed_form.py says which); "
        "the dry run counts those that really are, on fake tensors. Terms that the first version "
        "of the formulas lacked were found in dry runs of GPT-2 small and 7B; those of 70B are a "
        "test of them."
    )
    on_gpu = SETTINGS if lab.device.type == "cuda" else ()
    real = {way: lab.sample(f"GPU, {way}", partial(_real, way, lab.device)) for way in on_gpu}
    errors = _table(lab, found, real)
    _bars(lab, found["7B"], max(abs(error) for error in errors))
    _tokens(lab, found["7B"])
    _claim(lab)


def _table(
    lab: Lab, found: dict[str, dict[str, dict[str, Any]]], real: dict[str, int]
) -> list[float]:
    """The whole table; the errors of the closed form that could be checked, as shares."""
    rows, errors = list[list[str]](), list[float]()
    for name, shape in SHAPES.items():
        for way, setting in SETTINGS.items():
            moments = closed_form.moments(shape, setting, TOKENS[0] * TOKENS[1])
            when = max(moments, key=lambda moment: moments[moment])
            states = _states(shape, way)
            row = [name, way, _gib(states) if states else "-", _gib(moments[when]), when]
            if way in found[name]:
                peak = found[name][way]["peak"]
                errors.append(moments[when] / peak - 1)
                short = f"{states / peak - 1:+.0%}" if states else "-"
                row += [
                    _gib(peak),
                    f"{100 * errors[-1] + 0.0:+.2f} %".replace("-0.00", "+0.00"),
                    short,
                ]
            else:
                row += ["in a full run", "", ""]
            if real:
                row.append(_gib(real[way]) if name == "GPT-2 small" else "-")
            rows.append(row)
    lab.table(
        "Peak of one step, GiB: by arithmetic, and by a dry run",
        ["model", "setting", "states alone", "closed form", "highest at", "dry run"]
        + ["error of the closed form", "error of states alone"]
        + (["this GPU"] if real else []),
        rows,
    )
    adam = closed_form.moments(SHAPES["7B"], SETTINGS["fp32"], 0)["optimizer"]
    count = closed_form.parameters(SHAPES["7B"])
    lab.say(
        "States alone: weights, gradients and Adam's two moments, by memory_measurement's "
        "training_bytes. What it lacks are activations, and the copy that Adam with foreach makes "
        "of all second moments: by the formulas a float32 model takes "
        f"{_states(SHAPES['7B'], 'fp32') / count:.0f} bytes a parameter at the end of the backward "
        f"pass and {adam / count:.0f} within Adam's step. Autocast adds a 16-bit copy of every map "
        "while it runs."
    )
    return errors


def _bars(lab: Lab, found: dict[str, dict[str, Any]], worst: float) -> None:
    bars = {way: sample["at peak"] for way, sample in found.items()}
    figure, (axes,) = draw.figure(height=3.8)
    draw.stacked_bars(axes, bars)
    unit, _ = draw.unit_of(max(sample["peak"] for sample in found.values()))
    estimates = [
        closed_form.peak_bytes(SHAPES["7B"], SETTINGS[way], TOKENS[0] * TOKENS[1]) / unit
        for way in found
    ]
    style: dict[str, Any] = {"color": "black", "linewidths": 2, "zorder": 3}
    axes.scatter(estimates, list(found), marker="|", s=350, label="closed form", **style)
    handles, names = axes.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.3, -0.16)}
    axes.legend(handles, names, ncols=4, fontsize=8, frameon=False, markerscale=0.4, **place)
    title = (
        f"The closed form meets the dry run within {100 * worst:.1f} % in every row of the table"
    )
    alt = "Bytes at the peak of one step of the 7B model by kind, dry run, a mark at the estimate."
    lab.plot("seven", figure, title, alt)


def _tokens(lab: Lab, found: dict[str, dict[str, Any]]) -> None:
    """Where activations take over from Adam's step, by the closed form, checked at one point."""
    shape, here = SHAPES["7B"], TOKENS[0] * TOKENS[1]
    counts = [1024 * number for number in (1, 2, 4, 6, 8, 12, 16, 24, 32)]
    ys = dict[str, list[float]]()
    for way in SETTINGS:
        line = [closed_form.peak_bytes(shape, SETTINGS[way], n) / 2**30 for n in counts]
        same = next((name for name in ys if ys[name] == line), None)
        if same:  # one would hide the other
            ys[f"{same}, and {way}"] = ys.pop(same)
        else:
            ys[way] = line
    figure, (axes,) = draw.figure(height=3.8)
    draw.lines(axes, counts, ys)
    checked = [sample["peak"] / 2**30 for sample in found.values()]
    ring: dict[str, Any] = {"facecolors": "none", "edgecolors": "black", "zorder": 3}
    axes.scatter([here] * len(checked), checked, s=90, label="dry run", **ring)
    axes.set(xlabel="tokens in a step", ylabel="peak, GiB", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False)
    last = _tokens_of_adam(shape, SETTINGS["fp32"])
    title = (
        f"Up to {last:,} tokens the peak of 7B in float32 is Adam's step, "
        "and neither AMP nor checkpointing lowers it"
    )
    alt = "Peak of a step of the 7B model against tokens, by the closed form; dry runs as rings."
    lab.plot("tokens", figure, title, alt)


def _tokens_of_adam(shape: Shape, setting: Setting) -> int:
    """The most tokens, in hundreds, with which Adam's step is still the highest moment."""
    tokens = 100
    while True:
        moments = closed_form.moments(shape, setting, tokens + 100)
        if max(moments.values()) > moments["optimizer"]:
            return tokens
        tokens += 100


def _claim(lab: Lab) -> None:
    shape, setting = SHAPES["7B"], SETTINGS[L97_WAY]
    tokens = L97_TOKENS[0] * L97_TOKENS[1]
    got = lab.sample("L97", partial(_dry, "7B", L97_WAY, L97_TOKENS))
    arithmetic = closed_form.state_bytes(shape, setting)
    arithmetic["activations"] = closed_form.activation_bytes(shape, setting, tokens)
    most, peak, total = got["most"], got["peak"] / GB, sum(got["most"][kind] for kind in L97) / GB
    rows = [
        [kind, f"{claimed:.0f}", f"{arithmetic[kind] / GB:.1f}", f"{most[kind] / GB:.1f}"]
        for kind, claimed in L97.items()
    ]
    by_sum = f"{sum(arithmetic.values()) / GB:.1f}"
    rows.append(["sum", f"{L97_TOTAL:.0f}", by_sum, f"{total:.1f}"])
    by_moments = closed_form.peak_bytes(shape, setting, tokens)
    rows.append(["peak of the step", "", f"{by_moments / GB:.1f}", f"{peak:.1f}"])
    shapes = f"7B, all in 16 bits, {L97_TOKENS[0]} x {L97_TOKENS[1]} tokens"
    columns = ["kind, each at its own highest", "L97", "closed form", "dry run"]
    lab.table(f"L97's numbers, GB (10^9 bytes): {shapes}", columns, rows)

    worst = max(abs(claimed / (most[kind] / GB) - 1) for kind, claimed in L97.items())
    off = L97_TOTAL / peak - 1
    verdict = "holds" if abs(off) < 0.05 else "holds in part" if worst < 0.1 else "does not hold"
    parts = ", ".join(f"{most[kind] / GB:.1f} GB {kind}" for kind in L97)
    float32 = closed_form.peak_bytes(shape, SETTINGS["fp32"], tokens) / GB
    when = (
        f"Adam's moments have 16 bits too, and the step has {tokens:,} tokens. The sum is no peak: "
        "as gradients come activations go, and Adam needs a copy of its own. In float32 the closed "
        f"form gives {float32:.0f} GB"
    )
    lab.claim("l97-76gb", f"{parts}; the peak is {peak:.1f} GB", verdict=verdict, when=when)


def _dry(name: str, way: str, tokens: tuple[int, int]) -> dict[str, Any]:
    """Bytes of a step that nobody runs: the peak, its kinds, and each kind at its own highest."""
    with dry_run(1):
        step, model, optimizer, known = _made(name, way, tokens)
        # Adam's state comes from a step on zeros, which spares a pass through the model.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        books = account(step, model=model, optimizer=optimizer, known=known)
    rows = stacked(books)
    most = {kind: max(row[kind] for row in rows) for kind in KINDS}
    return {"peak": books.peak, "at peak": highest(rows), "most": most}


def _made(name: str, way: str, tokens: tuple[int, int]) -> Made:
    model, optimizer, data = make(SHAPES[name], SETTINGS[way], tokens)
    dtype = torch.bfloat16 if SETTINGS[way].amp else torch.float32
    step = partial(plain_step, model, (data, data), next_token, optimizer, dtype=dtype)
    return step, model, optimizer, [data]


def _real(way: str, device: torch.device) -> int:
    """Bytes at the peak of GPT-2 small's step as the allocator of this device has them."""
    return books_at_full_size(partial(_made, "GPT-2 small", way, TOKENS), device).peak


def _states(shape: Shape, way: str) -> int:
    """Bytes of weights, gradients and Adam's moments by the reference; 0 if it has no recipe."""
    if way not in RECIPES:
        return 0
    training_bytes = solution("memory_measurement").training_bytes
    return int(training_bytes(closed_form.parameters(shape), RECIPES[way]))


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f}"
