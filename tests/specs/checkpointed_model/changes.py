"""What functions may change: a block gets a forward or hooks, `function` does what it wants."""

CHANGES = {
    "checkpoint_blocks": ("attributes", "hooks of modules"),
    "recompute": ("attributes", "hooks", "data"),
}
