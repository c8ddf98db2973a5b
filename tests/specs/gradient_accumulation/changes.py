"""What a function may change although a contract leaves such things alone: here nothing."""

CHANGES: dict[str, tuple[str, ...]] = {}
ON_RANKS, MAY_DRAW = True, True
