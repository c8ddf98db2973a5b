"""A right answer of another shape: rows kept by hand, own files for every rank, one small sum."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (samples, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to the mean over their samples
BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_T = TypeVar("_T")

# The mesh of every model that `wrap` or `build` has sharded.
_MESHES: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()


def _mesh(model: nn.Module) -> DeviceMesh:
    """The mesh that `model` is sharded over."""
    if model not in _MESHES:
        raise ValueError(f"the model, a {type(model).__name__}, is not wrapped")
    return _MESHES[model]


def _device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _rows(total: int, parts: int, part: int) -> tuple[int, int]:
    """The run of rows, from start to stop, that the part gets: equal runs, rounded up."""
    run = -(-total // parts)
    return min(part * run, total), min((part + 1) * run, total)


def _own_rows(total: int, mesh: DeviceMesh) -> tuple[int, int]:
    """The run of rows that this rank holds."""
    group = mesh.get_group()
    return _rows(total, group.size(), group.rank())


def _reduced(values: Sequence[int], op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> list[int]:
    """A few whole numbers, each reduced over the ranks."""
    numbers = torch.tensor(values, dtype=torch.int64, device=_device(mesh))
    dist.all_reduce(numbers, op, group=mesh.get_group())
    return numbers.tolist()


def _together(mesh: DeviceMesh, what: str, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank; where it fails on any rank, every rank raises."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    (failed,) = _reduced([error is not None], dist.ReduceOp.MAX, mesh)
    if error is not None:
        raise error
    if failed:
        raise OSError(f"{what}: another rank has failed")
    return result


def _sharded(tensor: Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """The tensor of `shape` of which this rank holds the rows `tensor`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, mesh, (Shard(0),), run_check=False, shape=torch.Size(shape), stride=stride
    )


def _give_back(model: nn.Module) -> None:
    """Every unit gives back what it has gathered: the model's parameters are its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _drop_gradients(model: nn.Module) -> None:
    """No shard has a gradient, nor is there a whole one that was never reduced."""
    _give_back(model)
    for parameter in model.parameters():
        parameter.grad = None
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # There is no public way to the whole gradients of backwards without synchronisation.
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for sharded in group.fsdp_params:
                sharded.unsharded_accumulated_grad = None
                if hasattr(sharded, "_unsharded_param"):
                    sharded._unsharded_param.grad = None


# Part 1; `dtype` is part 2, `checkpoint` is part 3


class _Plan(NamedTuple):
    """What `_shard` needs to know of a model."""

    blocks: list[nn.Module]  # but for the model itself, inner ones before those they are in
    inner: set[nn.Module]  # those that are inside another block


def _plan(model: nn.Module, mesh: DeviceMesh, block_types: BlockTypes, dtype: torch.dtype) -> _Plan:
    """Find the blocks, and raise a ValueError for all that `wrap` refuses; change nothing."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions, not one")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}, neither torch.float32 nor torch.bfloat16")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"the {type(model).__name__} is sharded already: its {name} is")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"the {type(model).__name__} is sharded already: its {name!r} is")
    classes = block_types if isinstance(block_types, tuple) else (block_types,)
    for cls in classes:
        if not any(isinstance(module, cls) for module in [*model.modules()][1:]):
            raise ValueError(f"the {type(model).__name__} has no block of class {cls.__name__}")

    # Every path to a module counts here: one that is reached from two units belongs to both.
    unit: dict[str, nn.Module] = {}  # of a path, the block that its module is in, or the model
    owner: dict[nn.Parameter, nn.Module] = {}
    depth: dict[nn.Module, int] = {}
    inner: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        above = unit[path.rpartition(".")[0]] if path else model
        unit[path] = above
        if isinstance(module, classes) and path:
            unit[path] = module
            # The longest path to an inner block is longer than that to any block it is in.
            depth[module] = max(depth.get(module, 0), path.count("."))
            if isinstance(above, classes):
                inner.add(module)
        for name, parameter in module.named_parameters(path, False, False):
            if parameter.ndim == 0:
                raise ValueError(f"the parameter {name} has no rows to deal out")
            if owner.setdefault(parameter, unit[path]) is not unit[path]:
                raise ValueError(f"two units share the parameter {name}")
    blocks = sorted(depth, key=lambda block: depth[block], reverse=True)
    return _Plan(blocks, inner)


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: _Plan,
    *,
    reshard_after_forward: bool,
    dtype: torch.dtype,
    checkpoint: bool,
) -> None:
    """Shard the model as `wrap` says, but for the optimizer."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # fully_shard wants rows that lie one after another
            parameter.data = parameter.data.contiguous()
    policy = outermost = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        outermost = dataclasses.replace(policy, output_dtype=torch.float32)

    for block in [*plan.blocks, model]:
        is_block = block is not model
        # A block inside another runs again with the other, once.
        if checkpoint and is_block and block not in plan.inner:
            _recompute_in_backward(block)
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward and is_block,
            mp_policy=outermost if block is model else policy,
        )
    if plan.inner:
        # Where a block is whole around another, a third one must not be gathered ahead: to
        # prefetch what is there already takes the place of fully_shard's own prefetching.
        for block in plan.blocks:
            block.set_modules_to_backward_prefetch([block])
    model.register_forward_hook(_after_forward)
    _MESHES[model] = mesh


def _after_forward(model: nn.Module, args: Any, output: Any) -> None:
    """A forward without backward leaves nothing gathered, the root's unit neither."""
    if not torch.is_grad_enabled():
        _give_back(model)


