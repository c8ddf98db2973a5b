"""What the specs of fsdp_wrap need of torch and of ranks."""

from kit.ranks.fixtures import all_sizes, fsdp2_runs_here, worlds_meet_meanwhile  # noqa: F401
