"""What a function may change: the first state dict of a model registers hooks."""

CHANGES = dict.fromkeys(("save", "load", "save_whole", "load_whole"), ("hooks of modules",))
CHANGES["build"] = ("random state of torch",)  # init draws
ON_RANKS, MAY_DRAW = True, False