def _recompute_in_backward(block: nn.Module) -> None:
    """Let the block keep its inputs only. Its hooks (gathering) are outside, and do not run again.

    The method is replaced, not the module, so that all names stay.
    """
    forward = block.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(
            functools.partial(forward, **kwargs),
            *args,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), _spare_buffers(block)),
            early_stop=False,  # so that the hooks of blocks inside run to their end
        )

    block.forward = run


@contextlib.contextmanager
def _spare_buffers(block: nn.Module) -> Iterator[None]:
    """The block works on copies of its buffers: what it counts in them, it has counted before."""
    buffers = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in buffers}
    for module, name, buffer in buffers:
        module._buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def wrap(
    model: nn.Module,
    mesh: DeviceMesh,
    block_types: BlockTypes,
    make_optimizer: MakeOptimizer,
    *,
    reshard_after_forward: bool = True,
    dtype: torch.dtype = torch.float32,
    checkpoint: bool = False,
) -> Optimizer:
    plan = _plan(model, mesh, block_types, dtype)
    _shard(
        model,
        mesh,
        plan,
        reshard_after_forward=reshard_after_forward,
        dtype=dtype,
        checkpoint=checkpoint,
    )
    return make_optimizer(model.parameters())


# Part 3


class StepResult(NamedTuple):
    loss: Tensor  # the mean over the samples of all ranks: float32 scalar, without a graph
    grad_norm: Tensor  # 2-norm of the whole model's gradients before clipping: float32 scalar


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    sync: Literal["each", "last"] = "each",
    max_norm: float | None = None,
) -> StepResult:
    if sync not in ("each", "last"):
        raise ValueError(f"sync is {sync!r}, neither 'each' nor 'last'")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, not positive")
    mesh = _mesh(model)
    samples = [_samples(batch) for batch in micro_batches]
    count = len(samples)
    flawed = count == 0 or 0 in samples
    any_flawed, most, minus_least = _reduced([flawed, count, -count], dist.ReduceOp.MAX, mesh)
    if any_flawed or most != -minus_least:
        raise ValueError(
            f"this rank has {count} micro-batches: every rank must have the same number of them, "
            "one at least, each with as many targets as inputs, and some"
        )
    (total,) = _reduced([sum(samples)], dist.ReduceOp.SUM, mesh)

    _drop_gradients(model)
    loss = torch.zeros((), dtype=torch.float64, device=_device(mesh))
    try:
        for index, batch in enumerate(micro_batches):
            model.set_requires_gradient_sync(sync == "each" or index == count - 1)
            share = samples[index] / total
            # The reduction takes the mean over the ranks, hence the factor.
            loss += share * _forward_backward(model, batch, loss_fn, share * mesh.size())
    except BaseException:
        model.reset_iter_state()
        _drop_gradients(model)
        raise
    finally:
        model.set_requires_gradient_sync(True)

    with torch.no_grad():
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        squares = torch.zeros_like(loss)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        sums = torch.stack([loss, squares])
        dist.all_reduce(sums, group=mesh.get_group())
        mean_loss, norm = sums[0].float(), sums[1].sqrt().float()
        if max_norm is not None:
            factor = (max_norm / norm).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
    optimizer.step()
    return StepResult(mean_loss, norm)


