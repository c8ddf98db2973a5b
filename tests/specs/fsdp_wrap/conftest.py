"""What the specs of fsdp_wrap need of torch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fsdp2_runs_here(device: torch.device) -> None:
    if device.type == "cpu" and torch.__version__ < "2.7":  # compared as versions, not as text
        pytest.skip("fully_shard of torch 2.6 does not run on the cpu")
