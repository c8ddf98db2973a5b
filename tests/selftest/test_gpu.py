"""What is done to a GPU before it is used, as far as that can be tried without one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from kit.memory import gpu


@pytest.fixture
def flags() -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends], torch.backends.cudnn.deterministic
    yield
    for backend, value in zip(backends, before[0], strict=True):
        backend.allow_tf32 = value
    torch.backends.cudnn.deterministic = before[1]


@pytest.mark.usefixtures("flags")
def test_it_switches_tf32_off_and_warms_up_in_three_precisions() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    seen = []

    def note(device: torch.device, dtype: torch.dtype) -> None:
        seen.append((dtype, torch.backends.cuda.matmul.allow_tf32))

    with (
        mock.patch.object(gpu, "_train", note),
        mock.patch.object(gpu, "_split_blocks_exactly"),
        mock.patch.object(torch.cuda, "synchronize") as synchronize,
    ):
        gpu.prepare(torch.device("cuda"))
    assert seen == [(d, False) for d in (torch.float32, torch.bfloat16, torch.float16)]
    assert not torch.backends.cudnn.allow_tf32
    assert synchronize.called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_steps_that_warm_up_run(dtype: torch.dtype) -> None:
    gpu._train(torch.device("cpu"), dtype)


@pytest.mark.parametrize("newer", [False, True], ids=["torch_2.6", "torch_2.9"])
def test_the_allocator_is_told_by_whichever_name_torch_has(newer: bool) -> None:
    with (
        mock.patch.object(torch._C, "_accelerator_setAllocatorSettings", create=True) as new,
        mock.patch.object(torch.cuda.memory, "_set_allocator_settings") as old,
    ):
        if not newer:
            del torch._C._accelerator_setAllocatorSettings
        gpu._split_blocks_exactly()
    assert (old if not newer else new).call_args.args == ("expandable_segments:True",)
    assert not (new if not newer else old).called
