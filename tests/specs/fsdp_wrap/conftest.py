"""What the specs of fsdp_wrap need of torch."""

from kit.ranks.fixtures import fsdp2_runs_here  # noqa: F401
