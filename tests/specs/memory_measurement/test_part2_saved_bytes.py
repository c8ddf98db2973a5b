"""Bytes that autograd saves, each compared with a formula."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_close, check_equal, check_raises, fail
from kit.laws.toys import mlp


class TestPart2SavedBytes:
    """Part 2: saved_bytes - what autograd holds between forward and backward"""

    subject = "saved_bytes"

    @pytest.mark.works
    def test_counts_what_an_mlp_saves(self, answer, device):
        """The input (11 x 7) for the first weight, the ReLU's result (11 x 13) for the second."""
        model = mlp(7, 13, 5, device=device)
        x = draw.randn(11, 7, device=device)
        check_equal(
            answer.saved_bytes(lambda: model(x), model),
            4 * 11 * (7 + 13),
            "saved bytes",
            cause="below: the graph is gone when you count; above: weights or copies are in it",
        )

    @pytest.mark.exact
    def test_counts_a_storage_once_and_in_full(self, answer, device):
        """sigmoid and three products save one result; a saved column keeps the whole table."""
        x = draw.randn(10, device=device, requires_grad=True)
        w = draw.randn(6, device=device, requires_grad=True)
        table = draw.randn(6, 50, device=device)

        def forward() -> list[Tensor]:
            y = x.sigmoid()
            return [y * y, y * y.flip(0).detach().flip(0), w * table[:, 3]]

        # y, the double flip of y, table in full, and neither x nor w (w's factor is the table)
        flipped = 4 * 10
        check_equal(
            answer.saved_bytes(forward, nn.Module()),
            4 * 10 + flipped + 4 * 6 * 50,
            "saved bytes",
            cause="tensors are counted, or a view's elements, not the storage that stays alive",
        )

    @pytest.mark.exact
    def test_counts_saved_masks_and_indices_at_their_own_size(self, answer, device):
        """masked_fill saves a bool mask (1 byte each), index_select int64 indices (8 bytes)."""
        x = draw.randn(4, 9, device=device, requires_grad=True)
        mask = draw.rand(4, 9, device=device) < 0.5
        index = draw.randint(4, (7,), device=device)
        check_equal(
            answer.saved_bytes(
                lambda: x.masked_fill(mask, 0.0).index_select(0, index), nn.Module()
            ),
            4 * 9 + 8 * 7,
            "bytes of a bool mask of 36 and 7 int64 indices",
            cause="every element is taken for 4 bytes",
        )

    @pytest.mark.exact
    def test_never_counts_parameters_or_buffers(self, answer, device):
        """Linear saves its weight as a transposed view, batch norm its running statistics."""
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)
        x = draw.randn(5, 6, device=device, requires_grad=True)
        model[2].requires_grad_(False)
        # x for the first weight; batch norm's input and its two saved statistics of 8 (the second
        # Linear is frozen, so its input is not saved, but its weight is)
        check_equal(
            answer.saved_bytes(lambda: model(x), model),
            4 * (5 * 6 + 5 * 8 + 2 * 8),
            "saved bytes of Linear, batch norm and a frozen Linear",
            cause="isinstance(t, nn.Parameter) is False for a transposed view; frozen weights and"
            " buffers are saved too",
        )

    @pytest.mark.saves
    def test_shows_what_checkpointing_saves(self, answer, reference, device):
        """Per block a checkpoint holds its input only: bar = blocks x one input."""
        blocks = nn.ModuleList(mlp(32, 128, 32, device=device) for _ in range(5))
        x = draw.randn(24, 32, device=device, requires_grad=True)

        def forward(remat: bool) -> Tensor:
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=False) if remat else block(y)
            return y

        one_input = 4 * 24 * 32
        plain = answer.saved_bytes(lambda: forward(False), blocks)
        check_equal(
            plain,
            5 * (one_input + 4 * 24 * 128),
            "saved bytes of five plain blocks (input + hidden)",
            cause="something that the graph saves is left out",
        )
        got = answer.saved_bytes(lambda: forward(True), blocks)
        check_bar(
            "saved with a checkpoint per block",
            got,
            5 * one_input,
            plain=plain,
            reference=reference.saved_bytes(lambda: forward(True), blocks),
            formula="5 blocks x one input",
            cause="what checkpointing drops is counted all the same",
        )
        check_equal(got, 5 * one_input, "saved bytes", cause="the block inputs are left out")

    @pytest.mark.survives
    def test_does_not_count_a_graph_that_is_dropped_on_the_way(self, answer, device):
        x = draw.randn(64, device=device, requires_grad=True)

        def forward() -> Tensor:
            x.exp().sum().item()  # a metric that somebody forgot to detach
            return x.tanh()

        check_equal(
            answer.saved_bytes(forward, nn.Module()),
            4 * 64,
            "saved bytes",
            cause="what the hooks saw is summed up, though its graph was freed before the end",
        )

    @pytest.mark.survives
    def test_sees_a_result_of_any_shape_and_nothing_without_a_graph(self, answer, device):
        x = draw.randn(16, device=device, requires_grad=True)
        got = answer.saved_bytes(lambda: {"out": (x.exp(), None)}, nn.Module())
        check_equal(got, 64, "saved bytes", cause="the result is expected to be one tensor")
        with torch.no_grad():
            got = answer.saved_bytes(lambda: x.exp(), nn.Module())
        check_equal(got, 0, "saved bytes under no_grad", cause="results are counted, not the graph")

    @pytest.mark.survives
    def test_runs_the_forward_once_and_lets_the_caller_go_backward(self, answer, device):
        """The pack hook must not change what backward reads."""
        x = draw.randn(12, device=device, requires_grad=True)
        runs: list[Tensor] = []
        answer.saved_bytes(lambda: runs.append(x.exp() * x), nn.Module())
        check_equal(len(runs), 1, "runs of forward", cause="forward runs again for a second look")
        runs[0].sum().backward()
        want = x.detach().exp() * (x.detach() + 1)
        check_close(x.grad, want, "gradient", cause="the hooks give back another tensor")

    @pytest.mark.survives
    def test_an_error_in_forward_reaches_the_caller_and_leaves_no_hook(self, answer, device):
        def forward() -> Tensor:
            raise KeyError("forward's own error")

        check_raises(
            lambda: answer.saved_bytes(forward, nn.Module()),
            KeyError,
            mentions=["forward's own error"],
            when="which is what forward raised",
        )
        try:
            with disable_saved_tensors_hooks("a hook is still in force"):  # raises if one is
                pass
        except RuntimeError as error:
            fail(
                expected="no saved-tensor hook in force after the error",
                got=error,
                cause="the hooks are entered without `with` or try/finally",
            )

    @pytest.mark.survives
    def test_lets_go_of_the_graph_afterwards(self, answer, device):
        """The documentation of saved_tensors_hooks warns of the cycle: pack must not keep x."""
        x = draw.randn(32, device=device, requires_grad=True)
        storages: list[weakref.ref[object]] = []

        def forward() -> Tensor:
            y = x.exp()
            storages.append(weakref.ref(y.untyped_storage()))
            return y

        answer.saved_bytes(forward, nn.Module())
        gc.collect()
        check(
            storages[0]() is None,
            expected="nothing of the graph alive after the count",
            got="exp's result is still alive",
            cause="the pack hook keeps the tensor with its grad_fn, and the graph holds itself",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", ["forward", "model"])
    def test_refuses_what_is_no_forward_or_model(self, answer, bad):
        args = (torch.zeros(2), nn.ReLU()) if bad == "forward" else (lambda: None, [nn.ReLU()])
        check_raises(
            lambda: answer.saved_bytes(*args),
            TypeError,
            mentions=["Tensor" if bad == "forward" else "list"],
            when=f"for a {type(args[bad == 'model']).__name__} as {bad}",
        )

    @pytest.mark.survives
    def test_knows_a_storage_by_itself_not_by_an_address_in_it(self, answer, device):
        """Halves of one weight, halves of one table: each half starts at an address of its own."""
        model = nn.Linear(6, 8, bias=False).to(device)
        x = draw.randn(5, 6, device=device, requires_grad=True)
        table = draw.randn(16, device=device)
        scale = draw.randn(8, device=device, requires_grad=True)
        got = answer.saved_bytes(lambda: [F.linear(x, w) for w in model.weight.chunk(2)], model)
        cause = "data_ptr() of the tensor tells where a view starts, not whose memory it is"
        check_equal(got, 4 * 30, "saved bytes of x, with a weight in two halves", cause=cause)
        got = answer.saved_bytes(lambda: [scale * table[:8], scale * table[8:]], nn.Module())
        check_equal(got, 4 * 16, "saved bytes of a table in two halves", cause=cause)

    @pytest.mark.survives
    def test_does_not_count_what_lives_for_another_reason(self, answer, device):
        """x itself was saved by a graph that is gone; x lives on, but no graph holds it."""
        x = draw.randn(64, device=device, requires_grad=True)

        def forward() -> Tensor:
            x.square().sum().item()
            return x.tanh()

        cause = "storages are asked whether they live, not whether the graph holds them"
        check_equal(answer.saved_bytes(forward, nn.Module()), 4 * 64, "saved bytes", cause=cause)
