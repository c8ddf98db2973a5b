"""Each kind by a step whose bytes read wrong as soon as that kind's storages are put elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kit.laws import draw
from kit.memory.account import Account, account
from kit.memory.ruler import measure
from kit.ranks.simulated import dry_run, simulated_world
from selftest.stacks import (
    BLOCKS,
    SAMPLES,
    SHAPES,
    WIDTH,
    Stack,
    bf16,
    gathered,
    make_optimizer,
    numel,
    part,
    rounded,
    shard,
    together,
)

needs_fsdp2 = pytest.mark.skipif(
    torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 does not run on the cpu"
)

WHOLE = sum(rounded(4 * numel(shape)) for shape in SHAPES)  # bytes of a block, not sharded
HALF = sum(rounded(2 * numel(shape)) for shape in SHAPES)
STATE = 2 * WHOLE + len(SHAPES) * 512  # AdamW's: two moments and the steps

Body = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], object]


def read(model: nn.Module, body: Body, optimizer: torch.optim.Optimizer | None = None) -> Account:
    """One step of a model; with SGD if nothing is said."""
    optimizer = optimizer or make_optimizer(model, sgd=True)
    x = draw.randn(SAMPLES, WIDTH)
    return account(lambda: body(model, optimizer, x), model=model, optimizer=optimizer, known=[x])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_plain_model_has_parameters_gradients_and_state_and_no_other_ranks() -> None:
    model = Stack()
    optimizer = make_optimizer(model)
    first, second = (read(model, train, optimizer) for _ in range(2))
    for memory in (first, second):
        assert memory.most["shards"] == memory.before["shards"] == BLOCKS * WHOLE
        # they come and go inside of the step
        assert memory.most["gradients"] == BLOCKS * WHOLE
        assert memory.before["gradients"] == memory.after["gradients"] == 0
        assert memory.most["unsharded"] == memory.most["communication"] == 0
        assert memory.after["optimizer state"] == BLOCKS * STATE
    assert first.before["optimizer state"] == 0
    assert second.before["optimizer state"] == BLOCKS * STATE


def test_gradients_that_the_step_finds_and_drops_are_gradients() -> None:
    model = Stack()
    model(draw.randn(SAMPLES, WIDTH)).sum().backward()
    memory = read(model, lambda model, optimizer, x: optimizer.zero_grad())
    assert memory.before["gradients"] == memory.most["gradients"] == BLOCKS * WHOLE
    assert memory.after["gradients"] == 0


def test_gradients_that_are_dropped_in_the_middle_of_backward_are_gradients() -> None:
    model = Stack()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    memory = read(model, lambda model, optimizer, x: model(x).sum().backward())
    largest = rounded(4 * numel(SHAPES[0]))
    assert largest <= memory.most["gradients"] <= WHOLE
    assert memory.after["gradients"] == 0


def test_gradients_that_are_set_by_hand_are_gradients() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad / 3
        optimizer.step()
        optimizer.zero_grad()

    largest = rounded(4 * numel(SHAPES[0]))
    memory = read(Stack(), step)
    # while one is divided there are two of it
    assert memory.most["gradients"] == BLOCKS * WHOLE + largest


def test_a_gradient_on_its_way_into_another_is_a_gradient() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        for _ in range(3):
            model(x).sum().backward()

    memory = read(Stack(), step)
    # a Linear's weight and bias are ready together
    linear = rounded(4 * numel(SHAPES[0])) + rounded(4 * numel(SHAPES[1]))
    assert BLOCKS * WHOLE < memory.most["gradients"] <= BLOCKS * WHOLE + linear


def test_casts_of_gradients_are_gradients_and_of_other_things_are_not() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).sum().backward()
        casts = [p.grad.double() for p in model.parameters()]
        casts += [x.double().float(), *(p.detach().double() for p in model.parameters())]
        optimizer.zero_grad()

    memory = read(Stack(), step)
    double = sum(rounded(8 * numel(shape)) for shape in SHAPES)
    assert memory.most["gradients"] == BLOCKS * (WHOLE + double)
    assert memory.most["shards"] == BLOCKS * WHOLE


def test_buffers_count_with_the_shards_and_the_data_with_the_activations() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    memory = read(model, lambda model, optimizer, x: None)
    weights = rounded(4 * WIDTH * WIDTH) + 3 * 512
    assert memory.before["shards"] == weights + 3 * 512  # two of the buffers have 61 elements
    assert memory.before["activations"] == rounded(4 * SAMPLES * WIDTH)
    assert sum(memory.most.values()) == memory.reading.baseline


def test_cyclic_garbage_of_the_step_is_gone_after_it() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        cycle: list[object] = [torch.ones(300)]
        cycle.append(cycle)

    memory = read(Stack(), step)
    assert memory.most["activations"] == memory.after["activations"] + rounded(1200)


def test_a_sparse_gradient_is_a_gradient() -> None:
    model = nn.Embedding(900, WIDTH, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(SAMPLES)
    memory = read(model, lambda model, optimizer, x: model(rows).sum().backward(), optimizer)
    values = rounded(4 * SAMPLES * WIDTH)
    assert values <= memory.after["gradients"] <= values + rounded(8 * SAMPLES)


@needs_fsdp2
def test_whole_gradients_wait_until_the_last_micro_batch_is_reduced() -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for policy, new in ((None, WHOLE), (bf16(), HALF)):
        with simulated_world(8) as mesh:
            options = {"mp_policy": policy} if policy else {}
            memory = read(shard(Stack(), mesh, **options), step)
        # in float32 either way, and those of the last micro-batch are added to them
        assert BLOCKS * WHOLE < memory.most["gradients"] <= BLOCKS * WHOLE + new
        assert memory.most["unsharded"] == gathered(8, size=2 if policy else 4)
        assert memory.most["shards"] == BLOCKS * part(8)


@needs_fsdp2
@pytest.mark.parametrize("half", [False, True])
def test_whole_gradients_that_are_never_reduced_are_gradients_still(half: bool) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            model(x).float().square().mean().backward()

    with simulated_world(8) as mesh:
        model = shard(Stack(), mesh, **({"mp_policy": bf16()} if half else {}))
        memory = read(model, step)
    assert memory.after["gradients"] == BLOCKS * WHOLE
    assert memory.most["communication"] < BLOCKS * WHOLE


@needs_fsdp2
def test_parameters_that_stay_gathered_are_unsharded_in_each_step() -> None:
    with simulated_world(8) as mesh:
        model = shard(Stack(), mesh, reshard_after_forward=False)
        optimizer = make_optimizer(model, sgd=True)
        model.set_reshard_after_backward(False)
        gathers, keeps = (read(model, train, optimizer) for _ in range(2))
        model.set_reshard_after_backward(True)
        returns = read(model, train, optimizer)
    alive = [(m.before["unsharded"], m.after["unsharded"]) for m in (gathers, keeps, returns)]
    whole = BLOCKS * gathered(8)
    # the first and second step resize no storage
    assert alive == [(0, whole), (whole, whole), (whole, 0)]
    for memory in (gathers, keeps, returns):
        assert memory.before["shards"] == memory.after["shards"] == BLOCKS * part(8)
        assert memory.most["unsharded"] == whole
    # whole gradients too: they are no more than before
    assert keeps.most["gradients"] == gathers.most["gradients"]


@needs_fsdp2
@pytest.mark.parametrize("half", [False, True])
def test_one_rank_alone_has_no_collectives_but_their_copies(half: bool) -> None:
    with simulated_world(1) as mesh:
        model = shard(Stack(), mesh, **({"mp_policy": bf16()} if half else {}))
        memory = read(model, train)
    assert memory.most["unsharded"] == gathered(1, size=2 if half else 4)
    assert memory.most["shards"] == BLOCKS * part(1)
    # a block's gradients where they would be reduced; a copy takes them further
    assert memory.most["communication"] == rounded(4 * together(1))


@needs_fsdp2
def test_parameters_that_fsdp_leaves_alone_are_shards() -> None:
    with simulated_world(8) as mesh:
        model = Stack()
        alone = set(model.blocks[0].parameters())
        model = shard(model, mesh, blocks=False, ignored_params=alone)
        memory = read(model, lambda model, optimizer, x: model(x).sum().backward())
    assert memory.most["shards"] == WHOLE + (BLOCKS - 1) * part(8)
    assert memory.most["unsharded"] == (BLOCKS - 1) * gathered(8)


@needs_fsdp2
def test_frozen_parameters_are_gathered_and_have_no_gradients() -> None:
    with simulated_world(8) as mesh:
        model = Stack()
        model.blocks[:-1].requires_grad_(False)
        x = draw.randn(SAMPLES, WIDTH)
        model = shard(model, mesh, reshard_after_forward=False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        memory = read(model, lambda model, optimizer, _: train(model, optimizer, x), optimizer)
    assert memory.most["unsharded"] == BLOCKS * gathered(8)
    assert memory.most["shards"] == BLOCKS * part(8)
    assert WHOLE <= memory.most["gradients"] < 2 * WHOLE


@needs_fsdp2
def test_parameters_that_are_not_sharded_by_rows_are_joined_out_of_buffers() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    weight = 4 * 64 * 64
    with simulated_world(8) as mesh:
        model = nn.Linear(64, 64, bias=False)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
        memory = read(model, lambda *_: model(torch.ones(3, 64)).sum().backward())
    assert memory.most["unsharded"] == weight
    # the buffer of the all-gather, and a copy of it before its parts are joined
    assert memory.most["communication"] == 2 * weight
    # and of the whole gradient a copy that is cut the other way
    assert memory.most["gradients"] == 2 * weight


@needs_fsdp2
@pytest.mark.parametrize("enter", [simulated_world, dry_run])
def test_tensors_that_a_collective_reads_or_writes_are_communication(enter: Any) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        gathered = torch.empty(8 * 5, 100)
        sent = torch.ones(5, 100)
        dist.all_gather(list(gathered.chunk(8)), sent)
        dist.all_reduce(next(model.parameters()).data)  # a shard remains a shard
        torch.ones(7, 100)

    with enter(8):
        memory = read(Stack(), step)
    assert memory.most["communication"] == rounded(8 * 5 * 400) + rounded(5 * 400)
    assert memory.most["shards"] == BLOCKS * WHOLE
    assert memory.most["activations"] == rounded(4 * SAMPLES * WIDTH) + rounded(7 * 400)


def test_meta_tensors_and_nested_fake_ones_count_neither_dry_nor_real() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        torch.empty(1000, 1000, device="meta") + 1
        torch.ones(300)

    for enter in (simulated_world, dry_run):
        with enter(8):
            memory = read(Stack(), step)
        assert memory.reading.above_baseline == rounded(1200)


def test_an_error_in_the_step_comes_out_and_leaves_no_hook_behind() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).sum().backward()
        raise MemoryError("out of memory")

    model = Stack()
    optimizer = make_optimizer(model)
    with pytest.raises(MemoryError, match="out of memory"):
        read(model, step, optimizer)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert measure(lambda: torch.ones(300)).peak == rounded(1200)
