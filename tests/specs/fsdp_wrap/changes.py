"""What a function may change after all: wrap makes shards of the parameters, and units."""

CHANGES = {
    "wrap": ("hooks", "attributes", "requires_grad"),
    "train_step": ("hooks of modules",),  # those for a state dict come with the first forward
}
ON_RANKS, MAY_DRAW = True, True
