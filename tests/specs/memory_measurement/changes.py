"""What a function may change after all: the step and the forward pass do what they want."""

CHANGES = {"peak_memory": ("data",), "saved_bytes": ("grad mode", "training")}
