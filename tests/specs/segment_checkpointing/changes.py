"""What a function may change although a contract leaves such things alone."""

# `function` does, and is refused for it.
CHANGES = {"checkpoint": ("data",)}
