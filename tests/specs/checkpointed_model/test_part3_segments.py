"""Segments: the best size, how often blocks run, and the square-root law in bytes."""

import math
from functools import partial

import pytest
import torch

from kit.laws.checks import check_raises
from kit.laws.rules import root_followed
from kit.laws.scenarios import scenarios
from specs.checkpointed_model.large import (
    as_without,
    check_model,
    check_nothing_left,
    held,
    large,
    large_inputs,
    peak,
)
from specs.checkpointed_model.steps import WIDTH, see


def cost(layers, size):
    """Inputs that are held: one per segment, and those of one segment's blocks."""
    return math.ceil(layers / size) + size


@scenarios(
    "ceil(num_layers / s) + s at its best",
    rule=lambda answer: root_followed(answer.best_segment_size),
)
def inputs(answer, device, name, layers):
    best = min(cost(layers, s) for s in range(1, layers + 1))
    size = answer.best_segment_size(layers)
    if type(size) is not int or not 1 <= size <= layers:
        return f"{size!r} is no whole number from 1 to {layers}", best
    return best if cost(layers, size) == best else f"{cost(layers, size)}, by s = {size}", best


@scenarios("runs of each block, and how often again")
def runs(answer, device, name, layers, size):
    """Once for its segment, once for its own backward pass; early stopping may spare one."""
    seen = see(large(layers, size=size)(answer, device, True), device)
    again, wanted = seen["runs in the backward pass"], "once or twice"
    shown = wanted if {*again} <= {1, 2} else again
    return [seen["runs in the forward pass"], shown], [layers * [1], wanted]


class TestPart3Segments:
    @pytest.mark.works("best_segment_size", "least")
    @inputs("the shorter last segment counts too; the best size is near the square root")
    def test_no_other_size_needs_fewer_inputs(self):
        for layers in (*range(1, 201), 10_000):
            yield f"{layers} layers", layers

    @pytest.mark.exact("LargeModel", "segments")
    @runs("a block is in no segment, or more than two checkpoints are nested")
    def test_a_block_runs_at_most_twice_more(self):
        for layers, size in ((7, 3), (9, 9)):
            yield f"{layers} blocks by {size}", layers, size

    @pytest.mark.exact("LargeModel", "same bits")
    @as_without("a segment is skipped, or runs with other random numbers or another mask")
    def test_segments_change_no_bit(self):
        yield "3 blocks by 3", large(size=3), None
        yield "7 blocks by 3, a mask", large(7, size=3, masks=1), None
        yield "eval", large(size=2, train=False), 1
        yield "no_grad", large(size=2, outer=torch.no_grad), 1

    @pytest.mark.saves("LargeModel", "segments")
    @pytest.mark.parametrize(
        ("layers", "size", "case"),
        [(12, 4, "x without gradient"), (13, 7, "plain"), (9, 3, "mask")],
    )
    def test_peaks_at_segments_and_one_segment(self, answer, reference, device, layers, size, case):
        """13 by 7 leaves a last segment of 6 blocks, which counts as one. 9 blocks by 3 take
        2 * sqrt(9) + 1 inputs and an inside."""
        inputs = f"{math.ceil(layers / size)} segments + {size} + 1"
        given = (cost(layers, size) + 1, inputs, answer, reference, device)
        check_model(peak, layers, size, case, *given)

    @pytest.mark.saves("LargeModel", "segments")
    @pytest.mark.parametrize("case", ["plain", "mask", "autocast", "x without gradient"])
    def test_holds_one_input_a_segment_between_the_passes(self, answer, reference, device, case):
        """Two segments of 4: one input (x is in the baseline) and the output; the bar adds 1. With
        4 as the number of segments it would be 4 inputs."""
        size = {"mask": 2, "autocast": 8}.get(case, 4)
        words, given = f"{8 // size} segments + 1", (answer, reference, device)
        cause = "segment_size counts segments and not blocks, or the last segment is held in full"
        check_model(held, 8, size, case, 8 // size + 1, words, *given, cause)
        if case == "plain":
            x, model = large_inputs(device), answer.LargeModel(5, WIDTH, segment_size=2).to(device)
            check_nothing_left(model, x, lambda: model(x))

    @pytest.mark.survives("best_segment_size", "Raises")
    @pytest.mark.parametrize("layers", [0, -4])
    def test_refuses_a_model_without_layers(self, answer, layers):
        call = partial(answer.best_segment_size, layers)
        check_raises(call, ValueError, mentions=[layers], when=f"for num_layers={layers}")
