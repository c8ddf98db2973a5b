"""The schedule with the fewest extra steps: counted, and run."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.bars import bar
from kit.laws.checks import check_equal, check_raises
from kit.laws.scenarios import scenarios
from specs.segment_checkpointing import worlds as w

# Layers and snapshots: one of each, too few, as many as needed, and more than there are layers.
RUNS = [(1, 1), (1, 3), (2, 1), (2, 2), *((10, s) for s in (1, 2, 3, 4)), (24, 3), (7, 6), (7, 20)]


def closed_form(layers, snapshots):
    """r * layers - C(s + r, s + 1) for s snapshots; r is the least with layers <= C(s + r, r)."""
    r = 0
    while math.comb(snapshots + r, r) < layers:
        r += 1
    return r * layers - math.comb(snapshots + r, snapshots + 1)


def too_few(got, want):
    """What a number below the fewest can only mean."""
    if isinstance(got, int) and got < want:
        return "fewer are not enough: an input exists once all layers before it ran"
    return None


@scenarios("fewest_extra_steps", too_few)
def counts(answer, device, name, layers, snapshots, want):
    return answer.fewest_extra_steps(layers, snapshots), want


def plain_backward(layers, x, loss_fn, snapshots):
    loss = loss_fn(w.plain(layers, x))
    loss.backward()
    return loss


@scenarios("the plain step", w.cause_of)
def as_plain_backward(answer, device, name, layers, x, snapshots, loss_fn=w.loss_of, before=None):
    step = lambda call: call(layers, before(x) if before else x, loss_fn, snapshots).detach()  # noqa: E731
    want = w.observe(plain_backward, step, device)
    return w.observe(answer.backward_with_snapshots, step, device), want


@scenarios("runs of layers and of the loss")
def runs(answer, device, name, count, snapshots):
    (layers, log), losses = w.chain(count, device), []
    x = draw.randn(3, 5, device=device, requires_grad=True)
    loss_fn = lambda out: losses.append(1) or w.loss_of(out)  # noqa: E731
    answer.backward_with_snapshots(layers, x, loss_fn, snapshots)
    return [len(log), len(losses)], [count + closed_form(count, snapshots), 1]


class WithHead(nn.Linear):
    """A loss with parameters and dropout."""

    def forward(self, out):
        return w.loss_of(F.dropout(super().forward(out), 0.5))


class TestPart4Snapshots:
    @pytest.mark.works("fewest_extra_steps", "steps")
    @counts("a layer is counted that need not run, or its run with a graph")
    def test_counts_the_published_steps(self):
        """Griewank and Walther, Algorithm 799 (revolve), and the ends."""
        published = {(10, 1): 45, (10, 2): 20, (10, 3): 15, (10, 4): 14, (24, 3): 61, (100, 5): 316}
        published |= {(100, 10): 222, (10, 10): 9, (10, 25): 9, (1, 4): 0, (1200, 1): 719400}
        for (layers, snapshots), want in published.items():
            yield f"{layers} layers, {snapshots} snapshots", layers, snapshots, want

    @pytest.mark.works("backward_with_snapshots", "gradients")
    @as_plain_backward("a layer's second run has another input than its first")
    def test_gives_the_plain_loss_and_gradients_to_the_bit(self):
        x = w.leaf(13, 5)
        for count, snapshots in RUNS[::2]:
            layers = w.chain(count, x.device, dropout=0.0)[0]
            yield f"{count} layers, {snapshots} snapshots", layers, x, snapshots

    @pytest.mark.works("backward_with_snapshots", "Returns")
    def test_returns_the_loss_without_its_graph(self, answer, device):
        layers, x = w.chain(5, device)[0], draw.randn(13, 5, device=device)
        loss = answer.backward_with_snapshots(layers, x, torch.mean, 2)
        cause = "the loss is returned with its graph, which keeps the last layer's activations"
        what = "requires_grad and dimensions of the loss"
        check_equal((loss.requires_grad, loss.dim()), (False, 0), what, cause=cause)

    @pytest.mark.exact("fewest_extra_steps", "snapshots")
    @counts("snapshots are spread evenly, or a snapshot's place is not used again")
    def test_agrees_with_the_closed_form(self):
        for layers in (2, 3, 4, 5, 6, 8, 13, 20, 21, 22, 34, 55, 56, 57, 153, 154, 300):
            for snapshots in (1, 2, 3, 4, 5, 6, 9, 60):
                want = closed_form(layers, snapshots)
                yield f"{layers} layers, {snapshots} snapshots", layers, snapshots, want

    @pytest.mark.exact("backward_with_snapshots", "random state")
    @as_plain_backward("a run draws other numbers than the first, or the stream is not put back")
    def test_random_numbers_are_as_after_one_sweep(self):
        x = w.leaf(13, 5)
        for count, snapshots in RUNS[1::2]:
            layers = w.chain(count, x.device)[0]
            yield f"{count} layers, {snapshots} snapshots", layers, x, snapshots
        yield "a loss that draws", layers, x, 2, WithHead(5, 3)

    @pytest.mark.exact("backward_with_snapshots", "gradients")
    @as_plain_backward("a layer, the loss or the input gets no gradient, or does not pass it on")
    def test_gradients_reach_whatever_there_is(self):
        x, before, head = w.data(13, 5), nn.Linear(5, 5), WithHead(5, 3)
        for frozen in ([], [0, 1, 2], [5], [*range(6)]):
            layers = w.chain(6, x.device)[0]
            for place in frozen:
                layers[place].requires_grad_(False)
            yield f"data, {frozen} frozen", layers, x, 2, head
            yield f"data from another layer, {frozen} frozen", layers, x, 2, head, before
        twice = lambda y: (plain_backward(layers, y, w.loss_of, 2), y)[1]  # noqa: E731
        layers = w.chain(4, x.device)[0]
        yield "gradients from before", layers, w.leaf(13, 5), 2, w.loss_of, twice
        words = w.chain(6, x.device)[0]
        words[0] = nn.Embedding(17, 5)
        yield "indices", words, torch.arange(13), 2
        layers = [*w.chain(5, x.device)[0]]
        same = [layers[0], nn.Identity(), nn.Dropout(0.5).eval(), nn.Flatten(), layers[2]]
        yield "layers that return their input", same, w.leaf(13, 5), 2
        layers[3] = layers[1]
        yield "a Sequential with one layer twice", nn.Sequential(*layers), w.leaf(13, 5), 2
        hooked = w.leaf(13, 5)
        hooked.register_hook(lambda grad: grad * 10)
        yield "a hook on the input", layers, hooked, 2

    @pytest.mark.exact("backward_with_snapshots", "runs")
    @runs("the schedule is not the counted one, or the loss runs again; if fewer, too much is kept")
    def test_runs_as_many_layers_as_it_says_and_the_loss_once(self):
        full = [(math.comb(s + r, r) + n, s) for s in (2, 3, 4) for r in (3, 4) for n in (0, 1)]
        for count, snapshots in [*RUNS, *full, (150, 2)]:
            yield f"{count} layers, {snapshots} snapshots", count, snapshots

    @pytest.mark.saves("backward_with_snapshots", "peak")
    @pytest.mark.parametrize(("count", "snapshots"), [(7, 1), (10, 3)])
    @bar(
        "peak of {count} layers, snapshots = {snapshots}",
        "{snapshots} - 0.5 inputs + one layer's step",
        "snapshots, outputs or the loss's graph outlive their use, or a graph spans several layers",
    )
    def test_the_peak_is_the_snapshots_and_one_layer(self, device, count, snapshots):
        """Bar: the snapshots but x, which existed before, half an input for small things + the
        step of one layer with its input and the gradient of its output."""
        layers, x = w.big_chain(count, device)

        def peak(run):
            return w.peak_of(partial(run, layers, x, torch.sum, snapshots), device, layers, x)

        def step_inside():
            layers[0](torch.ones_like(x).requires_grad_()).backward(torch.ones_like(x))

        limit = (snapshots - 0.5) * x.nbytes + w.peak_of(step_inside, device, layers, x)
        return lambda module: peak(module.backward_with_snapshots), limit, peak(plain_backward)

    @pytest.mark.saves("backward_with_snapshots", "freed")
    @bar(
        "bytes after the sweep",
        "the input + 8 KiB",
        "an output, a snapshot or a graph outlives the call, or the loss is a view of the output",
    )
    def test_the_sweep_leaves_nothing_behind(self, device):
        """Bar: the input, 32 KiB or more, + 8 KiB. The loss is a view of the last output, which
        is as large."""
        layers, leaf = w.big_chain(10, device)

        def step(call, kept):
            kept.append(leaf.exp().sin())
            kept.append(call(layers, kept[0], lambda out: out[0, 0], 3))

        read = w.bytes_left(step, device, layers, leaf)
        return lambda module: read(module.backward_with_snapshots), leaf.nbytes + 8192, None

    @pytest.mark.survives("backward_with_snapshots", 1)
    @as_plain_backward("some layers run in another dtype, or use a cached weight without a graph")
    def test_runs_under_the_callers_autocast(self):
        x = w.leaf(13, 5)
        layers = w.chain(6, x.device)[0]
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(x.device.type, dtype):
                yield f"{dtype}, with a head in the loss", layers, x, 2, WithHead(5, 3)

    @pytest.mark.survives("backward_with_snapshots", 2)
    @as_plain_backward("it recurses for each snapshot: Python allows a depth of about 1,000")
    def test_takes_1200_layers_with_as_many_snapshots(self):
        yield "1,200 layers", [nn.Tanh()] * 1200, w.leaf(2, 3), 1200

    @pytest.mark.survives("fewest_extra_steps", "Raises")
    @pytest.mark.parametrize("bad", [(0, 3), (-2, 3), (1, 0), (5, -1)], ids=str)
    def test_fewest_extra_steps_refuses_numbers_below_one(self, answer, bad):
        call, when = partial(answer.fewest_extra_steps, *bad), f"for (layers, snapshots) = {bad}"
        check_raises(call, ValueError, mentions=[min(bad)], when=when)

    @pytest.mark.survives("backward_with_snapshots", "Raises")
    @pytest.mark.parametrize("bad", [(0, 3), (5, 0), (5, -1), (1, 0)], ids=str)
    def test_refuses_no_layers_and_no_snapshots(self, answer, device, bad):
        layers, log = w.chain(bad[0], device)
        x = draw.randn(3, 5, device=device, requires_grad=True)
        call = partial(answer.backward_with_snapshots, layers, x, w.loss_of, bad[1])
        when = f"for (layers, snapshots) = {bad}"
        check_raises(call, ValueError, mentions=[bad[1]] if bad[0] else [], when=when)
        cause = "the numbers are checked after layers have run"
        check_equal(log, [], "layers that ran", cause=cause)
