"""What a function may change although the contract leaves it untouched: here nothing."""

CHANGES: dict[str, tuple[str, ...]] = {}
ON_RANKS, MAY_DRAW = True, True
