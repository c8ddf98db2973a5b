"""What specs need of torch where an answer shards; a conftest.py imports it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fsdp2_runs_here(device: torch.device) -> None:
    """Skips every spec where fully_shard does not run."""
    if device.type == "cpu" and torch.__version__ < "2.7":  # compared as versions, not as text
        pytest.skip("fully_shard of torch 2.6 does not run on the cpu")