def _samples(batch: Batch) -> int:
    """How many samples the micro-batch has; 0 if it is flawed."""
    inputs, targets = batch
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        return 0
    return len(inputs)


def _forward_backward(model: nn.Module, batch: Batch, loss_fn: LossFn, factor: float) -> Tensor:
    """Add the gradients of `factor` times the loss; the loss, and nothing of its graph, is left."""
    inputs, targets = batch
    loss = loss_fn(model(inputs), targets)
    (loss * factor).backward()
    return loss.detach()


# Part 4


def build(
    make_model: Callable[[], nn.Module],
    mesh: DeviceMesh,
    block_types: BlockTypes,
    init: Callable[[nn.Module], None],
    make_optimizer: MakeOptimizer,
    *,
    reshard_after_forward: bool = True,
    dtype: torch.dtype = torch.float32,
    checkpoint: bool = False,
) -> tuple[nn.Module, Optimizer]:
    with torch.device("meta"):
        model = make_model()
    plan = _plan(model, mesh, block_types, dtype)
    shards = _first_values(model, mesh, init)
    by_name = {name: shards.pop(parameter) for name, parameter in model.named_parameters()}
    _shard(
        model,
        mesh,
        plan,
        reshard_after_forward=reshard_after_forward,
        dtype=dtype,
        checkpoint=checkpoint,
    )
    shards = {parameter: by_name.pop(name) for name, parameter in model.named_parameters()}

    def with_values(tensor: Tensor) -> Tensor:
        if tensor in shards:
            return _sharded(shards.pop(tensor), mesh, tensor.shape)
        return tensor.detach()  # a buffer, or a tied parameter that has got its values

    model._apply(with_values)
    return model, make_optimizer(model.parameters())


@torch.no_grad()
def _first_values(
    model: nn.Module, mesh: DeviceMesh, init: Callable[[nn.Module], None]
) -> dict[nn.Parameter, Tensor]:
    """Call `init` on every module, whose own parameters are whole meanwhile, and keep our rows.

    The parameters stay on the meta device, as keys; the buffers get memory for good.
    """
    device = _device(mesh)
    shards: dict[nn.Parameter, Tensor] = {}
    buffers: dict[Tensor, Tensor] = {}
    for module in model.modules():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in own.values():
            if parameter in whole:
                continue
            if parameter in shards:  # it is tied, and has the values of another module
                values = _sharded(shards[parameter], mesh, parameter.shape).full_tensor()
            else:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            whole[parameter] = nn.Parameter(values, parameter.requires_grad)
        module._parameters.update({name: whole[p] for name, p in own.items()})
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in buffers:
                    buffers[buffer] = torch.empty_like(buffer, device=device)
                module._buffers[name] = buffers[buffer]

        init(module)

        for name, parameter in own.items():
            start, stop = _own_rows(len(parameter), mesh)
            shards[parameter] = module._parameters[name].detach()[start:stop].clone()
        module._parameters.update(own)
    return shards


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    mesh = _mesh(model)
    folder = Path(folder)
    newest = _newest(folder, mesh)
    if step <= newest:  # which is 0 where there is none
        raise ValueError(f"step is {step}: it must be 1 at least, and above the newest, {newest}")
    first = mesh.get_group().rank() == 0
    unfinished = folder / _UNFINISHED

    def prepare() -> None:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            if unfinished.exists():  # of a save that was interrupted
                shutil.rmtree(unfinished)
            unfinished.mkdir()

    def finish() -> None:
        if first:
            _sync_folder(unfinished)
            unfinished.rename(folder / f"step-{step}")
            _sync_folder(folder)

    def clean() -> None:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)

    what = f"saving step {step} in {folder}"
    part, common = _pack(model, optimizer, mesh)
    try:
        _together(mesh, what, prepare)

        def write() -> None:
            _write(unfinished / _part_name(mesh.get_group().rank()), part)
            if first:
                _write(unfinished / _COMMON, common)

        _together(mesh, what, write)
        _together(mesh, what, finish)
    except Exception:
        _together(mesh, what, clean)
        raise


# A checkpoint is a folder `step-<number>`. There, every rank has written its rows of all weights
# and of the optimizer's state, and rank 0 what all have in common. The folder has another name
# until every rank has written: what has the right name is complete.
_UNFINISHED = "unfinished"
_COMMON = "common.pt"


def _part_name(rank: int) -> str:
    return f"rank-{rank}.pt"


