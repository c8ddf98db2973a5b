"""A chain in segments: the plain chain's bits, each layer's runs, and the square-root law."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.bars import bar
from kit.laws.checks import check_equal, check_raises
from kit.laws.rules import root_followed
from kit.laws.scenarios import scenarios
from specs.segment_checkpointing import worlds as w

# Layers and segments: divisible or not, both ends, and where floats round: 11 * (15 / 11) is
# below 15, 7 * (29 / 7) above 29.
DIVISIONS = [(1, 1), (4, 2), *((7, s) for s in (1, 3, 4, 6, 7)), (20, 8), (15, 11), (29, 7)]
NAMES = {(n, s): f"{n} layers in {s} segments" for n, s in DIVISIONS}


@scenarios("the plain step", w.cause_of)
def as_chain(answer, device, name, layers, x, segments, before=None):
    step = lambda call: call(layers, before(x) if before else x, segments)  # noqa: E731
    want = w.observe(w.plain, step, device)
    return w.observe(answer.run_in_segments, step, device), want


@scenarios("runs")
def runs(answer, device, name, count, segments, want):
    """Which layers ran in the call, and which segments ran again in backward."""
    layers, log = w.chain(count, device)
    out = answer.run_in_segments([*layers], draw.randn(13, 5, device=device), segments)
    called = log[:]
    if out.requires_grad:
        w.loss_of(out).backward()
    again = log[len(called) :]
    starts = [n for n, number in enumerate(again) if n == 0 or number != again[n - 1] + 1]
    lengths = [stop - start for start, stop in pairwise([*starts, len(again)])]
    seen = {"in the call": called, "sizes": sorted([*lengths, count - len(again)])}
    seen |= {"run again": len(lengths), "of a layer": max(map(again.count, again), default=0)}
    return {what: seen[what] for what in want}, want


@scenarios(
    "segments + ceil(layers / segments) at its best",
    rule=lambda answer: root_followed(answer.best_segments),
)
def peaks(answer, device, name, count):
    sums = {n: n + math.ceil(count / n) for n in range(1, count + 1)}
    got = answer.best_segments(count)
    mine = sums.get(got) if type(got) is int else None
    return mine or f"{got!r} is no whole number from 1 to {count}", min(sums.values())


class TestPart3Segments:
    @pytest.mark.works("run_in_segments", "gradients")
    @as_chain(
        "the graph is cut at a border or at the input; layers after the last whole segment are left"
        " out; or a function made in a loop sees the loop variable's last value"
    )
    def test_every_layer_gets_the_plain_gradients_to_the_bit(self):
        x = w.leaf(13, 5)
        for (count, segments), name in NAMES.items():
            yield name, w.chain(count, x.device)[0], x, segments
        first, *layers = w.chain(4, x.device)[0]
        yield "a list, with one layer twice", [first, *layers, first], x, 3
        yield "a Sequential in eval mode", nn.Sequential(*layers).eval(), x, 2
        fixed, words, frozen = w.data(13, 5), *(w.chain(6, x.device)[0] for _ in range(2))
        yield "numbers", words, fixed, 3
        words[0] = nn.Embedding(17, 5)
        yield "indices", words, torch.arange(13), 3
        frozen[:4].requires_grad_(False)
        yield "frozen layers first, from another layer", frozen, fixed, 4, nn.Linear(5, 5)

    @pytest.mark.works("run_in_segments", "written here")
    def test_segments_are_not_torchs_own(self, answer, device):
        layers, x = w.chain(7, device)[0], draw.randn(13, 5, device=device)
        w.check_not_torchs_own(lambda: w.loss_of(answer.run_in_segments(layers, x, 3)).backward())

    @pytest.mark.works("best_segments", "peak")
    @peaks("segments + layers per segment is least near the root of the number of layers")
    def test_best_segments_has_the_lowest_peak(self):
        for count in (*range(1, 200), 1000):
            yield f"{count} layers", count

    @pytest.mark.exact("run_in_segments", "runs")
    @runs("the last segment is checkpointed too, or layers run more often than once per pass")
    def test_each_layer_runs_once_and_again_except_in_the_last_segment(self):
        for (count, segments), name in NAMES.items():
            want = {"in the call": [*range(count)], "run again": segments - 1}
            yield name, count, segments, want | {"of a layer": min(segments - 1, 1)}

    @pytest.mark.exact("run_in_segments", "sizes")
    @runs("one segment gets all the layers left over by the division, and so sets the peak")
    def test_sizes_of_segments_differ_by_one_at_most(self):
        for (count, segments), name in NAMES.items():
            sizes = [count // segments + (n < count % segments) for n in range(segments)]
            yield name, count, segments, {"sizes": sorted(sizes)}

    @pytest.mark.saves("run_in_segments", "peak")
    @pytest.mark.parametrize(("count", "segments", "kind"), [(16, 4, "data"), (13, 5, "trained")])
    @bar(
        "peak of {count} layers, segments = {segments}",
        "{segments} inputs + the plain peak of ceil({count} / {segments}) layers",
        "a segment is too large, or the first run builds a graph",
    )
    def test_the_peak_is_the_inputs_and_the_largest_segment(self, device, count, segments, kind):
        """For an input that requires a gradient, and for one that does not."""
        layers, x = w.big_chain(count, device)
        x.requires_grad_(kind != "data")

        def peak(run, layers=layers):
            step = lambda: w.loss_of(run(layers, x, segments)).backward()  # noqa: E731
            return w.peak_of(step, device, layers, x)

        limit = segments * x.nbytes + peak(w.plain, layers[: math.ceil(count / segments)])
        return lambda module: peak(module.run_in_segments), limit, peak(w.plain)

    @pytest.mark.survives("run_in_segments", "Raises")
    @pytest.mark.parametrize("bad", [(7, 0), (7, -2), (7, 8), (0, 1)], ids=str)
    def test_refuses_a_number_of_segments_that_does_not_fit(self, answer, device, bad):
        count, segments = bad
        layers, log = w.chain(count, device)
        call = partial(answer.run_in_segments, layers, draw.randn(3, 5, device=device), segments)
        when = f"for {segments} segments of {count} layers"
        check_raises(call, ValueError, mentions=bad if count else [], when=when)
        cause = "the numbers are checked after layers have run"
        check_equal(log, [], "layers that ran", cause=cause)

    @pytest.mark.survives("best_segments", "Raises")
    @pytest.mark.parametrize("count", [0, -3])
    def test_best_segments_refuses_less_than_one_layer(self, answer, count):
        call, when = partial(answer.best_segments, count), f"for {count} layers"
        check_raises(call, ValueError, mentions=[count], when=when)
