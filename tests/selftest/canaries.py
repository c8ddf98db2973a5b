"""One canary for each name of kit.private_torch: what the kit takes it for, on small things."""

from __future__ import annotations

import datetime
import inspect
import re
import tempfile
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, _sharding_prop
from torch.profiler import ProfilerActivity, profile

from kit import forkserver
from kit import private_torch as private
from kit.ranks.simulated import simulated_world

TESTED = "2.13"  # what a torch before this one lacks, its canary forgives


class Seen(private.DispatchMode):
    """Keeps every operator with its arguments, DTensors unwrapped, and a note of its own."""

    def __init__(self, note: Any = lambda args: args) -> None:
        super().__init__()
        self.note, self.calls = note, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self.calls.append((func, self.note(args)))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name() for func, _ in self.calls if func.namespace != "profiler"]


def shapes(value: Any) -> Any:
    """The shapes of a tensor or of those in a list."""
    if isinstance(value, list):
        return [shapes(part) for part in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def canary_DispatchMode():
    x = torch.ones(2, 2, requires_grad=True)
    with Seen() as seen:
        (x @ x).sum().backward()
    assert seen.names.count("aten::mm") == 3  # forward, and backward for both arguments
    # torch has not wrapped it, as it does with the modes that do not ask it to leave them alone
    assert vars(Seen)["__torch_dispatch__"].__code__.co_filename == __file__


def canary_dispatch_modes():
    assert list(private.dispatch_modes()) == []
    with Seen() as outer, Seen() as inner:
        assert list(private.dispatch_modes()) == [outer, inner]


def canary_pop_dispatch_mode():
    outer, inner = Seen().__enter__(), Seen().__enter__()
    assert private.pop_dispatch_mode() is inner
    assert private.pop_dispatch_mode() is outer
    torch.ones(2)
    assert outer.calls == inner.calls == []


def canary_pop_saved_tensors_hooks():
    packed = []
    for name in ("outer", "inner"):
        pack = lambda tensor, name=name: packed.append(name) or tensor  # noqa: E731
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor).__enter__()
    x = torch.ones(2, requires_grad=True)
    for left in (["inner"], ["outer"], []):
        packed.clear()
        x.exp()
        assert packed == left
        if left:
            private.pop_saved_tensors_hooks()


def canary_named_arguments():
    named = private.named_arguments(torch.ops.aten.add.Tensor, (1, 2), {"alpha": 3})
    assert named == {"self": 1, "other": 2, "alpha": 3}
    assert private.named_arguments(torch.ops.aten.add.Tensor, (1, 2), None) == {
        "self": 1,
        "other": 2,
    }


def canary_CAST():
    x = torch.ones(2)
    with Seen() as seen:
        x.to(torch.float32)
        x.to(torch.bfloat16)
    assert [func for func, _ in seen.calls] == [private.CAST]


def canary_DEVICE_QUERIES():
    with private.fake_tensor_mode():
        x = torch.ones(2)
        with Seen() as seen:
            assert not x.is_cuda
    assert [func.namespace for func, _ in seen.calls] == [private.DEVICE_QUERIES]


def canary_COLLECTIVES():
    with simulated_world(4) as mesh, Seen() as seen:
        dist.all_reduce(torch.ones(2))
        group = mesh.get_group()
        gather = torch.ops._c10d_functional_autograd.all_gather_into_tensor
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group))
        functional.wait_tensor(gather(torch.ones(2), 4, group.group_name))
    assert {func.namespace for func, _ in seen.calls} - {"aten"} <= private.COLLECTIVES
    assert any(func.name() == "c10d::allreduce_" for func, _ in seen.calls)
    # whatever takes a group stands in one of these namespaces
    for schema in torch._C._jit_get_all_schemas():
        names = {argument.name for argument in schema.arguments}
        if names & {"group_name", "process_group", "ranks"}:
            assert schema.name.partition("::")[0] in private.COLLECTIVES, schema