def _newest(folder: Path, mesh: DeviceMesh) -> int:
    """The step of the newest complete checkpoint, as rank 0 sees it; 0 if there is none."""

    def look() -> int:
        if mesh.get_group().rank() != 0 or not folder.exists():
            return 0
        names = [re.fullmatch(r"step-(\d+)", entry.name) for entry in folder.iterdir()]
        return max((int(name[1]) for name in names if name), default=0)

    seen = _together(mesh, f"looking into {folder}", look)
    return _reduced([seen], dist.ReduceOp.MAX, mesh)[0]


def _write(path: Path, content: Any) -> None:
    """Write the file, to the disk."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in the folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _contents(model: nn.Module) -> dict[str, Any]:
    """The model's state dict: shards, persistent buffers (and extra state), to be written into."""
    _give_back(model)
    return model.state_dict(keep_vars=True)


def _shapes(contents: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in contents.items()
    }


def _difference(
    saved: Mapping[str, tuple[int, ...] | None], ours: Mapping[str, tuple[int, ...] | None]
) -> str | None:
    """One name or shape in which the two differ."""
    for name in ours:
        if name not in saved:
            return f"{name} is in the model only"
    for name in saved:
        if name not in ours:
            return f"{name} is not in the model"
        if saved[name] != ours[name]:
            return f"{name} has the shape {saved[name]}, in the model {ours[name]}"
    return None


def _groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in every group of the optimizer, whose order numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


class _Common(NamedTuple):
    """What rank 0 writes. An entry of the optimizer's state is (a parameter's number, a key)."""

    parts: int
    shapes: dict[str, tuple[int, ...] | None]  # of all that the model's state dict has
    others: dict[str, Any]  # what is no parameter
    groups: list[list[str]]
    optimizer: dict[str, Any]  # its state dict without the state
    rows: dict[tuple[int, str], tuple[int, ...]]  # entries in the parts: the whole shape
    replicas: dict[tuple[int, str], Tensor]  # entries that are DTensors, the same on every rank
    plain: dict[tuple[int, str], Any]  # all other entries


