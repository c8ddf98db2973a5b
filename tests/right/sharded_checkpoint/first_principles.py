"""A right answer of another shape: rows kept by hand, own files for every rank, one small sum."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_T = TypeVar("_T")


def _mesh(model: nn.Module) -> DeviceMesh:
    """The mesh that `model` is sharded over."""
    _give_back(model)
    return next(model.parameters()).device_mesh


def _device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _rows(total: int, parts: int, part: int) -> tuple[int, int]:
    """The rows, from start to stop, of a part: equal runs, rounded up."""
    run = -(-total // parts)
    return min(part * run, total), min((part + 1) * run, total)


def _own_rows(total: int, mesh: DeviceMesh) -> tuple[int, int]:
    """The rows of this rank."""
    group = mesh.get_group()
    return _rows(total, group.size(), group.rank())


def _reduced(values: Sequence[int], op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> list[int]:
    """A few whole numbers, each reduced over the ranks."""
    numbers = torch.tensor(values, dtype=torch.int64, device=_device(mesh))
    dist.all_reduce(numbers, op, group=mesh.get_group())
    return numbers.tolist()


def _together(mesh: DeviceMesh, what: str, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank; where it fails on any rank, every rank raises."""
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as caught:
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
    """Reshard every unit: the model's parameters are its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Part 1


def build(
    make_model: Callable[[], nn.Module],
    mesh: DeviceMesh,
    block_types: BlockTypes,
    init: Callable[[nn.Module], None],
    make_optimizer: MakeOptimizer,
) -> tuple[nn.Module, Optimizer]:
    def make() -> nn.Module:
        with torch.device("meta"):
            return make_model()

    model = _together(mesh, "make_model", make)
    shards = _first_values(model, mesh, init)
    by_name = {name: shards.pop(parameter) for name, parameter in model.named_parameters()}
    for block in reversed([*model.modules()]):
        if isinstance(block, block_types) or block is model:
            fully_shard(block, mesh=mesh)
    shards = {parameter: by_name.pop(name) for name, parameter in model.named_parameters()}

    def with_values(tensor: Tensor) -> Tensor:
        if tensor in shards:
            return _sharded(shards.pop(tensor), mesh, tensor.shape)
        return tensor.detach()  # a buffer, or a tied parameter that has got its values

    model._apply(with_values)
    optimizer = _together(mesh, "make_optimizer", lambda: make_optimizer(model.parameters()))
    return model, optimizer


@torch.no_grad()
def _first_values(
    model: nn.Module, mesh: DeviceMesh, init: Callable[[nn.Module], None]
) -> dict[nn.Parameter, Tensor]:
    """Call `init` on every module, its own parameters unsharded, and keep our rows.

    The parameters stay on the meta device, as keys; the buffers get memory for good.
    """
    device = _device(mesh)
    shards: dict[nn.Parameter, Tensor] = {}
    errors: list[BaseException] = []
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
                module._buffers[name] = torch.empty_like(buffer, device=device)

        if not errors:  # after an error all ranks go on, to gather tied parameters together
            try:
                init(module)
            except BaseException as error:
                errors.append(error)

        for name, parameter in own.items():
            start, stop = _own_rows(len(parameter), mesh)
            shards[parameter] = module._parameters[name].detach()[start:stop].clone()
        module._parameters.update(own)

    def raise_first() -> None:
        for error in errors:
            raise error

    _together(mesh, "init", raise_first)
    return shards


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    mesh = _mesh(model)
    folder = Path(folder)
    newest = _newest(folder, mesh)
    if step <= newest:  # which is 0 where there is none
        raise ValueError(f"step is {step}: it must be above the newest, {newest}")
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
            for kind, key in part:
                name = _part_name(mesh.get_group().rank(), kind, key)
                _write(unfinished / name, part[kind, key])
            if first:
                _write(unfinished / _COMMON, common)

        _together(mesh, what, write)
        _together(mesh, what, finish)
    except BaseException:
        _together(mesh, what, clean)
        raise


# A checkpoint is a folder `step-<number>`, in which every rank writes its rows of each weight and
# state, a file for each, and rank 0 what all have in common. The folder has another name until
# every rank has written: one with the right name is complete.
_UNFINISHED = "unfinished"
_COMMON = "common.pt"


def _part_name(rank: int, kind: str, key: Any) -> str:
    return f"rank-{rank}-{kind}-{quote(str(key), safe='')}.pt"


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
    """Write the names in the folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _contents(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict: shards and persistent buffers, to be written into."""
    _give_back(model)
    return model.state_dict(keep_vars=True)


def _shapes(contents: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in contents.items()}


def _difference(
    saved: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]
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
    """What rank 0 writes. An entry of optimizer state is (number of the parameter, key)."""

    parts: int
    shapes: dict[str, tuple[int, ...]]  # of all that the model's state dict has
    others: dict[str, Tensor]  # what is no parameter
    groups: list[list[str]]
    optimizer: dict[str, Any]  # its state dict without the state
    rows: dict[tuple[int, str], tuple[int, ...]]  # entries in the parts: the whole shape
    plain: dict[tuple[int, str], Any]  # all other entries


@torch.no_grad()
def _pack(
    model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh
) -> tuple[dict[tuple[str, Any], Tensor], dict[str, Any]]:
    """What this rank writes, and what rank 0 writes besides."""
    contents = _contents(model)
    part: dict[tuple[str, Any], Tensor] = {}
    others = {}
    for name, value in contents.items():
        if isinstance(value, DTensor):
            part["weights", name] = value.to_local().cpu()
        else:
            others[name] = value.detach().cpu()
    packed = optimizer.state_dict()
    common = _Common(
        parts=mesh.size(),
        shapes=_shapes(contents),
        others=others,
        groups=_groups(model, optimizer),
        optimizer={key: value for key, value in packed.items() if key != "state"},
        rows={},
        plain={},
    )
    for number, entries in packed["state"].items():
        for key, value in entries.items():
            entry = number, key
            if not isinstance(value, DTensor):
                common.plain[entry] = value
            else:
                common.rows[entry] = tuple(value.shape)
                part["state", entry] = value.to_local().cpu()
    return part, common._asdict()


class _Parts:
    """The parts that the ranks wrote; rows are read when needed."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count

    def read(self, kind: str, key: Any, into: Tensor, total: int, start: int) -> None:
        stop = start + len(into)
        for index in range(self.count):
            first, last = _rows(total, self.count, index)
            low, high = max(first, start), min(last, stop)
            if low < high:
                # Memory-mapped: only the rows that are used are read.
                path = self.folder / _part_name(index, kind, key)
                rows = torch.load(path, map_location="cpu", mmap=True)[low - first : high - first]
                into[low - start : high - start].copy_(rows)


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
    model.zero_grad()
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
        else:
            value.copy_(common.others[name])


def _read_state(optimizer: Optimizer, common: _Common, parts: _Parts, mesh: DeviceMesh) -> None:
    optimizer.state.clear()  # so that there are no two at once
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for (number, key), value in common.plain.items():
        state.setdefault(number, {})[key] = value
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
    contents: dict[str, Any] = {}
    for name, value in _contents(model).items():
        if isinstance(value, DTensor):
            contents[name] = _gather_to_first(value, mesh)
        else:
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
    return rows[:total].cpu()


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    mesh = _mesh(model)
    # Memory-mapped: only the rows that are used are read.
    saved = _together(
        mesh,
        f"reading {path}",
        lambda: torch.load(path, map_location="cpu", mmap=True, weights_only=True),
    )
    contents = _contents(model)
    difference = _difference(_shapes(saved), _shapes(contents))
    if difference is not None:
        raise ValueError(f"{os.fspath(path)} is of another model: {difference}")
    with torch.no_grad():
        for name, value in contents.items():
            if isinstance(value, DTensor):
                start, stop = _own_rows(len(value), mesh)
                value.to_local().copy_(saved[name][start:stop])
            else:
                value.copy_(saved[name])
