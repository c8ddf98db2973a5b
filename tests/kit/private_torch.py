"""All that the kit leans on and torch does not promise: the one place to look when torch changes.

Each name says what is leaned on and why nothing public does it. Each has a canary test of what it
means in tests/selftest/test_private_torch.py, which fails first when a new torch has changed it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import _guards, nn
from torch.utils import _python_dispatch, _pytree

# Operators and the modes that see them


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """Sees every operator below autograd. Its module is private; nothing public sees as much."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in dynamo.disable: 2 s of import, and slower calls
        return False


dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
"""The modes in force, outermost first: nothing public lists them."""

pop_dispatch_mode = _python_dispatch._pop_mode
"""Leaves the innermost mode, also one whose object nobody has: `__exit__` needs the object."""


def pop_saved_tensors_hooks() -> None:
    """Drop the innermost saved-tensor hooks: the public context manager drops only its own."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def named_arguments(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator's call by name: its schema is a private attribute."""
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


CAST = torch.ops.aten._to_copy.default
"""What `Tensor.to` runs where it copies: the mode sees no public operator for it."""

DEVICE_QUERIES = "prim"
"""The namespace in which a fake tensor is asked for its device, which computes nothing."""

COLLECTIVES = frozenset(
    [
        "c10d",
        "c10d_functional",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "symm_mem",
    ]
)
"""The namespaces of operators that talk to other ranks: the schemas say so nowhere."""

FSDP_COPIES = "fsdp"
"""The namespace of FSDP2's copies into and out of collectives: no hook sees these buffers."""

FSDP_GRADIENT_COPIES = ("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")
"""FSDP2 copies unsharded gradients into the reduce-scatter by these: no hook has them then."""
# the second since torch 2.15


# Tensors and their hooks

storage_key = attrgetter("_cdata")
"""What tells storages apart while they live: `data_ptr` is 0 for every empty one."""


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor: the public methods raise before it is coalesced."""
    return tensor._indices(), tensor._values()


def put_hook_first(tensor: torch.Tensor, handle: Any) -> None:
    """Run this post-accumulate-grad hook before the others: torch has no `prepend` for these."""
    hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks
    others = {key: hooks.pop(key) for key in [*hooks] if key != handle.id}
    hooks.update(others)


def forward_hooks(module: nn.Module) -> tuple[list[int], list[int]]:
    """The ids of a module's forward and forward-pre hooks: nothing public lists them."""
    return list(module._forward_hooks), list(module._forward_pre_hooks)


# Nested arguments and results

tree_leaves = _pytree.tree_leaves
"""What stands in lists, tuples and dicts however deep: there is no public name."""

tree_flatten = _pytree.tree_flatten
"""The same, with what it stood in."""

tree_map = _pytree.tree_map
"""The same again with a function applied to each."""


# Fake tensors and the fake process group

active_fake_mode = _guards.active_fake_mode
"""The fake-tensor mode that is in force, if one is: nothing public tells."""


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Tensors made inside have shapes and no memory: the class stands in a private module."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def fake_mode_depth(mode: Any) -> int:
    """How often a fake mode was entered: once more while DTensor propagates shardings."""
    # its tensors have the global size then, and nothing public tells them from the step's own
    return len(mode.enter_stack)


def fake_device(tensor: torch.Tensor) -> str:
    """The device that a fake tensor stands for, "" for a real one: its storage says "meta"."""
    return str(getattr(tensor, "fake_device", ""))


def fake_store() -> Any:
    """The store of the backend "fake": no public module has it, and this one registers both."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# DTensor and FSDP2


def forget_shardings() -> None:
    """Empty DTensor's caches of shardings: they hold meshes, and nothing public empties them."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    # the other cache, in C++, is newer than torch 2.6
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def fsdp_chunks(chunk: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Have FSDP2 cut parameters by `chunk(tensor, number, dim)`: no option changes how it does."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _replaced(_fsdp_param, "_chunk_with_empty", chunk)


def no_strided_shard_search() -> AbstractContextManager[Any]:
    """Spare DTensor a search through all tensors of a foreach operator: no option turns it off."""
    # for each tensor it looks in all of them for a flag that only a mesh of two dimensions sets
    from torch.distributed.tensor import _sharding_prop

    search = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)

    def propagate(strategy: Any, schema: Any) -> None:
        if search and strategy.strategies[0].mesh.ndim > 1:
            search(strategy, schema)

    return _replaced(_sharding_prop, "_propagate_use_strided_shard_flag", propagate)


def _replaced(module: Any, name: str, function: Any) -> AbstractContextManager[Any]:
    # these only save time: where torch has changed, it takes longer
    return mock.patch.object(module, name, function) if hasattr(module, name) else nullcontext()


