"""What a function may change although the contract says `untouched`."""

# `function` changes its argument in place, and is refused.
CHANGES = {"checkpoint": ("data",)}
