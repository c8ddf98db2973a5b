"""The memory ruler against instruments that nobody here wrote, and in whole training steps.

Run with -s to see the table: bytes above the baseline by the ruler and by the CPU allocator.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kit.laws import draw
from kit.laws.toys import Block, mlp
from kit.memory.profiler_peak import allocator_peaks
from kit.memory.ruler import bytes_of, human, measure
from kit.ranks.simulated import simulated_world

Step = Callable[[], object]
Workload = tuple[str, Step, list[object]]


class BlockOfModules(Block):
    """The block with nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__(144, heads=6)
        self.attention = nn.MultiheadAttention(144, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


def blocks() -> nn.Sequential:
    """Two of width 144 with 6 heads."""
    return nn.Sequential(Block(144, heads=6), Block(144, heads=6))


# Each step drops its own gradients: the witness cannot see the free of memory older than the step.


def backward_step(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Workload:
    def step() -> None:
        F.cross_entropy(model(x).flatten(0, -2), y).backward()
        model.zero_grad()

    return name, step, [model, x, y]


def forward_step(name: str, model: nn.Module, x: torch.Tensor) -> Workload:
    return name, lambda: model(x), [model, x]


def amp_step(name: str, dtype: torch.dtype, foreach: bool) -> Workload:
    model, x = blocks(), draw.randn(5, 90, 144)
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)

    def step() -> None:
        # torch 2.13's fused attention refuses 16 bits on a processor with AMX, where
        # ATEN_CPU_CAPABILITY holds ATen to less.
        with torch.autocast("cpu", dtype), sdpa_kernel(SDPBackend.MATH):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    return name, step, [model, optimizer, x]


def workloads() -> list[Workload]:
    draw.seed(11)
    linear = mlp(200, 300, 500, 10, activation=nn.GELU)
    rows, labels = draw.randn(130, 200), draw.randint(10, (130,))
    transformer, modules = blocks(), nn.Sequential(BlockOfModules(), Block(144, heads=6))
    words, classes = draw.randn(5, 90, 144), draw.randint(144, (5 * 90,))
    return [
        forward_step("mlp, forward", linear, rows),
        backward_step("mlp, forward and backward", linear, rows, labels),
        forward_step("transformer, forward", transformer, words),
        backward_step("transformer, forward and backward", transformer, words, classes),
        backward_step("nn.MultiheadAttention, both", modules, words, classes),
        amp_step("AMP bfloat16, Adam foreach", torch.bfloat16, foreach=True),
        amp_step("AMP bfloat16, Adam for-loop", torch.bfloat16, foreach=False),
        amp_step("AMP float16, GradScaler, Adam", torch.float16, foreach=True),
    ]


def test_the_ruler_reads_what_the_cpu_allocator_holds_between_operators_to_the_byte() -> None:
    """And so all that it misses is allocated and freed within a single operator.

    How much that is depends on the processor: oneDNN's bfloat16 kernels have taken from 0.2 to 9 %
    of the AMP step for it.
    """
    print()
    for name, step, known in workloads():
        ruler = measure(step, known=known).above_baseline
        peaks = allocator_peaks(step, unit=512)  # rule 2 of the ruler
        missed = peaks.at_any_time - ruler
        print(f"{name:36} {ruler:>12,} of {peaks.at_any_time:>12,}; missed {missed:>9,}")
        assert ruler == peaks.between_operators <= peaks.at_any_time, name


def test_the_witness_reads_the_same_each_time_and_counts_what_is_freed() -> None:
    def step() -> None:
        first = torch.ones(3000)
        del first
        torch.ones(5000)
        torch.ones(2000)

    assert {allocator_peaks(step) for _ in range(4)} == {(4 * 5000, 4 * 5000)}


def test_the_ruler_is_blind_to_the_scratch_memory_of_conv2d() -> None:
    conv, x = nn.Conv2d(5, 24, 3, padding=1), draw.randn(3, 5, 64, 60)
    ruler = measure(lambda: conv(x), known=[conv, x]).above_baseline
    peaks = allocator_peaks(lambda: conv(x), unit=512)
    print(f"\nconv2d forward: {human(ruler)} of {human(peaks.at_any_time)}")
    # the output alone: 3 x 24 x 64 x 60 float32
    assert ruler == 4 * 3 * 24 * 64 * 60
    assert ruler == peaks.between_operators <= peaks.at_any_time


WORLD = 8


def test_a_dtensor_counts_its_local_bytes_and_not_its_global_size() -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.ones(30, 50)
    with simulated_world(WORLD) as mesh:
        x, y = (DTensor.from_local(part, mesh, [Shard(0)]) for part in (local, local + 1))
        assert x.shape == (30 * WORLD, 50)
        assert bytes_of(x) == bytes_of(local) == 6144  # 30 x 50 float32, rounded
        reading = measure(lambda: (x + y) * 2, known=[x, y])
    assert (reading.baseline, reading.above_baseline) == (2 * 6144, 2 * 6144)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_reading_is_the_allocators_own() -> None:
    model = blocks().cuda()
    x = draw.randn(5, 90, 144, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    step()
    reading = measure(step, "cuda")
    # the same step without the sampling mode
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    step()
    assert reading.baseline == baseline
    assert reading.peak == torch.cuda.max_memory_allocated()
    assert reading.retained == 0
    assert reading.timeline[0] == baseline
    assert max(reading.timeline) <= reading.peak
