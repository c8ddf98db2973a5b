"""What the specs of sharded_checkpoint need of torch."""

from kit.ranks.fixtures import fsdp2_runs_here  # noqa: F401