# Instruments


def profiler_events(profile: torch.profiler.profile) -> Iterable[Any]:
    """The raw events of a profile: `profile.events()` tells no time and size of an allocation."""
    return profile.profiler.kineto_results.events()  # type: ignore[union-attr]


MEMORY_EVENT = "[memory]"
"""The name of the raw events that are an allocation or a free: their type is not in Python."""


def set_allocator_settings(settings: str) -> None:
    """Configure the CUDA allocator: the public way is a variable that is read before this runs."""
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):  # torch 2.9 and later
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)


data_version = attrgetter("_version")
"""How often a tensor has been changed in place: nothing public says so."""

leaf_hooks = attrgetter("_backward_hooks")
"""The hooks on the gradient of a tensor, or None: nothing public lists them."""


def in_backward() -> bool:
    """Whether this thread runs a backward pass now: nothing public says so."""
    return int(torch._C._current_graph_task_id()) != -1


# The compiler


class _NotYet(ModuleType):
    """Stands for torch._dynamo or a module in it, with what is asked of it where none compiles."""

    def __init__(self, name: str = "", **given: Any) -> None:
        super().__init__(f"torch._dynamo{name}")
        self._path = name
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        # Such names are asked of all modules, by inspect for one; this one begins a true import.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return attrgetter(f"{self._path}.{name}"[1:])(_true_dynamo())


_WRAPPED = "._trace_wrapped_higher_order_op"  # masks of the transformers library import it


def _dynamo_config() -> ModuleType:
    """Of all its modules this one takes no time by itself."""
    path = Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec = spec_from_file_location("torch._dynamo.config", path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put_off_dynamo() -> None:
    """Spare a process torch._dynamo until it compiles: the first optimizer imports it for seconds.

    No option does. Whoever asks for anything else of it gets the true one.
    """
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _NotYet(
            config=_dynamo_config(),
            # optimizers, checkpoints and dispatch modes; `disable` is a decorator too
            graph_break=lambda *_, **__: None,
            disable=lambda fn=None, *_, **__: fn or (lambda function: function),
            # process groups, DDP, and the state of a sharded model
            trace_rules=_NotYet(".trace_rules", clear_lru_cache=lambda: None),
            utils=_NotYet(".utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
            eval_frame=_NotYet(".eval_frame", OptimizedModule=type("OptimizedModule", (), {})),
            # the transformers library, to mark what might be compiled
            assume_constant_result=lambda function: function,
            allow_in_graph=lambda function: function,
        )
        to_index = lambda: _true_dynamo()._trace_wrapped_higher_order_op.TransformGetItemToIndex()  # noqa: E731
        wrapped = _NotYet(_WRAPPED, __path__=[], TransformGetItemToIndex=to_index)
        sys.modules[wrapped.__name__] = wrapped


def _true_dynamo() -> ModuleType:
    for name in ("torch._dynamo", f"torch._dynamo{_WRAPPED}"):
        if isinstance(sys.modules.get(name), _NotYet):
            del sys.modules[name]
    dynamo = importlib.import_module("torch._dynamo")
    # It was imported before its package, which has no such name in torch 2.6 then.
    dynamo.config = sys.modules["torch._dynamo.config"]  # type: ignore[attr-defined]
    return dynamo


# CUDA


@contextmanager
def allocation_history(device: torch.device) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields what gives a snapshot of a GPU's blocks with the lines that made them.

    Public is only a way to write it into a file for a page on the network.
    """
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        yield lambda: torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


# Ranks


def collective_count(group: Any) -> int:
    """How many collectives this rank has called in a group: nothing public counts them."""
    return int(group._get_sequence_number_for_group())


ENGINE = torch.autograd.graph.__file__
"""The file in which Python sees a backward pass fail that native code runs: no type tells one."""

WAITS = r"torch/(distributed|nn/parallel|autograd)/"
"""Python files of torch in which a rank waits for others: no call tells what a rank waits for."""

PASSES_ON = r"torch/(_ops\.py|_compile\.py|_library/|_dynamo/)"
"""Python files of torch through which every operator passes, so that they tell nothing of it."""

RANK_IS_GONE = r"gloo|NCCL|nccl|[Cc]onnection (closed|reset)|[Bb]roken pipe"
"""Words of a RuntimeError whose cause is another rank's end: it has no type or code to tell."""
# gloo's, and NCCL's, which have never been seen here

GLOO_ABORTS = "gloo::"
"""What gloo writes as it ends a process whose calls do not fit the others': nothing is raised."""
