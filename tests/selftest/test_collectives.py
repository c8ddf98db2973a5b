"""Which operators count as which collective call, and that none is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers its operators
import torch.distributed.tensor

from kit.private_torch import COLLECTIVES
from kit.ranks.collectives import _INPUTS, Collective, collectives, kind_of
from kit.ranks.simulated import simulated_world

# Collectives on symmetric memory, of which no kata is: to call one raises.
NOT_COUNTED = "symm_mem"

SCHEMAS = {
    schema.name: [argument.name for argument in schema.arguments]
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.partition("::")[0] in COLLECTIVES - {NOT_COUNTED}
}


def test_every_operator_of_this_torch_is_known() -> None:
    assert len(SCHEMAS) > 20
    for operator in SCHEMAS:
        kind_of(operator)


def test_the_input_of_every_collective_is_found() -> None:
    for operator, names in SCHEMAS.items():
        # the older functional ones call the newer, and are never seen themselves
        if kind_of(operator) and not operator.startswith("c10d_functional::"):
            assert set(names) & set(_INPUTS), operator


def test_an_unknown_operator_is_refused_by_name_and_does_not_run() -> None:
    for operator in ("c10d::teleport_", "_c10d_functional::teleport"):
        with pytest.raises(LookupError, match=f"{operator} .* add it to _KINDS"):
            kind_of(operator)
    x = torch.ones(2)
    with pytest.raises(LookupError, match="symm_mem::multimem_all_reduce_"), collectives() as seen:
        torch.ops.symm_mem.multimem_all_reduce_(x, "sum", "no group")
    assert seen == []


def _gather_coalesced(x: torch.Tensor, group: Any) -> None:
    dist.all_gather_coalesced([[torch.empty(2, 4)] for _ in range(4)], [x])


# The operator calls of rank 0 of 4, each with x of (2, 4).
CALLS: dict[str, tuple[Callable[..., object], list[tuple[str, int]]]] = {
    "isend": (
        lambda x, group: torch.ops._c10d_functional.isend(x, 1, 0, group),
        [("send", 8)],
    ),
    "irecv": (
        lambda x, group: torch.ops._c10d_functional.irecv(x, 1, 0, group),
        [("recv", 8)],
    ),
    "batch_isend_irecv": (
        lambda x, group: torch.ops._c10d_functional.batch_p2p_ops(
            ["isend", "irecv"], [1, 2], [0, 0], [x, x], group
        ),
        [("batch_isend_irecv", 16)],
    ),
    "autograd": (
        lambda x, group: torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 4, group),
        [("all_gather", 8)],
    ),
    "DTensor": (
        lambda x, group: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group),
        [("all_to_all", 8)],
    ),
    "all_gather_coalesced": (_gather_coalesced, [("all_gather", 8)]),
    "older functional": (
        lambda x, group: torch.ops.c10d_functional.all_reduce(x, "sum", "", [0, 1, 2, 3], 4),
        [("all_reduce", 8)],
    ),
    "no call": (
        lambda x, group: torch.ops._c10d_functional.wait_tensor(x),
        [],
    ),
}


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced.*:FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_counted_once(name: str) -> None:
    call, expected = CALLS[name]
    with simulated_world(4) as mesh:
        x, group = torch.ones(2, 4), mesh.get_group().group_name
        try:
            with collectives() as seen:
                result = call(x, group)
            parts = result if isinstance(result, (list, tuple)) else [result]
            for part in [*parts, x]:  # isend works on x itself
                if isinstance(part, torch.Tensor):  # else torch complains when the process ends
                    torch.ops._c10d_functional.wait_tensor(part)
        except AttributeError:
            pytest.skip("this torch does not have the operator")
    assert seen == [Collective(kind, numel, torch.float32) for kind, numel in expected]
