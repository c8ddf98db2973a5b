"""The schedule with the fewest steps, counted three ways, and run for real."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal
from kit.laws.toys import mlp
from kit.memory.ruler import measure
from specs.segment_checkpointing.common import (
    big_chain,
    big_input,
    chain,
    check_random,
    check_same,
    loss_of,
    named,
    peak_of,
    plain,
    plain_peak,
    run,
    train,
    zero_grads,
)
from specs.segment_checkpointing.schedule import (
    PUBLISHED,
    cheapest,
    closed_form,
    snapshots_needed,
)

# Layers and snapshots: one of each, too few, as many as needed, and more than there are layers.
RUNS = pytest.mark.parametrize(
    ("count", "snapshots"),
    [(1, 1), (1, 3), (2, 1), (2, 2), (10, 1), (10, 2), (10, 3), (10, 4), (24, 3), (7, 6), (7, 20)],
)


class TestPart4Snapshots:
    subject = "backward_with_snapshots"

    @pytest.mark.works
    @pytest.mark.parametrize(("count", "snapshots"), PUBLISHED)
    def test_counts_the_published_steps(self, answer, count, snapshots):
        """Griewank and Walther, Algorithm 799 (revolve)."""
        got = answer.fewest_extra_steps(count, snapshots)
        want = PUBLISHED[count, snapshots]
        cause = "snapshots are spread evenly, or the place of one that is done is not used again"
        if got == want + count:
            cause = "the forward with a graph that each layer has is counted too"
        elif got == want + 1 or got == want + count - 1:
            cause = "a layer is counted that need not run besides: the last one's input is enough"
        check_equal(got, want, f"fewest_extra_steps({count}, {snapshots})", cause=cause)

    @pytest.mark.works
    @RUNS
    def test_gives_the_plain_loss_and_gradients_to_the_bit(self, answer, device, count, snapshots):
        """With dropout."""
        layers, _ = chain(count, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}
        want = train(lambda: loss_of(plain(layers, x)), leaves)
        got = run(lambda: answer.backward_with_snapshots(layers, x, loss_of, snapshots), leaves)
        check_same(got, want, cause=_values)
        check_equal(got.loss.dim(), 0, "dimensions of the loss", cause="it is a scalar")
        loss = answer.backward_with_snapshots(layers, x, loss_of, snapshots)
        cause = "the loss is returned with its graph, which keeps the last layer's activations"
        check_equal(loss.requires_grad, False, "requires_grad of the loss", cause=cause)

    @pytest.mark.exact
    def test_no_sequence_of_actions_is_shorter(self, answer):
        """Advance, keep, give up, backward: all sequences are searched, 1 to 6 layers."""
        for count in range(1, 7):
            for snapshots in range(1, 5):
                got = answer.fewest_extra_steps(count, snapshots)
                want = cheapest(count, snapshots)
                cause = "a shorter schedule exists" if got > want else "no schedule is so short"
                check_equal(got, want, f"fewest_extra_steps({count}, {snapshots})", cause=cause)

    @pytest.mark.exact
    def test_agrees_with_the_closed_form(self, answer):
        """r * l - C(s + r, s + 1), with the least r such that C(s + r, s) >= l."""
        for count in (2, 3, 5, 8, 13, 20, 21, 22, 34, 55, 56, 57):
            for snapshots in (1, 2, 3, 4, 5, 6, 9, 60):
                got = answer.fewest_extra_steps(count, snapshots)
                want = closed_form(count, snapshots)
                what = f"fewest_extra_steps({count}, {snapshots})"
                check_equal(got, want, what, cause="the best split is not looked for everywhere")

    @pytest.mark.exact
    @RUNS
    def test_runs_as_many_layers_as_it_says_and_the_loss_once(
        self, answer, device, count, snapshots
    ):
        """Runs in all: layers + fewest_extra_steps."""
        layers, log = chain(count, device)
        x, losses = draw.randn(3, 5, device=device, requires_grad=True), []

        def loss_fn(out: Tensor) -> Tensor:
            losses.append(1)
            return loss_of(out)

        answer.backward_with_snapshots(layers, x, loss_fn, snapshots)
        want = count + closed_form(count, snapshots)
        cause = (
            "the schedule that is run is not the one that is counted, or a layer runs without a "
            "graph right before it runs with one"
        )
        if len(log) < want:
            cause = (
                "no schedule is so short: more inputs are kept than `snapshots`, or x is not one"
            )
        check_equal(len(log), want, "runs of layers", cause=cause)
        cause = "the loss is computed again when its layer is"
        check_equal(len(losses), 1, "calls of loss_fn", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("snapshots", [1, 3, 9])
    def test_the_random_stream_goes_on_as_if_each_layer_ran_once(self, answer, device, snapshots):
        """The loss draws random numbers too."""
        layers, _ = chain(8, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}

        def loss_fn(out: Tensor) -> Tensor:
            return loss_of(torch.nn.functional.dropout(out, 0.5))

        want = train(lambda: loss_fn(plain(layers, x)), leaves)
        got = run(lambda: answer.backward_with_snapshots(layers, x, loss_fn, snapshots), leaves)
        check_same(got, want, cause=_values)
        cause = "the state after the last run of some layer stays, or that from before the loss"
        check_random(got, want, cause=cause)

    @pytest.mark.exact
    def test_sweeping_adds_to_the_gradients_that_are_there(self, answer, device):
        layers, _ = chain(5, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}

        def after_another(step: Callable[[], Tensor]) -> Tensor:
            plain(layers, x).sum().backward()
            return step()

        def plainly() -> Tensor:
            loss = loss_of(plain(layers, x))
            loss.backward()
            return loss

        want = run(lambda: after_another(plainly), leaves)
        got = run(
            lambda: after_another(lambda: answer.backward_with_snapshots(layers, x, loss_of, 2)),
            leaves,
        )
        cause = "gradients are set, not added to those of an earlier backward pass"
        check_same(got, want, cause=cause)

    @pytest.mark.exact
    def test_the_loss_may_have_parameters(self, answer, device):
        layers, _ = chain(5, device)
        head, x = nn.Linear(5, 3).to(device), draw.randn(13, 5, device=device)

        def loss_fn(out: Tensor) -> Tensor:
            return loss_of(head(out))

        leaves = named([*layers, head])
        want = train(lambda: loss_fn(plain(layers, x)), leaves)
        got = run(lambda: answer.backward_with_snapshots(layers, x, loss_fn, 2), leaves)
        check_same(got, want, cause="only the layers' own parameters are asked for a gradient")

    @pytest.mark.saves
    @pytest.mark.parametrize(("count", "snapshots"), [(10, 2), (10, 4), (24, 3), (13, 1), (9, 12)])
    def test_keeps_no_more_inputs_than_it_may(self, answer, device, count, snapshots):
        """Read off the order in which the layers run: an input that its layer takes up again,
        without the layer before having run just then, was kept in between."""
        layers, log = chain(count, device)
        x = draw.randn(3, 5, device=device, requires_grad=True)
        answer.backward_with_snapshots(layers, x, loss_of, snapshots)
        needed = snapshots_needed(log)
        check(
            needed <= snapshots,
            expected=f"at most {snapshots} layer inputs kept at a time, x among them",
            got=f"{needed} (layers ran in the order {', '.join(map(str, log))})",
            cause="x is not counted, or a snapshot is placed before another is given up",
        )

    @pytest.mark.saves
    @pytest.mark.parametrize(("count", "snapshots"), [(10, 1), (10, 3), (24, 3), (24, 6)])
    def test_the_peak_is_the_snapshots_and_one_layer(
        self, answer, reference, device, count, snapshots
    ):
        """Bar: snapshots + 1 inputs (the one under way) + the plain peak of one layer."""
        layers, x = big_chain(count, device), big_input(device)
        known = zero_grads(layers, x)

        def peak(module: object) -> int:
            return peak_of(
                lambda: module.backward_with_snapshots(layers, x, loss_of, snapshots),
                known,
                device,
            )

        check_bar(
            f"peak of {count} layers, snapshots = {snapshots}",
            peak(answer),
            (snapshots + 1) * x.nbytes + plain_peak(layers[:1], x),
            plain=plain_peak(layers, x),
            reference=peak(reference),
            formula=f"{snapshots} + 1 inputs + one layer's plain peak",
            cause="snapshots are not given up when they are done, or a graph spans several layers",
        )

    @pytest.mark.saves
    def test_the_sweep_leaves_nothing_behind(self, answer, reference, device):
        """Bar: 8 KiB. An input has 32 KiB or more."""
        layers, x = big_chain(10, device), big_input(device)
        known = zero_grads(layers, x)

        def left(module: object) -> int:
            step = partial(module.backward_with_snapshots, layers, x, loss_of, 3)
            return measure(step, device, known=known).retained

        check_bar(
            "bytes after the sweep",
            left(answer),
            8192,
            plain=plain_peak(layers, x),
            reference=left(reference),
            formula="8 KiB",
            cause="an output or a snapshot is kept where it outlives the call",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("kind", ["data", "indices", "from_another_layer", "unequal_widths"])
    @pytest.mark.parametrize("frozen", [0, 2], ids=["all_trained", "two_frozen"])
    def test_the_input_may_be_anything(self, answer, device, kind, frozen):
        """No gradient required, integers, not a leaf, layers that widen and narrow; the first
        layers frozen or not."""
        layers, _ = chain(6, device)
        before = nn.Linear(5, 5).to(device)
        data = draw.randn(13, 5, device=device)
        if kind == "indices":
            layers[0] = nn.Embedding(17, 5).to(device)
            data = draw.randint(17, (13,), device=device)
        if kind == "unequal_widths":
            layers = list(mlp(5, 9, 2, 7, device=device))
        for layer in layers[:frozen]:
            layer.requires_grad_(False)

        def x() -> Tensor:
            return before(data) if kind == "from_another_layer" else data

        leaves = {"data (which needs none)": data, **named([*layers, before])}
        want = train(lambda: loss_of(plain(layers, x())), leaves)
        got = run(lambda: answer.backward_with_snapshots(layers, x(), loss_of, 2), leaves)
        cause = "the gradient does not get to, or past, the first layer"
        check_same(got, want, cause=cause)

    @pytest.mark.survives
    def test_a_layer_may_stand_in_two_places(self, answer, device):
        layers, _ = chain(5, device)
        layers[3] = layers[1]
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}
        want = train(lambda: loss_of(plain(layers, x)), leaves)
        for sequence, snapshots in ((tuple(layers), 1), (nn.ModuleList(layers), 2)):
            step = partial(answer.backward_with_snapshots, sequence, x, loss_of, snapshots)
            got = run(step, leaves)
            cause = "layers are known by what they are, not by where they stand"
            check_same(got, want, cause=cause)

    @pytest.mark.survives
    def test_may_be_called_under_autocast(self, answer, device):
        """To the bit of the plain run under the same autocast, backward included."""
        layers, _ = chain(6, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}

        def under_autocast(step: Callable[[], Tensor]) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return step()

        def plainly() -> Tensor:
            loss = loss_of(plain(layers, x))
            loss.backward()
            return loss

        def mine() -> Tensor:
            return answer.backward_with_snapshots(layers, x, loss_of, 2)

        want = run(lambda: under_autocast(plainly), leaves)
        got = run(lambda: under_autocast(mine), leaves)
        cause = "some layers run in another dtype, or on a copy of a weight that has no graph"
        check_same(got, want, cause=cause)


_values = "a layer's second run draws other random numbers, or has another input, than its first"
