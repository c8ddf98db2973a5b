"""What a function may change after all: state_dict hooks come with the first state dict."""

CHANGES = dict.fromkeys(("save", "load", "save_whole", "load_whole"), ("hooks of modules",))
CHANGES["build"] = ("random state of torch",)  # init draws
ON_RANKS, MAY_DRAW = True, False
