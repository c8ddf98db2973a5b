"""Each rule of the memory ruler, by a step that reads wrong as soon as the rule is taken away."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw, toys
from kit.memory.resident import resident
from kit.memory.ruler import Reading, bytes_of, human, measure

KIB = 1024


def mlp() -> nn.Sequential:
    draw.seed(3)
    return toys.mlp(200, 300, 70, activation=nn.GELU)


def training_step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def test_a_new_tensor_counts_in_full_and_is_given_back_when_freed() -> None:
    def step() -> None:
        first = torch.ones(3 * KIB)
        del first
        torch.ones(5 * KIB)
        torch.ones(2 * KIB)

    reading = measure(step)
    assert reading == Reading("cpu", 0, 20 * KIB, 0, (0, 12 * KIB, 20 * KIB, 8 * KIB, 0))


def test_what_the_step_keeps_is_retained_and_what_it_returns_is_not() -> None:
    kept = []

    def step() -> torch.Tensor:
        kept.append(torch.ones(3 * KIB))
        return torch.ones(5 * KIB)

    reading = measure(step)
    assert (reading.above_baseline, reading.retained) == (32 * KIB, 12 * KIB)


def test_freeing_what_was_alive_before_makes_retained_negative() -> None:
    held = [torch.ones(3 * KIB)]
    reading = measure(held.clear, known=held)
    assert (reading.baseline, reading.above_baseline) == (12 * KIB, 0)
    assert reading.retained == -12 * KIB


def test_views_expansions_and_in_place_results_are_no_memory() -> None:
    def step() -> None:
        x = torch.ones(3, KIB)
        y = x.t().reshape(KIB, 3).unsqueeze(0).expand(7, KIB, 3)
        x.add_(1).relu_()
        del x
        y.detach()

    # 3 x 1024 float32
    assert measure(step).above_baseline == 12 * KIB


def test_out_into_an_empty_tensor_counts_the_size_that_it_grew_to() -> None:
    a, b = torch.ones(30, 70), torch.ones(70, 110)
    reading = measure(lambda: torch.mm(a, b, out=torch.empty(0)), known=[a, b])
    # 30 x 110 float32 are 13,200 bytes
    assert reading.above_baseline == 26 * 512


def test_every_storage_is_rounded_up_to_512_bytes() -> None:
    reading = measure(lambda: [torch.ones(1), torch.ones(128), torch.ones(129), torch.ones(0)])
    assert reading.above_baseline == 512 + 512 + 1024


def test_memory_first_seen_as_an_argument_joins_the_baseline_and_the_timeline_before_it() -> None:
    old = torch.ones(3 * KIB)

    def step() -> None:
        new = torch.ones(5 * KIB)
        del new
        old.add_(1)

    reading = measure(step)
    assert reading == measure(step, known=[old])
    assert reading.timeline == (12 * KIB, 32 * KIB, 12 * KIB, 12 * KIB)


def test_memory_first_seen_as_the_target_of_out_joins_the_baseline() -> None:
    a, b, old = torch.ones(30, 70), torch.ones(70, 110), torch.empty(30, 110)
    reading = measure(lambda: torch.mm(a, b, out=old))
    assert (reading.baseline, reading.above_baseline) == (bytes_of(a, b, old), 0)


def test_a_tensor_made_from_a_literal_inside_the_step_is_new() -> None:
    reading = measure(lambda: torch.tensor([1.0] * KIB))
    assert (reading.baseline, reading.above_baseline, reading.retained) == (0, 4 * KIB, 0)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_known_model_and_optimizer_are_baseline_with_gradients_and_states(foreach: bool) -> None:
    model, x = mlp(), draw.randn(130, 200)
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    training_step(model, x)
    optimizer.step()
    params = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    # parameters, gradients, two moments, and for each of 4 parameters the step counter
    expected = 4 * params + 4 * 512
    assert bytes_of(model, optimizer) == bytes_of(optimizer) == expected
    reading = measure(optimizer.step, known=[model, optimizer])
    assert (reading.baseline, reading.retained) == (expected, 0)
    # foreach holds one denominator for every parameter at once, the loop two for one parameter;
    # a second reading of in-place updates as new memory would be twice as much and more
    largest = 240_128  # 200 x 300 float32, rounded
    assert reading.above_baseline <= (params if foreach else 2 * largest) + 8 * 512


def test_parameters_in_saved_tensors_are_no_activations() -> None:
    model, x = mlp(), draw.randn(130, 200)
    # Linear saves its transposed weight: a view of a parameter, for which isinstance does not ask
    reading = measure(lambda: model(x), known=[model, x])
    # outputs of 130 x 300, 130 x 300 and 130 x 70 float32, each rounded
    assert reading.above_baseline == 2 * 156_160 + 36_864


def test_known_takes_collections_and_refuses_what_holds_no_tensors() -> None:
    a, b = torch.ones(3 * KIB), torch.ones(5 * KIB)
    assert bytes_of({"a": [a, (b, None)]}, a, mlp().parameters()) == 32 * KIB + bytes_of(mlp())
    assert bytes_of(nn.BatchNorm1d(200)) == 4 * 1024 + 512  # two parameters, three buffers
    with pytest.raises(TypeError, match="function"):
        measure(lambda: None, known=[mlp])


def test_a_freed_and_regrown_storage_is_followed_without_any_dispatch() -> None:
    x, known = torch.ones(3 * KIB), torch.ones(5 * KIB)

    def step() -> None:
        y = torch.ones(2 * KIB)
        y.untyped_storage().resize_(0)
        x.untyped_storage().resize_(0)
        known.untyped_storage().resize_(0)
        known.untyped_storage().resize_(24 * KIB)

    reading = measure(step, known=[known])
    base = 32 * KIB
    above = (0, 8 * KIB, 0, -12 * KIB, -32 * KIB, -8 * KIB, -8 * KIB)
    assert reading.timeline == tuple(base + point for point in above)


def test_fake_and_meta_tensors_hold_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step() -> None:
        a = torch.ones(KIB)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            torch.ones(1000, KIB) + mode.from_tensor(a)
        torch.ones(3000, KIB, device="meta") + 1

    assert measure(step).above_baseline == 4 * KIB


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_mode_hides_no_temporaries(mode: type) -> None:
    """Cross entropy with soft targets holds three times the 1,536 bytes of its 6 x 64 logits."""
    logits, targets = torch.rand(6, 64), torch.rand(6, 64).softmax(1)
    reading = measure(mode()(lambda: F.cross_entropy(logits, targets)), known=[logits, targets])
    assert reading.above_baseline == 3 * 4 * 6 * 64


def test_the_collector_waits_for_the_end_of_the_step_and_finds_cycles_there() -> None:
    def step() -> None:
        for _ in range(3):
            cycle: list[object] = [torch.ones(3 * KIB)]
            cycle.append(cycle)
            [[] for _ in range(100_000)]  # the collector would come by here

    reading = measure(step)
    assert (reading.above_baseline, reading.retained) == (36 * KIB, 0)


def test_an_import_inside_the_step_does_not_hold_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the error keeps its frames, a frame keeps the error, and the frames below are the step's
    source = "def f():\n  try: 1 / 0\n  except ZeroDivisionError as e: kept = e\nf()\n"
    (tmp_path / "module_with_a_cycle.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    def forward() -> None:
        x = torch.ones(3 * KIB)
        importlib.import_module("module_with_a_cycle")
        x.add_(1)

    def step() -> None:
        forward()
        torch.ones(2 * KIB)

    reading = measure(step)
    assert "module_with_a_cycle" in sys.modules
    assert reading.above_baseline == 12 * KIB
    monkeypatch.delitem(sys.modules, "module_with_a_cycle")


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    yield
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.usefixtures("nothing_left_behind")
def test_an_error_in_the_step_comes_out_and_leaves_no_mode_and_no_patch_behind() -> None:
    def step() -> None:
        torch.ones(KIB)
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError, match="out of memory"):
        measure(step)
    assert gc.isenabled()
    assert measure(lambda: torch.ones(KIB)).peak == 4 * KIB


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_measurement_inside_a_measurement_reads_its_own_part() -> None:
    inner = []

    def step() -> None:
        x = torch.ones(3 * KIB)
        inner.append(measure(lambda: torch.ones(5 * KIB)))
        x.untyped_storage().resize_(0)

    assert measure(step).timeline == (0, 12 * KIB, 32 * KIB, 0, 0)
    assert inner[0].peak == 20 * KIB


def test_modes_of_the_step_itself_may_be_nested_inside() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = mlp(), draw.randn(130, 200)

    def counted() -> torch.Tensor:
        with FlopCounterMode(display=False):
            result: torch.Tensor = model(x)
            return result

    plain = measure(lambda: model(x), known=[model, x])
    assert measure(counted, known=[model, x]).peak == plain.peak
    with torch.no_grad():
        # nothing is saved: gelu's input is freed as soon as its output stands
        assert measure(lambda: model(x), known=[model, x]).above_baseline == 2 * 156_160


def test_a_sparse_gradient_counts_by_its_indices_and_values() -> None:
    table, rows = nn.Embedding(900, 32, sparse=True), torch.arange(100)
    reading = measure(lambda: table(rows).sum().backward(), known=[table, rows])
    # values 100 x 32 float32; the indices are a view of rows or a copy of its 800 bytes
    assert 12_800 <= reading.retained <= 12_800 + 1024
    assert bytes_of(table.weight.grad) >= 12_800


def test_a_device_without_a_ruler_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="meta"):
        measure(lambda: F.relu(torch.ones(3)), "meta")


def test_bytes_are_written_in_three_digits() -> None:
    numbers = [0, 1023, 13_926, 10_235, 1_040_000, 1_048_575, 1_572_864, -1_572_864, 5 << 40]
    assert " ".join(human(n).replace(" ", "") for n in numbers) == (
        "0B 1023B 13.6KiB 10.0KiB 0.99MiB 1.00MiB 1.50MiB -1.50MiB 5.00TiB"
    )


def test_the_process_grows_by_what_no_ruler_of_tensors_sees():
    given = [b"a" * 2**16 for _ in range(800)]  # is free when counting begins
    del given
    with resident() as process:
        read = measure(lambda: len(b"".join([b"b" * 2**20 for _ in range(40)])))
    assert read.above_baseline == 0
    if process.growth is None:
        pytest.skip("the kernel of this machine does not count a process's memory so")
    assert 70 * 2**20 < process.growth < 100 * 2**20
