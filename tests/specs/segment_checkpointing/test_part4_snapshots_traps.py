"""Numbers of layers and snapshots that make no schedule."""

from __future__ import annotations

import pytest

from kit.laws import draw
from kit.laws.checks import check_equal, check_raises
from specs.segment_checkpointing.common import chain, loss_of


class TestPart4SnapshotsTraps:
    subject = "backward_with_snapshots"

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("count", "snapshots", "named"), [(0, 3, 0), (-2, 3, -2), (5, 0, 0), (5, -1, -1)]
    )
    def test_fewest_extra_steps_refuses_numbers_below_one(self, answer, count, snapshots, named):
        check_raises(
            lambda: answer.fewest_extra_steps(count, snapshots),
            ValueError,
            mentions=[named],
            when=f"for {count} layers and {snapshots} snapshots",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("count", "snapshots", "named"), [(0, 3, 0), (5, 0, 0), (5, -1, -1), (1, 0, 0)]
    )
    def test_refuses_no_layers_and_no_snapshots(self, answer, device, count, snapshots, named):
        layers, log = chain(count, device)
        x = draw.randn(3, 5, device=device, requires_grad=True)
        check_raises(
            lambda: answer.backward_with_snapshots(layers, x, loss_of, snapshots),
            ValueError,
            mentions=[named],
            when=f"for {count} layers and {snapshots} snapshots",
        )
        cause = "the numbers are checked when layers have run already"
        check_equal(log, [], "layers that ran", cause=cause)