@contextmanager
def _sharded_linear(ranks: int = 4, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    with simulated_world(ranks) as mesh:
        yield fully_shard(nn.Linear(3, 5), mesh=mesh, **options)


def canary_FSDP_COPIES():
    with _sharded_linear() as model, Seen() as seen:
        model(torch.ones(7, 3)).sum().backward()
    copies = [name for name in seen.names if name.startswith(f"{private.FSDP_COPIES}::")]
    gather = seen.names.index("c10d::_allgather_base_")
    assert seen.names[gather - 1] == copies[0]  # in,
    assert copies[1] in seen.names[gather:]  # out,
    assert seen.names.index("c10d::_reduce_scatter_base_") > seen.names.index(copies[2])
    assert len(copies) == 3


def canary_FSDP_GRADIENT_COPIES():
    with _sharded_linear() as model, Seen(lambda args: shapes(args[0])) as seen:
        model(torch.ones(7, 3)).sum().backward()
    copied = [note for func, note in seen.calls if func.name() in private.FSDP_GRADIENT_COPIES]
    assert copied == [[(5, 3), (5,)]]  # the gradients of weight and bias, before they are sharded


def canary_storage_key():
    x, y = torch.ones(4), torch.ones(4)
    key = private.storage_key(x.untyped_storage())
    assert key == private.storage_key(x[1:].untyped_storage())
    assert key == private.storage_key(x.detach().untyped_storage())
    assert key != private.storage_key(y.untyped_storage())
    x.untyped_storage().resize_(0)
    y.untyped_storage().resize_(0)
    assert x.data_ptr() == y.data_ptr() == 0
    assert key == private.storage_key(x.untyped_storage())
    assert key != private.storage_key(y.untyped_storage())


def canary_sparse_parts():
    x = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), is_coalesced=False)
    for _ in range(2):  # the tensor's own, not copies
        indices, values = private.sparse_parts(x)
        assert (indices.tolist(), values.tolist()) in (([[0, 0]], [1, 2]), ([[0, 0]], [2, 4]))
        values.mul_(2)
    assert x.to_dense().tolist() == [12, 0, 0]


def canary_put_hook_first():
    calls = []
    x = torch.ones(2, requires_grad=True)
    for name in ("first", "second", "third"):
        handle = x.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    private.put_hook_first(x, handle)
    x.sum().backward()
    assert calls == ["third", "first", "second"]
    handle.remove()
    x.sum().backward()
    assert calls[3:] == ["first", "second"]


def canary_forward_hooks():
    model = nn.Linear(2, 2)
    after = model.register_forward_hook(lambda *_: None)
    before = model.register_forward_pre_hook(lambda *_: None)
    assert private.forward_hooks(model) == ([after.id], [before.id])
    after.remove()
    assert private.forward_hooks(model) == ([], [before.id])


def canary_active_fake_mode():
    assert private.active_fake_mode() is None
    with private.fake_tensor_mode() as mode:
        assert private.active_fake_mode() is mode


def canary_fake_tensor_mode():
    with private.fake_tensor_mode():
        huge = torch.ones(1 << 50)
        assert ((huge + 1).shape, str(huge.device)) == (huge.shape, "cpu")


def canary_fake_device():
    assert private.fake_device(torch.ones(2)) == ""
    with private.fake_tensor_mode():
        fake = torch.ones(2)
    assert private.fake_device(fake) == "cpu"
    assert fake.untyped_storage().device.type == "meta"


def canary_fake_mode_depth():
    with simulated_world(4) as mesh, private.fake_tensor_mode() as mode:
        assert private.fake_mode_depth(mode) == 1
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        note = lambda args: (private.fake_mode_depth(mode), shapes(args[0]))  # noqa: E731
        with Seen(note) as seen:
            x.exp()
    # the propagation first, of the global size and one deeper, and then the operator itself
    assert [note for func, note in seen.calls if func.name() == "aten::exp"] == [
        (2, (8, 3)),
        (1, (2, 3)),
    ]


def canary_fake_store():
    dist.init_process_group("fake", store=private.fake_store(), rank=3, world_size=1024)
    try:
        x = torch.full((2,), 7.0)
        dist.all_reduce(x)  # at once, and alone
        assert (dist.get_rank(), dist.get_world_size(), x.tolist()) == (3, 1024, [7, 7])
    finally:
        dist.destroy_process_group()


def canary_forget_shardings():
    with simulated_world(4) as mesh:
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        runs = []
        for _ in range(2):
            for _ in range(2):
                with Seen() as seen:
                    x.exp()
                runs.append(seen.names.count("aten::exp"))
            private.forget_shardings()
    assert runs == [2, 1, 2, 1]  # a propagation runs the operator once more, on fake tensors