@torch.no_grad()
def _pack(
    model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh
) -> tuple[dict[str, dict[Any, Tensor]], dict[str, Any]]:
    """What this rank writes, and what rank 0 writes besides."""
    contents = _contents(model)
    part: dict[str, dict[Any, Tensor]] = {"weights": {}, "state": {}}
    others = {}
    for name, value in contents.items():
        if isinstance(value, DTensor):
            part["weights"][name] = value.to_local().cpu()
        else:
            others[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    packed = optimizer.state_dict()
    common = _Common(
        parts=mesh.size(),
        shapes=_shapes(contents),
        others=others,
        groups=_groups(model, optimizer),
        optimizer={key: value for key, value in packed.items() if key != "state"},
        rows={},
        replicas={},
        plain={},
    )
    for number, entries in packed["state"].items():
        for key, value in entries.items():
            entry = number, key
            if not isinstance(value, DTensor):
                common.plain[entry] = value
            elif value.placements == (Shard(0),):
                common.rows[entry] = tuple(value.shape)
                part["state"][entry] = value.to_local().cpu()
            else:
                common.replicas[entry] = value.full_tensor().cpu()
    return part, common._asdict()


class _Parts:
    """The parts that the ranks have written, from which rows are read as they are needed."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.open: dict[int, dict[str, dict[Any, Tensor]]] = {}

    def read(self, kind: str, key: Any, into: Tensor, total: int, start: int) -> None:
        stop = start + len(into)
        for index in range(self.count):
            first, last = _rows(total, self.count, index)
            low, high = max(first, start), min(last, stop)
            if low < high:
                rows = self._part(index)[kind][key][low - first : high - first]
                into[low - start : high - start].copy_(rows)

    def _part(self, index: int) -> dict[str, dict[Any, Tensor]]:
        # Memory-mapped: of a file that is opened, only what is used is read.
        if index not in self.open:
            path = self.folder / _part_name(index)
            self.open[index] = torch.load(path, map_location="cpu", mmap=True)
        return self.open[index]


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> int:
    mesh = _mesh(model)
    folder = Path(folder)
    step = _newest(folder, mesh)
    if not step:
        raise ValueError(f"there is no checkpoint in {folder}")
    here = folder / f"step-{step}"
    # The optimizer's groups may hold any object; the job has written the file itself.
    common = _together(
        mesh,
        f"reading {here}",
        lambda: _Common(**torch.load(here / _COMMON, map_location="cpu", weights_only=False)),
    )
    contents = _contents(model)
    difference = _difference(common.shapes, _shapes(contents))
    if difference is None and common.groups != _groups(model, optimizer):
        difference = "the optimizer's groups hold other parameters"
    if difference is not None:
        raise ValueError(f"{here} is of another model: {difference}")

    parts = _Parts(here, common.parts)
    _drop_gradients(model)
    _together(mesh, f"reading {here}", lambda: _read_weights(model, contents, common, parts, mesh))
    _together(mesh, f"reading {here}", lambda: _read_state(optimizer, common, parts, mesh))
    return step


@torch.no_grad()
def _read_weights(
    model: nn.Module,
    contents: Mapping[str, Any],
    common: _Common,
    parts: _Parts,
    mesh: DeviceMesh,
) -> None:
    for name, value in contents.items():
        if isinstance(value, DTensor):
            start, _ = _own_rows(len(value), mesh)
            parts.read("weights", name, value.to_local(), len(value), start)
    _set_others(model, contents, common.others)


def _set_others(model: nn.Module, contents: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Set what is no parameter: buffers in place, extra state by the modules that have it."""
    extra = {}
    for name, value in others.items():
        if isinstance(contents[name], Tensor):
            contents[name].copy_(value)
        else:
            extra[name] = value
    if extra:
        model.load_state_dict(extra, strict=False)


def _read_state(optimizer: Optimizer, common: _Common, parts: _Parts, mesh: DeviceMesh) -> None:
    optimizer.state.clear()  # so that there are no two at once
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for (number, key), value in common.plain.items():
        state.setdefault(number, {})[key] = value
    for (number, key), value in common.replicas.items():
        local = value.to(_device(mesh))
        state.setdefault(number, {})[key] = DTensor.from_local(local, mesh, (Replicate(),))
    for (number, key), shape in common.rows.items():
        start, stop = _own_rows(shape[0], mesh)
        like = parameters[number]
        local = torch.empty(stop - start, *shape[1:], dtype=like.dtype, device=like.device)
        parts.read("state", (number, key), local, shape[0], start)
        state.setdefault(number, {})[key] = _sharded(local, mesh, shape)
    optimizer.load_state_dict({**common.optimizer, "state": state})


def save_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    mesh = _mesh(model)
    path = Path(path)
    first = mesh.get_group().rank() == 0
    contents = _contents(model)
    whole: dict[DTensor, Tensor | None] = {}  # what is tied is gathered once
    for name, value in contents.items():
        if isinstance(value, DTensor):
            if value not in whole:
                whole[value] = _gather_to_first(value, mesh)
            contents[name] = whole[value]
        elif isinstance(value, Tensor):
            contents[name] = value.detach().cpu()

    def write() -> None:
        if not first:
            return
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            _write(unfinished, contents)
            os.replace(unfinished, path)
            _sync_folder(path.parent)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    _together(mesh, f"saving {path}", write)


@torch.no_grad()
def _gather_to_first(parameter: DTensor, mesh: DeviceMesh) -> Tensor | None:
    """The whole parameter, on rank 0's host; the other ranks send their rows, and get None."""
    group = mesh.get_group()
    ranks, total, rest = group.size(), len(parameter), parameter.shape[1:]
    _, run = _rows(total, ranks, 0)
    local = parameter.to_local()
    padded = local.new_zeros(run, *rest)
    padded[: len(local)] = local
    if group.rank() != 0:
        dist.gather(padded, group=group, group_dst=0)
        return None
    rows = local.new_empty(ranks * run, *rest)
    dist.gather(padded, list(rows.view(ranks, run, *rest)), group=group, group_dst=0)
    return rows[:total].cpu().clone()  # without the padding, which would go into the file


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    mesh = _mesh(model)
    # Memory-mapped where the format allows it: only the rows that are used are read.
    saved = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    contents = _contents(model)
    difference = _difference(_shapes(saved), _shapes(contents))
    if difference is not None:
        raise ValueError(f"{os.fspath(path)} is of another model: {difference}")
    with torch.no_grad():
        for name, value in contents.items():
            if isinstance(value, DTensor):
                start, stop = _own_rows(len(value), mesh)
                value.to_local().copy_(saved[name][start:stop])
        others = {n: saved[n] for n, value in contents.items() if not isinstance(value, DTensor)}
        _set_others(model, contents, others)
