"""What a function may change after all: the step that is measured changes what it wants."""

CHANGES = {"peak_memory": ("data",)}