def canary_fsdp_chunks():
    asked = []

    def chunk(tensor, number, dim):
        asked.append((tuple(tensor.shape), number, dim))
        return [torch.full((2, *tensor.shape[1:]), float(rank)) for rank in range(number)]

    with private.fsdp_chunks(chunk), _sharded_linear(3) as model:
        assert set(asked) == {((5, 3), 3, 0), ((5,), 3, 0)}
        assert torch.equal(model.weight.to_local(), torch.zeros(2, 3))  # what rank 0 was given


def canary_no_strided_shard_search():
    name = "_propagate_use_strided_shard_flag"
    if not hasattr(_sharding_prop, name) and torch.__version__ < TESTED:
        return
    calls = []
    for dims in (1, 2):
        with (
            simulated_world(4) as mesh,
            mock.patch.object(_sharding_prop, name, wraps=getattr(_sharding_prop, name)) as search,
        ):
            if dims == 2:
                mesh = dist.init_device_mesh("cpu", (2, 2))
            x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)] + [Replicate()] * (dims - 1))
            for spare in (False, True):
                private.forget_shardings()
                search.reset_mock()
                with private.no_strided_shard_search() if spare else mock.MagicMock():
                    torch._foreach_add([x, x], 1.0)
                calls.append(search.call_count > 0)
    assert calls == [True, False, True, True]


def _profiled() -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        torch.empty(1000)
    return list(private.profiler_events(prof))


def canary_profiler_events():
    (event,) = [event for event in _profiled() if event.name() == "aten::empty"]
    assert event.start_ns() > 0
    assert event.duration_ns() >= 0


def canary_MEMORY_EVENT():
    events = [event for event in _profiled() if event.name() == private.MEMORY_EVENT]
    assert [event.nbytes() for event in events] == [4000, -4000]  # made, and freed
    assert {event.device_type().name for event in events} == {"CPU"}
    assert events[0].start_ns() <= events[1].start_ns()


def canary_set_allocator_settings():
    if not torch.cuda.is_initialized():  # then only that the name is there
        accelerator = hasattr(torch._C, "_accelerator_setAllocatorSettings")
        assert accelerator or hasattr(torch.cuda.memory, "_set_allocator_settings")
        return
    torch.cuda.empty_cache()
    private.set_allocator_settings("expandable_segments:True")
    kept = torch.ones(1 << 26, device="cuda")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()), kept.shape


def canary_data_version():
    tensor = torch.ones(2)
    before = private.data_version(tensor)
    _ = tensor * 2, tensor[0], tensor.numpy()
    assert private.data_version(tensor) == before
    tensor[0].add_(1)
    assert private.data_version(tensor) > before


def canary_leaf_hooks():
    leaf = torch.ones(2, requires_grad=True)
    assert not private.leaf_hooks(leaf)
    handle = leaf.register_hook(lambda grad: None)
    assert len(private.leaf_hooks(leaf)) == 1
    handle.remove()
    assert not private.leaf_hooks(leaf)


PUT_OFF = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from kit.private_torch import put_off_dynamo

put_off_dynamo()
layer = torch.nn.Linear(2, 2)

class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

