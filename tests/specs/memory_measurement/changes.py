"""What a function may change after all: the step writes to tensors in `existing`."""

CHANGES = {"peak_memory": ("data",)}
