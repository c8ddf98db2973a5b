"""What a function may change although a contract leaves such things alone: here nothing."""

CHANGES: dict[str, tuple[str, ...]] = {}
