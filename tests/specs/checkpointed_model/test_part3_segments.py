"""Segments: the best size, how often blocks run, and the square-root law in bytes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal, check_raises
from specs.checkpointed_model.common import (
    WIDTH,
    back,
    held_after_forward,
    inputs,
    large_inputs,
    one_input,
    peak,
    peak_of_block,
    peak_of_model,
    runs_of,
)


def cost(layers: int, size: int) -> int:
    """Inputs that are held: one a segment, and those of one segment's blocks."""
    return math.ceil(layers / size) + size


@functools.cache
def held_by(module, size: int, case: str, device: torch.device) -> int:
    """What 14 blocks hold between the forward and the backward pass."""
    x = large_inputs(device)
    if case == "x_without":
        x = x.detach()
    mask = draw.rand(*x.shape[:2], device=device) < 0.6 if case == "mask" else None
    model = module.LargeModel(14, WIDTH, segment_size=size).to(device)

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=case == "autocast"):
            return model(x, mask=mask)

    return held_after_forward(model, x, forward)


_SEGMENTS = (
    "the recomputation of a segment holds all of its insides (its blocks are not checkpointed"
    " again), a segment is left out, or segment_size is not heeded"
)


class TestPart3Segments:
    subject = "best_segment_size"

    @pytest.mark.works
    def test_is_the_square_root_of_a_square_number(self, answer):
        """For n = s * s no other size is as good: n / s + s has its only minimum there."""
        got = {layers: answer.best_segment_size(layers) for layers in (4, 9, 144, 10_000)}
        want = {4: 2, 9: 3, 144: 12, 10_000: 100}
        check_equal(got, want, "sizes", cause="that is no square root")

    @pytest.mark.exact
    def test_no_other_size_needs_fewer_inputs(self, answer):
        """ceil(n / s) + s, compared with all s from 1 to n, for n from 1 to 200."""
        for layers in range(1, 201):
            size = answer.best_segment_size(layers)
            check(
                isinstance(size, int) and 1 <= size <= layers,
                expected=f"a whole number from 1 to {layers} for {layers} layers",
                got=repr(size),
                cause="the result is no int, or beyond the number of layers",
            )
            best = min(range(1, layers + 1), key=lambda s: cost(layers, s))
            check(
                cost(layers, size) == cost(layers, best),
                expected=f"{cost(layers, best)} inputs for {layers} layers, as with size {best}",
                got=f"{cost(layers, size)} inputs with size {size}",
                cause="the last, shorter segment is not counted, or it goes by a rule of thumb",
            )

    @pytest.mark.exact
    @pytest.mark.parametrize(
        ("layers", "size"), [(7, 3), (6, 2), (9, 9)], ids=["7_by_3", "6_by_2", "9_by_9"]
    )
    def test_a_block_runs_once_or_twice_more(self, answer, device, layers, size):
        """Once for its segment, once for its own backward pass; early stopping may spare one."""
        model = answer.LargeModel(layers, WIDTH, segment_size=size).to(device)
        runs = runs_of(model)
        output = model(inputs(device))
        cause = "blocks run more than once in the forward pass itself"
        check_equal(runs.counts, layers * [1], "runs after the forward pass", cause=cause)
        back(output)
        check(
            all(count in (2, 3) for count in runs.counts),
            expected="each block run 2 or 3 times after the backward pass",
            got=runs.counts,
            cause="1: a block is in no segment, such as those after the last whole one; above 3:"
            " checkpoints within checkpoints within checkpoints",
        )

    @pytest.mark.saves
    @pytest.mark.parametrize(
        ("layers", "size"),
        [(16, 4), (17, 5), (16, 2), (9, 9), (13, 7)],
        ids=["16_by_4", "17_by_5", "16_by_2", "9_by_9", "13_by_7"],
    )
    def test_peaks_at_segments_and_one_segment(self, answer, reference, device, layers, size):
        """(segments + s + 1) inputs + 1 inside; segments = ceil(num_layers / s).

        17 by 5 and 13 by 7 leave a last segment of 2 and of 6 blocks, which count as one.
        """
        x = large_inputs(device)
        inside = peak_of_block(answer, device)
        check_bar(
            f"peak above the baseline, {layers} blocks by {size}",
            peak_of_model(answer, layers, size, device),
            (cost(layers, size) + 1) * one_input(x) + inside,
            plain=peak_of_model(reference, layers, size, device, use=False),
            reference=peak_of_model(reference, layers, size, device),
            formula=f"({math.ceil(layers / size)} segments + {size} + 1) inputs + 1 inside",
            cause=_SEGMENTS,
        )

    @pytest.mark.saves
    @pytest.mark.parametrize("case", ["x_with_gradient", "x_without", "mask", "autocast"])
    def test_holds_one_input_a_segment_between_forward_and_backward(
        self, answer, reference, device, case
    ):
        """Two segments of 7: x is the baseline's, so one input and the output. The bar adds 1.

        Were 7 the number of segments, it would be 7 inputs.
        """
        check_bar(
            f"held after the forward pass, 14 blocks by 7, {case}",
            held_by(answer, 7, case, device),
            3 * one_input(large_inputs(device)),
            plain=held_by(reference, 1, case, device),
            reference=held_by(reference, 7, case, device),
            formula="(2 segments + 1) inputs; plain has a checkpoint a block",
            cause="segment_size is the number of blocks in a segment, and not of segments; or the"
            " inputs of all blocks are held, be it in this case only",
        )

    @pytest.mark.saves
    def test_grows_with_the_square_root_of_the_depth(self, answer, reference, device):
        """With the best size at most 2 * sqrt(n) + 1 inputs are held, at 9, 16 and 36 blocks."""
        x = large_inputs(device)
        inside = peak_of_block(answer, device)
        for layers in (9, 16, 36):
            yours, theirs = (
                peak_of_model(module, layers, module.best_segment_size(layers), device)
                for module in (answer, reference)
            )
            check_bar(
                f"peak above the baseline, {layers} blocks",
                yours,
                (2 * math.sqrt(layers) + 1) * one_input(x) + inside,
                plain=peak_of_model(reference, layers, 1, device),
                reference=theirs,
                formula="(2 sqrt(n) + 1) inputs + 1 inside; plain has a checkpoint a block",
                cause=_SEGMENTS,
            )

    @pytest.mark.survives
    @pytest.mark.parametrize("layers", [0, -4])
    def test_refuses_a_model_without_layers(self, answer, layers):
        check_raises(
            lambda: answer.best_segment_size(layers),
            ValueError,
            mentions=[layers],
            when=f"for num_layers={layers}",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("when", ["eval", "no_grad", "switched_off"])
    def test_segments_run_once_where_nothing_is_recomputed(self, answer, device, when):
        use = when != "switched_off"
        model = answer.LargeModel(7, WIDTH, segment_size=3, use_checkpoint=use).to(device)
        model.train(when != "eval")
        runs = runs_of(model)
        with torch.set_grad_enabled(when != "no_grad"):
            output = model(inputs(device))
        if when != "no_grad":
            back(output)
        cause = "self.training, or use_checkpoint, is not asked before segments are made"
        check_equal(runs.counts, 7 * [1], f"runs of each block ({when})", cause=cause)

    @pytest.mark.survives
    def test_follows_a_segment_size_that_is_set_later(self, answer, device):
        """16 blocks made for segments of 1, then 4: (4 + 4 + 1) inputs + 1 inside; and back."""
        x = large_inputs(device)
        model = answer.LargeModel(16, WIDTH).to(device)
        inside = peak_of_block(answer, device)
        model.segment_size = 4
        cause = "the segments are made with the model, not when it runs"
        check_bar(
            "peak above the baseline, 16 blocks by 4",
            peak(model, x),
            9 * one_input(x) + inside,
            formula="(4 segments + 4 + 1) inputs + 1 inside",
            cause=cause,
        )
        model.segment_size = 1
        runs = runs_of(model)
        back(model(inputs(device)))
        check_equal(runs.counts, 16 * [2], "runs of each block, back at size 1", cause=cause)
