"""A right answer from the stub alone, in torch's own idioms."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


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

    model = _everywhere(make)
    errors: list[BaseException] = []

    def init_until_one_fails(module: nn.Module) -> None:
        if not errors:
            try:
                init(module)
            except BaseException as error:  # others may be gathering a tied parameter
                errors.append(error)

    def raise_first() -> None:
        for error in errors:
            raise error

    shards: dict[nn.Parameter, nn.Parameter] = {}  # by the meta parameter
    for module in model.modules():
        _init_one(module, mesh, init_until_one_fails, shards)
    _everywhere(raise_first)
    names = {name: shards[param] for name, param in model.named_parameters(remove_duplicate=False)}
    for block in reversed([m for m in model.modules() if isinstance(m, block_types)]):
        if block is not model:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.load_state_dict(names, strict=False, assign=True)  # the buffers are there
    return model, _everywhere(lambda: make_optimizer(model.parameters()))


@torch.no_grad()
def _init_one(
    module: nn.Module,
    mesh: DeviceMesh,
    init: Callable[[nn.Module], None],
    shards: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Let `init` set the module's own parameters while they are whole, and keep their shards."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty_like(buffer, device=mesh.device_type))
    metas = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for name, meta in metas.items():
        if meta not in wholes:
            if meta in shards:  # tied, and set by an earlier module
                whole = shards[meta].full_tensor()
            else:
                whole = torch.empty_like(meta, device=mesh.device_type)
            wholes[meta] = nn.Parameter(whole, meta.requires_grad)
        setattr(module, name, wholes[meta])
    init(module)
    for meta, whole in wholes.items():
        # A clone, for a view would keep the whole parameter.
        shards[meta] = nn.Parameter(_rows(whole, mesh).clone(), meta.requires_grad)
    for name, meta in metas.items():
        setattr(module, name, meta)


def _rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor that every rank has, as a shard of fully_shard. A view."""
    count = math.ceil(len(whole) / mesh.size())
    first = mesh.get_local_rank() * count
    return DTensor.from_local(
        whole.detach()[first : first + count],
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _shards(model: nn.Module) -> dict[str, DTensor]:
    """The sharded parameters by name, also after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def _everywhere(action: Callable[[], Any]) -> Any:
    """What the action returns on this rank; if it fails on any rank, every rank raises."""
    try:
        result, error = action(), None
    except BaseException as caught:
        result, error = None, caught
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, repr(error) if error else "")
    if error:
        raise error
    if any(errors):
        raise OSError(f"another rank has failed: {max(errors)}")
    return result


def _on_rank_0(action: Callable[[], Any]) -> Any:
    """What the action returns on rank 0, on every rank; if it fails, every rank raises."""
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except BaseException as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _newest(folder: Path) -> int:
    """The step of the newest complete checkpoint, to which a link points; 0 if there is none."""
    link = folder / "newest"
    return int(os.readlink(link).removeprefix("step-")) if link.is_symlink() else 0


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    folder = Path(folder)
    unfinished = folder / f"step-{step}"  # until the link points to it

    def prepare() -> None:
        if (newest := _newest(folder)) and step <= newest:
            raise ValueError(f"step {step} is not above the newest checkpoint's, {newest}")
        folder.mkdir(parents=True, exist_ok=True)
        if unfinished.exists():  # of a save that was interrupted
            shutil.rmtree(unfinished)

    _on_rank_0(prepare)
    shards = _shards(model)
    names = {param: name for name, param in shards.items()}
    values: dict[str, Any] = {f"model.{name}": v for name, v in model.state_dict().items()}
    packed = optimizer.state_dict()
    for index, param in enumerate(_params(optimizer)):
        for key, value in packed["state"].get(index, {}).items():
            values[f"optimizer.{names[param]}.{key}"] = value
    tensors = {key: v for key, v in values.items() if isinstance(v, Tensor)}
    others = {key: v for key, v in values.items() if key not in tensors}
    others["groups"] = packed["param_groups"]
    try:
        dcp.save({**tensors, "others": pickle.dumps(others)}, checkpoint_id=unfinished)
    except CheckpointException as error:  # on every rank; not an Exception
        raise RuntimeError(f"step {step} has not been saved: {error}") from error

    def point() -> None:
        aside = folder / "newest.new"
        aside.unlink(missing_ok=True)
        aside.symlink_to(unfinished.name)
        os.replace(aside, folder / "newest")

    _on_rank_0(point)  # only now is it a checkpoint


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters, by their index in its state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> int:
    folder = Path(folder)
    step: int = _on_rank_0(partial(_newest, folder))
    if not step:
        raise ValueError(f"no checkpoint in {folder}")
    checkpoint = folder / f"step-{step}"
    reader = dcp.FileSystemReader(checkpoint)
    saved = _everywhere(reader.read_metadata).state_dict_metadata
    saved = {key: v for key, v in saved.items() if isinstance(v, TensorStorageMetadata)}

    packed = {"others": b""}
    dcp.load(packed, checkpoint_id=checkpoint)
    others = pickle.loads(packed["others"])

    shards = _shards(model)
    state_dict = {f"model.{name}": v for name, v in model.state_dict().items()}
    saved_shapes = {key: v.size for key, v in saved.items() if key.startswith("model.")}
    own_shapes = {key: v.shape for key, v in state_dict.items()}
    if saved_shapes != own_shapes:
        key = min(dict(saved_shapes.items() ^ own_shapes.items()))  # a missing name is unlike None
        raise ValueError(
            f"the newest checkpoint in {folder} is of another model: {key} has shape "
            f"{saved_shapes.get(key)} there, and {own_shapes.get(key)} here (None: it is not there)"
        )

    # Read into the shards in place; the optimizer's state may not have been made yet.
    values: dict[str, Any] = {**state_dict}
    for key, meta in saved.items():
        if key.startswith("optimizer."):
            param = shards[key.removeprefix("optimizer.").rpartition(".")[0]]
            dtype = meta.properties.dtype
            values[key] = (
                torch.empty_like(param, dtype=dtype, requires_grad=False)
                if meta.size == param.shape
                else torch.empty(meta.size, dtype=dtype)
            )
    dcp.load(values, checkpoint_id=checkpoint)

    values.update(others)
    indices = {param: index for index, param in enumerate(_params(optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition(".")
            state.setdefault(indices[shards[name]], {})[entry] = value
    weights = {k.removeprefix("model."): v for k, v in values.items() if k.startswith("model.")}
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": state, "param_groups": values["groups"]})
    for param in shards.values():
        param.grad = None
    return step


@torch.no_grad()
def save_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    state = model.state_dict()
    for name, value in state.items():
        # Gathered one by one; only rank 0 keeps them.
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state[name] = whole.cpu()
        del value, whole

    def write() -> None:
        unfinished = f"{os.fspath(path)}.unfinished"
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    _on_rank_0(write)


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    mesh = next(iter(_shards(model).values())).device_mesh
    own = model.state_dict()
    # Mapped, so that a rank reads its own rows only.
    state = _everywhere(lambda: torch.load(path, map_location="cpu", mmap=True))
    for name in [*own, *state]:
        here, there = (getattr(d.get(name), "shape", None) for d in (own, state))
        if here != there:
            raise ValueError(
                f"{path} does not fit the model: {name} has shape {there} there, and {here} here "
                "(None: it is not there)"
            )
    for name, value in own.items():
        if isinstance(value, DTensor):
            state[name] = _rows(state[name], mesh)
    model.load_state_dict(state)
