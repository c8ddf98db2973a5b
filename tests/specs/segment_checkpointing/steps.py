"""How many steps a schedule needs: the closed form, and what is taken for it."""

import itertools
import math


def closed_form(layers, snapshots):
    """r * layers - C(snapshots + r, snapshots + 1), with the least r such that layers are no more
    than C(snapshots + r, r)."""
    r = 0
    while math.comb(snapshots + r, r) < layers:
        r += 1
    return r * layers - math.comb(snapshots + r, snapshots + 1)


def whole_groups(layers, snapshots):
    """Steps where the last repetition has all the layers that it may have."""
    r = next(r for r in itertools.count() if math.comb(snapshots + r, r) >= layers)
    return r * math.comb(snapshots + r, r) - math.comb(snapshots + r, snapshots + 1)


def halved(layers, snapshots):
    """Steps where a snapshot is put in the middle, and then in the middle of each half."""
    if snapshots == 1 or snapshots >= layers:
        return layers * (layers - 1) // 2 if snapshots == 1 else layers - 1
    half = layers // 2
    return half + halved(layers - half, snapshots - 1) + halved(half, snapshots)


RULES = {
    "the input of the first layer is not counted as a snapshot": lambda n, s, got: (
        got == closed_form(n, s + 1)
    ),
    "one snapshot less is used than there are": lambda n, s, got: got == closed_form(n, s - 1),
    "each layer's run with a graph is counted too": lambda n, s, got: got == closed_form(n, s) + n,
    "the last layer's run with a graph is counted too": lambda n, s, got: (
        got == closed_form(n, s) + 1
    ),
    "with a snapshot for each layer no step is counted, and the first sweep is forgotten": (
        lambda n, s, got: got == (0 if s >= n else closed_form(n, s))
    ),
    "the last repetition is counted as if it were full": lambda n, s, got: (
        got == whole_groups(n, s)
    ),
    "each layer without a snapshot is counted once, though its input is gone by then": (
        lambda n, s, got: got == n - 1 + max(0, n - 1 - s) or got == n - 1 + max(0, n - s)
    ),
    "each snapshot is put in the middle of what is left": lambda n, s, got: got == halved(n, s),
}
