"""What specs need of torch where an answer shards; a conftest.py imports it."""

from __future__ import annotations

import pytest
import torch

from kit.ranks.simulated import why_no_shards


@pytest.fixture(autouse=True)
def fsdp2_runs_here(device: torch.device) -> None:
    """Skips every spec where fully_shard does not run."""
    if reason := why_no_shards(device):
        pytest.skip(reason)
