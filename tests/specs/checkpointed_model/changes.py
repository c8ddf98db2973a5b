"""What functions may change after all: a block gets a forward, `function` does what it wants."""

CHANGES = {"checkpoint_blocks": ("attributes",), "recompute": ("attributes", "hooks", "data")}
