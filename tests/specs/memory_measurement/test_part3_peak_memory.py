"""Peaks, compared with formulas and with the kit's own ruler."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.answers.reset_torch import reset_torch
from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal, check_raises
from kit.laws.endings import ENDINGS, check_ending
from kit.laws.scenarios import check_scenarios
from kit.laws.toys import mlp
from kit.memory.ruler import measure
from kit.private_torch import DispatchMode, dispatch_modes, import_dynamo
from specs.memory_measurement import steps
from specs.memory_measurement.steps import KIB, floats

import_dynamo()  # the first dispatch mode would, in the midst of a measurement


def check_peak(answer, device, law, cause):
    __tracebackhide__ = True

    def judge(answer, scenario):
        world = scenario(device)
        got = answer.peak_memory(world.step, device, world.existing)
        known = got.baseline if device.type == "cpu" else world.want[0] * KIB
        figures = (known, got.peak - got.baseline, got.retained)
        return figures, tuple(KIB * n for n in world.want)

    check_scenarios(answer, judge, law, "bytes (baseline, peak - baseline, retained)", cause=cause)


class TestPart3PeakMemory:
    """Part 3: peak_memory - baseline, peak and what is retained, on any device"""

    subject = "peak_memory"

    @pytest.mark.works("peak_memory", "peak")
    def test_reports_baseline_peak_and_what_is_retained(self, answer, device):
        """2 KiB are there before; 12 live for a moment beside 8 that stay: peak = 2 + 12 + 8."""
        x, kept = floats(2, device), []

        def step():
            temporary = floats(12, device)
            kept.append(floats(8, device))
            del temporary

        got = answer.peak_memory(step, device, [x])
        figures = [got.baseline if device.type == "cpu" else x.nbytes]
        figures += [got.peak - got.baseline, got.retained]
        cause = "memory is read when the step is over, or retained is not after - before"
        what = "[baseline, peak - baseline, retained]"
        check_equal(figures, [2 * KIB, 20 * KIB, 8 * KIB], what, cause=cause)

    @pytest.mark.works("peak_memory", "existing")
    def test_what_existed_is_the_baseline(self, answer, device):
        check_peak(answer, device, steps.Existing, "existing storages do not count once, in full")

    @pytest.mark.exact("peak_memory", "peak")
    def test_counts_temporaries_while_they_live(self, answer, device):
        cause = "what is freed stays in the sum, or something is counted only after the step"
        check_peak(answer, device, steps.Peak, cause)

    @pytest.mark.exact("peak_memory", "peak")
    def test_agrees_with_the_ruler_on_training_steps(self, answer, device):
        """Within 2 %: the ruler counts a storage in blocks of 512 bytes."""

        def judge(answer, scenario):
            step, existing = scenario(device)
            true = measure(step, device, known=existing)
            step, existing = scenario(device)
            mine = answer.peak_memory(step, device, existing)
            got = (mine.peak - mine.baseline, mine.retained)
            want = (true.above_baseline, true.retained)
            near = all(abs(a - b) <= 0.02 * want[0] for a, b in zip(got, want, strict=True))
            return (want if near else got), want

        cause = "memory is missed (backward? the optimizer?) or counted twice (views? in-place?)"
        check_scenarios(
            answer, judge, steps.Training, "bytes (peak - baseline, retained)", cause=cause
        )

    @pytest.mark.exact("peak_memory", "sharing")
    def test_counts_storages_not_tensors(self, answer, device):
        cause = "tensors are counted, or their elements, and not the storages that they lie on"
        check_peak(answer, device, steps.Sharing, cause)

    @pytest.mark.exact("peak_memory", "retained")
    def test_gives_back_what_is_freed(self, answer, device):
        cause = "what existed is kept alive by the measurement, or never taken off"
        check_peak(answer, device, steps.Retained, cause)

    @pytest.mark.exact("peak_memory", "after")
    @pytest.mark.parametrize("end", ENDINGS)
    def test_leaves_no_mode(self, answer, device, end):
        class TheCallersMode(DispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        TheCallersMode().__enter__()
        check_ending(lambda step: answer.peak_memory(step, device), end, lambda: floats(2, device))
        modes = [type(mode).__name__ for mode in dispatch_modes()]
        reset_torch()
        cause = "the mode is entered without `with`, or left in one kind of ending only"
        what = f"dispatch modes after {end}"
        check_equal(modes, ["TheCallersMode"], what, cause=cause)

    @pytest.mark.exact("peak_memory", "step")
    def test_runs_the_step_once_and_drops_its_result(self, answer, device):
        modes = []
        with torch.no_grad():
            step = lambda: (modes.append(torch.is_grad_enabled()), floats(4, device))  # noqa: E731
            got = answer.peak_memory(step, device)
        cause = "a warm-up run changes the state, or gradients are put on"
        check_equal(modes, [False], "runs of the step, with the caller's grad mode", cause=cause)
        check_equal(got.retained, 0, "retained bytes", cause="the step's result is kept too long")

    @pytest.mark.exact("peak_memory", "device")
    def test_counts_one_device_however_it_is_named(self, answer, device):
        cause = "another device's memory is counted, or this one is not known by its name"
        check_peak(answer, device, steps.OtherDevices, cause)
        named = answer.peak_memory(lambda: floats(4, device), str(device))
        check_equal(named.peak - named.baseline, 4 * KIB, f"peak of {str(device)!r}", cause=cause)

    @pytest.mark.saves("peak_memory", "peak")
    def test_shows_what_checkpointing_takes_off_the_peak(self, answer, reference, device):
        """Plain holds 6 blocks' insides; a checkpoint per block 6 inputs and one block's inside.

        Bar: 6 inputs + 4 block insides (recomputed inside, its gradient, and two temporaries of
        that size) + gradients of the parameters. The plain peak is over it.
        """
        blocks = nn.ModuleList(mlp(32, 256, 32, device=device) for _ in range(6))
        x = draw.randn(256, 32, device=device, requires_grad=True)

        def step(remat):
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=False) if remat else block(y)
            y.sum().backward()
            blocks.zero_grad()
            x.grad = None

        def peak(module, remat):
            got = module.peak_memory(lambda: step(remat), device, [x, *blocks.parameters()])
            return got.peak - got.baseline

        step(True)  # cuBLAS takes its workspace once
        inside, one_input = 4 * 256 * 256, 4 * 256 * 32
        limit = 6 * one_input + 4 * inside + sum(p.nbytes for p in blocks.parameters())
        plain = peak(answer, False)
        check(
            plain > limit,
            expected=f"a plain peak above {limit} bytes (6 blocks' insides are held)",
            got=plain,
            cause="what is held from forward to backward is missed",
        )
        check_bar(
            "peak with a checkpoint per block",
            peak(answer, True),
            limit,
            plain=plain,
            reference=peak(reference, True),
            formula="6 inputs + 4 insides + gradients",
            cause="what is freed between the blocks stays in the sum",
        )

    @pytest.mark.survives("peak_memory", 1)
    def test_counts_every_kind_of_operation(self, answer, device):
        cause = "results are left out by their kind, or by the mode that they are made in"
        check_peak(answer, device, steps.Kinds, cause)

    @pytest.mark.survives("peak_memory", 2)
    @pytest.mark.parametrize(
        "kind", [iter, lambda held: (t for t in held)], ids=["list", "generator"]
    )
    def test_empties_an_iterator_and_keeps_nothing(self, answer, device, kind):
        held = [floats(3, device), floats(5, device)]
        storages, existing = [ref(t.untyped_storage()) for t in held], kind(held[:])

        def step():
            held.clear()
            alive.append(sum(storage() is not None for storage in storages))

        alive = []
        answer.peak_memory(step, device, existing)
        cause = "a list of `existing`, or a loop's variable, keeps them alive"
        check_equal(alive, [0], "tensors alive in the step after it freed two", cause=cause)

    @pytest.mark.survives("peak_memory", 3)
    def test_a_smaller_step_reports_its_own_peak(self, answer, device):
        """A step that only frees peaks at its start, whatever was measured before."""
        held = [floats(4, device)]
        phases = [lambda: floats(256, device), lambda: floats(4, device), held.clear]
        got = [answer.peak_memory(p, device, iter(held[:])) for p in phases]
        peaks = [(reading.peak - reading.baseline) // KIB for reading in got]
        cause = "the peak is that of operations only, or of an earlier measurement"
        check_equal(peaks, [256, 4, 0], "KiB, peak - baseline of three phases", cause=cause)

    @pytest.mark.survives("peak_memory", 4)
    def test_sees_a_tensor_grow(self, answer, device):
        cause = "the size of a storage is read only once"
        check_peak(answer, device, steps.Grown, cause)

    @pytest.mark.survives("peak_memory", 5)
    def test_sees_a_storage_emptied(self, answer, device):
        cause = "storage.resize_ is no operation, so sizes are to be read again"
        check_peak(answer, device, steps.Emptied, cause)

    @pytest.mark.gpu
    @pytest.mark.survives("peak_memory", 6)
    def test_reads_the_allocator(self, answer, device):
        floats(256 * KIB, device)  # 256 MiB, freed at once
        before = torch.cuda.memory_allocated(device)
        got = answer.peak_memory(lambda: floats(4, device), device)
        cause = "reset_peak_memory_stats is not called before the step"
        check_equal(tuple(got), (before, before + 4 * KIB, 0), "reading", cause=cause)

    @pytest.mark.survives("peak_memory", "Raises")
    @pytest.mark.parametrize("bad", ["mps", "cuda:99", "tpu", "cpu zero", "meta"])
    def test_refuses_a_device_that_it_cannot_measure(self, answer, bad):
        runs = []
        call = lambda: answer.peak_memory(lambda: runs.append(1), bad)  # noqa: E731
        check_raises(call, ValueError, mentions=[bad], when=f"for device {bad!r}")
        check_equal(len(runs), 0, "runs of the step", cause="the device is checked after the step")