for make in (torch.optim.SGD, torch.optim.Adam):
    optimizer = make(layer.parameters(), lr=0.1)
    with Plain():
        checkpoint(layer, torch.ones(2), use_reentrant=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(layer)(torch.ones(2)).sum().backward()

@torch._dynamo.allow_in_graph
@torch._dynamo.assume_constant_result
def marked():
    return 2

from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert "torch._dynamo.convert_frame" not in sys.modules
with TransformGetItemToIndex():
    assert torch.vmap(lambda n: torch.arange(3)[n])(torch.arange(marked())).tolist() == [0, 1]
doubled = torch.compile(lambda x: x * 2, backend="eager")
assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
assert "torch._dynamo.convert_frame" in sys.modules
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
"""


def canary_in_backward():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.in_backward())
            return grad * 2

    seen = [private.in_backward()]
    Looks.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert [*seen, private.in_backward()] == [False, True, False]


def canary_put_off_dynamo():
    code, said = _in_fork(exec, PUT_OFF, {})
    assert code == 0, said


def canary_collective_count():
    (group,) = _gloo_groups(1)
    before = private.collective_count(group)
    for _ in range(3):
        group.allreduce([torch.ones(2)]).wait()
    assert private.collective_count(group) == before + 3


def _files(call: Any) -> list[str]:
    """The Python files from which the last operator came, a collective if there is one."""
    stack = lambda args: [frame.filename for frame in traceback.extract_stack()[:-2]]  # noqa: E731
    with Seen(stack) as seen:
        call()
    calls = [files for func, files in seen.calls if func.namespace in private.COLLECTIVES]
    return [*(files for _, files in seen.calls), *calls][-1]


def canary_WAITS():
    x = torch.ones(2, requires_grad=True)
    with simulated_world(2):
        for call in (
            lambda: dist.broadcast(torch.ones(2), 0),  # not what the simulation replaces
            lambda: dist.barrier(),
            lambda: x.exp().sum().backward(),  # where the hooks of DDP and FSDP wait
        ):
            assert re.search(private.WAITS, _files(call)[-1]), call
    assert not re.search(private.WAITS, _files(lambda: torch.ones(2))[-1])
    assert not re.search(private.WAITS, _files(lambda: nn.Linear(2, 2)(torch.ones(2)))[-1])


def canary_ENGINE():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("by a line of Python")

    def last_file(loss):
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return caught.traceback[-1].frame.code.raw.co_filename

    assert last_file(torch.ones(1).sum()) == private.ENGINE
    assert last_file(Fails.apply(torch.ones(1, requires_grad=True)).sum()) == __file__


def canary_PASSES_ON():
    with simulated_world(2):
        x = torch.ones(2)
        wait = _files(lambda: functional.wait_tensor(x))
        plain = _files(lambda: torch.ops.aten.exp(x))
    assert re.search(private.PASSES_ON, wait[-1])
    assert re.search(private.PASSES_ON, plain[-1])
    callers = [[f for f in files if not re.search(private.PASSES_ON, f)] for files in (wait, plain)]
    assert re.search(private.WAITS, callers[0][-1])
    assert callers[1][-1] == __file__


def _gloo_groups(size: int) -> list[Any]:
    """Ranks of one group in threads of this process."""
    store, groups, limit = dist.HashStore(), [None] * size, datetime.timedelta(seconds=20)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, size, options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def canary_RANK_IS_GONE():
    groups = _gloo_groups(2)
    work = groups[0].allreduce([torch.ones(3)])
    del groups[1]
    try:
        work.wait()
    except RuntimeError as error:
        assert re.search(private.RANK_IS_GONE, str(error))  # noqa: PT017
    else:
        raise AssertionError("no error without the other rank")


NESTED = [1, ({"a": 2}, 3)]


def canary_tree_leaves():
    assert private.tree_leaves(NESTED) == [1, 2, 3]


def canary_tree_flatten():
    leaves, kind = private.tree_flatten(NESTED)
    assert leaves == [1, 2, 3]
    assert kind != private.tree_flatten([1, ([2], 3)])[1]


def canary_tree_map():
    assert private.tree_map(lambda leaf: -leaf, NESTED) == [-1, ({"a": -2}, -3)]


def canary_allocation_history():
    memory = torch.cuda.memory
    options = inspect.signature(memory._record_memory_history).parameters
    snapshot = inspect.signature(memory._snapshot).parameters
    assert {"enabled", "context", "stacks"} <= {*options} or "kwargs" in options
    assert "device" in snapshot
    if not torch.cuda.is_available():
        return  # the rest is seen on a GPU
    gpu = torch.device("cuda")
    with private.allocation_history(gpu) as get:
        tensor = torch.ones(1000, device=gpu)
        blocks = [block for segment in get()["segments"] for block in segment["blocks"]]
    alive = [block for block in blocks if block["state"] == "active_allocated"]
    lines = [frame for block in alive for frame in block.get("frames") or []]
    assert any(frame["filename"] == __file__ and frame["line"] for frame in lines), tensor.shape


def canary_GLOO_ABORTS():
    code, said = _in_fork(call_what_does_not_fit)
    assert code < 0
    assert private.GLOO_ABORTS in said


def call_what_does_not_fit() -> None:
    """Numbers of two sizes are added up: gloo ends the process."""
    sums = [
        group.allreduce([torch.ones(size)])
        for group, size in zip(_gloo_groups(2), (7, 100_000), strict=True)
    ]
    for work in sums:
        work.wait()


CANARIES = {
    name.removeprefix("canary_"): canary
    for name, canary in list(globals().items())
    if name.startswith("canary_")
}


def _in_fork(target: Any, *arguments: Any) -> tuple[int, str]:
    """The exit code of a process of its own, and what it has written."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = forkserver.fork(target, *arguments, log=log, has_forks=False)
        process.join()
        return forkserver.end(process), forkserver.read(log)
