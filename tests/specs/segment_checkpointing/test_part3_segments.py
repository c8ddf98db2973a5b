"""A chain in segments: the plain chain's bits, each layer's runs, and the square-root law."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torchs_own

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal, check_raises
from kit.laws.toys import mlp
from specs.segment_checkpointing.common import (
    big_chain,
    big_input,
    chain,
    check_not_torchs_own,
    check_random,
    check_same,
    loss_of,
    named,
    peak_of,
    plain,
    plain_peak,
    run_lengths,
    train,
    zero_grads,
)

# Layers and segments: whole divisions, rests of one and of many, and both ends.
DIVISIONS = pytest.mark.parametrize(
    ("count", "segments"),
    [(1, 1), (4, 2), (7, 1), (7, 2), (7, 3), (7, 4), (7, 5), (7, 6), (7, 7), (11, 4), (14, 9)],
)


class TestPart3Segments:
    subject = "run_in_segments"

    @pytest.mark.works
    @DIVISIONS
    def test_every_layer_gets_the_plain_gradients_to_the_bit(self, answer, device, count, segments):
        """With dropout. Behaviours: test_checkpoint (through checkpoint_sequential) and
        test_checkpoint_module_list of torch's test_utils."""
        layers, _ = chain(count, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}
        want = train(lambda: loss_of(plain(layers, x)), leaves)
        got = train(lambda: loss_of(answer.run_in_segments(layers, x, segments)), leaves)
        cause = "layers are left out or run twice where the division leaves a rest"
        if torch.equal(got.loss, want.loss):
            cause = "detaching at a border cuts the graph and nothing joins it again"
        check_same(got, want, cause=cause)
        check_random(got, want, cause="the random stream afterwards is another")

    @pytest.mark.works
    def test_segments_are_not_torchs_own(self, answer, device):
        layers, _ = chain(7, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        check_not_torchs_own(lambda: loss_of(answer.run_in_segments(layers, x, 3)).backward())

    @pytest.mark.works
    def test_best_segments_has_the_lowest_peak(self, answer):
        """The least of segments + ceil(layers / segments) over all numbers of segments."""
        for count in (*range(1, 40), 64, 143, 144, 145, 1000):
            peaks = {n: n + math.ceil(count / n) for n in range(1, count + 1)}
            got = answer.best_segments(count)
            check(
                got in peaks and peaks[got] == min(peaks.values()),
                expected=f"for {count} layers a number of segments whose peak is "
                f"{min(peaks.values())} activations",
                got=f"{got}, whose peak is {peaks.get(got)}",
                cause="the sum of the two is least near the root of the number of layers",
            )
            cause = "a number of segments is an int"
            check_equal(type(got), int, f"type of best_segments({count})", cause=cause)

    @pytest.mark.exact
    @DIVISIONS
    def test_each_layer_runs_twice_but_those_of_the_last_segment(
        self, answer, device, count, segments
    ):
        """Runs in the backward pass: n - the last segment's layers, segment by segment from the
        last but one to the first. Behaviour: test_checkpoint_trigger of torch's test_utils."""
        layers, log = chain(count, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        out = answer.run_in_segments(layers, x, segments)
        cause = "layers run more than once, in another order, or not at all"
        check_equal(log, list(range(count)), "layers that ran in the forward pass", cause=cause)
        log.clear()
        loss_of(out).backward()
        cause = "each checkpointed layer runs once more, and the last segment's do not"
        if len(log) == count:
            cause = "the last segment is checkpointed too, and costs a forward pass for nothing"
        again = run_lengths(log)  # sizes of the segments, the last but one first
        check_equal(sorted(log), list(range(sum(again))), "layers that ran again", cause=cause)
        check_equal(len(again), segments - 1, "segments that ran again", cause=cause)
        sizes = [*reversed(again), count - sum(again)]
        check(
            max(sizes) - min(sizes) <= 1,
            expected=f"sizes of the {segments} segments of {count} layers that differ by one",
            got=sizes,
            cause="the rest of the division goes to one segment, which then sets the peak",
        )

    @pytest.mark.exact
    @pytest.mark.parametrize("kind", ["numbers", "indices", "from_another_layer", "unequal_widths"])
    def test_the_input_need_not_require_a_gradient(self, answer, device, kind):
        """Behaviour: test_checkpointing_without_reentrant[input_requires_grad=False] of torch."""
        layers, _ = chain(6, device)
        before = nn.Linear(5, 5).to(device)
        x = draw.randn(13, 5, device=device)
        if kind == "indices":
            layers[0] = nn.Embedding(17, 5).to(device)
            x = draw.randint(17, (13,), device=device)
        if kind == "unequal_widths":
            layers = list(mlp(5, 9, 2, 7, device=device))

        def loss(run: Callable[[Tensor], Tensor]) -> Tensor:
            return loss_of(run(before(x) if kind == "from_another_layer" else x))

        leaves = {"x (which needs none)": x, **named([*layers, before])}
        want = train(lambda: loss(lambda y: plain(layers, y)), leaves)
        got = train(lambda: loss(lambda y: answer.run_in_segments(layers, y, 3)), leaves)
        cause = "the first segment's checkpoint is left out of the graph, or cut off what is before"
        check_same(got, want, cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize(
        "kind",
        [tuple, nn.ModuleList, lambda layers: nn.Sequential(*layers)],
        ids=["tuple", "ModuleList", "Sequential"],
    )
    def test_layers_may_be_any_sequence_and_one_may_be_there_twice(self, answer, device, kind):
        """Behaviour: test_checkpoint_module_list of torch's test_utils."""
        layers, _ = chain(5, device)
        layers[3] = layers[0]
        layers[1].requires_grad_(False)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}
        want = train(lambda: loss_of(plain(layers, x)), leaves)
        got = train(lambda: loss_of(answer.run_in_segments(kind(layers), x, 3)), leaves)
        check_same(got, want, cause="layers are known by what they are, not by where they stand")

    @pytest.mark.exact
    def test_without_gradients_each_layer_runs_once(self, answer, device):
        layers, log = chain(7, device)
        with torch.no_grad():
            out = answer.run_in_segments(layers, draw.randn(3, 5, device=device), 3)
        check_equal(log, list(range(7)), "layers that ran", cause="no_grad() is not heeded")
        check_equal(out.requires_grad, False, "requires_grad", cause="no_grad() is not heeded")

    @pytest.mark.saves
    @pytest.mark.parametrize(("count", "segments"), [(16, 4), (14, 3), (13, 5), (16, 16)])
    def test_the_peak_is_the_inputs_and_the_largest_segment(
        self, answer, reference, device, count, segments
    ):
        """One input for each segment, and the largest segment's own plain peak.

        Bar: segments x input + the plain peak of ceil(layers / segments) layers.
        """
        layers, x = big_chain(count, device), big_input(device)
        known = zero_grads(layers, x)

        def peak(module: object) -> int:
            return peak_of(
                lambda: loss_of(module.run_in_segments(layers, x, segments)).backward(),
                known,
                device,
            )

        largest = math.ceil(count / segments)
        check_bar(
            f"peak of {count} layers, segments = {segments}",
            peak(answer),
            segments * x.nbytes + plain_peak(layers[:largest], x),
            plain=plain_peak(layers, x),
            reference=peak(reference),
            formula=f"{segments} inputs + the plain peak of {largest} of the layers",
            cause=_law,
        )

    @pytest.mark.saves
    def test_is_no_larger_than_torchs_own(self, answer, reference, device):
        """torch.utils.checkpoint.checkpoint_sequential(use_reentrant=True), 16 layers, 4 segments.

        Bar: its peak + one input.
        """
        layers, x = big_chain(16, device), big_input(device)
        known = zero_grads(layers, x)

        def peak(run: Callable[[nn.ModuleList, Tensor, int], Tensor]) -> int:
            return peak_of(lambda: loss_of(run(layers, x, 4)).backward(), known, device)

        def torchs(layers: nn.ModuleList, x: Tensor, segments: int) -> Tensor:
            # Without its decorator, which would import torch._dynamo for a second and more.
            bare = getattr(torchs_own.checkpoint, "__wrapped__", torchs_own.checkpoint)
            with mock.patch.object(torchs_own, "checkpoint", bare):
                return torchs_own.checkpoint_sequential(
                    list(layers), segments, x, use_reentrant=True
                )

        check_bar(
            "peak of 16 layers in 4 segments",
            peak(answer.run_in_segments),
            peak(torchs) + x.nbytes,
            plain=plain_peak(layers, x),
            reference=peak(reference.run_in_segments),
            formula="checkpoint_sequential's peak + one input",
            cause=_law,
        )

    @pytest.mark.saves
    def test_the_peak_grows_as_the_square_root_of_the_depth(self, answer, reference, device):
        """peak ~ layers ** e, fitted over 16, 64 and 144 layers with best_segments of each.

        2 sqrt(n) and a constant for one layer's inside give e = 0.45; a plain chain has 0.97.
        Bar: e <= 0.6, over the three and from the first to the last alone.
        """
        x, counts = big_input(device), (16, 64, 144)

        def peak(module: object, count: int) -> int:
            layers = big_chain(count, device)
            known, segments = zero_grads(layers, x), module.best_segments(count)
            return peak_of(
                lambda: loss_of(module.run_in_segments(layers, x, segments)).backward(),
                known,
                device,
            )

        mine = [peak(answer, count) for count in counts]
        exponent = _slope([math.log(n) for n in counts], [math.log(p) for p in mine])
        check_bar(
            "peak of 144 layers",
            mine[2],
            mine[0] * (144 / 16) ** 0.6,
            plain=plain_peak(big_chain(144, device), x),
            reference=peak(reference, 144),
            formula="the peak of 16 layers x 9 ** 0.6",
            cause=_root,
        )
        check(
            exponent <= 0.6,
            expected="a peak that grows as layers ** 0.6 at most",
            got=f"layers ** {exponent:.2f} ({mine} bytes for {counts} layers)",
            cause=_root,
        )

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("count", "segments"), [(7, 0), (7, -2), (7, 8), (0, 1), (0, 0), (3, 10)]
    )
    def test_refuses_a_number_of_segments_that_does_not_fit(self, answer, device, count, segments):
        layers, log = chain(count, device)
        x = draw.randn(3, 5, device=device)
        check_raises(
            lambda: answer.run_in_segments(layers, x, segments),
            ValueError,
            mentions=[segments, count] if count else [0],
            when=f"for {segments} segments of {count} layers",
        )
        cause = "the numbers are checked when layers have run already"
        check_equal(log, [], "layers that ran", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("count", [0, -3])
    def test_best_segments_refuses_less_than_one_layer(self, answer, count):
        check_raises(
            lambda: answer.best_segments(count),
            ValueError,
            mentions=[count],
            when=f"for {count} layers",
        )


def _slope(x: list[float], y: list[float]) -> float:
    """Of the straight line through these points, by least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


_law = (
    "a segment is larger than it need be, more than one input of each is kept, or the first run "
    "builds a graph"
)
_root = "the number of segments does not grow with the depth, or the segments do not help"
