"""A model with a checkpoint for each block: switches, the smallest numbers, bad input."""

from __future__ import annotations

import pytest
import torch

from kit.laws.checks import check_equal, check_raises
from specs.checkpointed_model.common import WIDTH, back, by_hand, inputs, runs_of


class TestPart1LargeModelTraps:
    subject = "LargeModel"

    @pytest.mark.survives
    def test_follows_switches_that_are_set_later(self, answer, device):
        model = answer.LargeModel(4, WIDTH, use_checkpoint=False).to(device)
        runs = runs_of(model)
        cause = "the switch is read when the model is made, not when it runs"
        for use, training, want in ((False, True, 1), (True, True, 2), (True, False, 1)):
            model.use_checkpoint = use
            model.train(training)
            back(model(inputs(device)))
            what = f"runs with use_checkpoint={use}, training={training}"
            check_equal(runs.take(), 4 * [want], what, cause=cause)

    @pytest.mark.survives
    def test_takes_the_smallest_numbers(self, answer, device):
        """One layer, one wide, without dropout, on one position of one sequence."""
        model = answer.LargeModel(1, 1, dropout=0.0).to(device)
        x = torch.ones(1, 1, 1, device=device)
        output = model(x)
        cause = "a number that is in its range is not taken"
        want = by_hand(model.layers[0], x).detach()
        check_equal(output.detach(), want, "output", cause=cause)
        back(output)
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        check_equal(missing, [], "parameters without gradient", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("options", "value"),
        [
            ({"num_layers": 0}, 0),
            ({"num_layers": -3}, -3),
            ({"hidden_dim": 0}, 0),
            ({"hidden_dim": -2}, -2),
            ({"dropout": -0.25}, -0.25),
            ({"dropout": 1.75}, 1.75),
            ({"segment_size": 0}, 0),
            ({"segment_size": -1}, -1),
            ({"segment_size": 6}, 6),
        ],
        ids=[
            *("no_layers", "minus_3_layers", "no_width", "width_minus_2"),
            *("dropout_below_0", "dropout_above_1"),
            *("no_segment", "segment_minus_1", "segment_above_all"),
        ],
    )
    def test_refuses_numbers_out_of_range(self, answer, options, value):
        arguments = {"num_layers": 5, "hidden_dim": WIDTH, **options}
        given = ", ".join(f"{k}={v}" for k, v in arguments.items())
        check_raises(
            lambda: answer.LargeModel(**arguments),
            ValueError,
            mentions=[value],
            when=f"for LargeModel({given})",
        )
        if "hidden_dim" in options:
            check_raises(
                lambda: answer.MemoryIntensiveBlock(value),
                ValueError,
                mentions=[value],
                when=f"for MemoryIntensiveBlock({value})",
            )

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("x_shape", "mask_shape", "named"),
        [
            ((3, 5, 23), None, "3, 5, 23"),
            ((3, 5, 9), None, "3, 5, 9"),
            ((5, WIDTH), None, f"5, {WIDTH}"),
            ((2, 3, 5, WIDTH), None, f"2, 3, 5, {WIDTH}"),
            ((3, 5, WIDTH), (5, 3), "5, 3"),
            ((3, 5, WIDTH), (5,), "5"),
            ((3, 5, WIDTH), (3, 5, 1), "3, 5, 1"),
            ((3, 5, WIDTH), (1, 5), "1, 5"),
        ],
        ids=[
            "wide",
            "narrow",
            "no_batch",
            "4_dims",
            "mask_turned",
            "mask_1_dim",
            "mask_3_dims",
            "one_mask",
        ],
    )
    def test_refuses_wrong_shapes(self, answer, device, x_shape, mask_shape, named):
        model = answer.LargeModel(3, WIDTH).to(device)
        mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.bool).to(device)
        for training in (True, False):
            model.train(training)
            check_raises(
                lambda: model(torch.ones(x_shape, device=device), mask=mask),
                ValueError,
                mentions=[named],
                when=f"for x of shape {x_shape}, mask of shape {mask_shape}, hidden_dim {WIDTH},"
                f" {'in training' if training else 'in eval mode'}",
            )
