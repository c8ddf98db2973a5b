"""What is known of schedules from elsewhere: a search, the published closed form, and a reading of
the order in which layers ran. No part of it divides a chain into two, as an answer may."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

# (layers, snapshots): extra steps. Griewank and Walther, Algorithm 799: revolve, and the ends.
PUBLISHED = {
    (10, 1): 45,
    (10, 2): 20,
    (10, 3): 15,
    (10, 4): 14,
    (24, 3): 61,
    (100, 5): 316,
    (100, 10): 222,
    (10, 10): 9,
    (10, 25): 9,
    (1, 1): 0,
    (1, 4): 0,
    (100, 1): 4950,
    (100, 100): 99,
}

# Layers yet to be reversed, inputs that are kept, and the input in hand (None after a backward).
State = tuple[int, frozenset[int], int | None]


def cheapest(layers: int, snapshots: int) -> int:
    """The fewest steps forward of any sequence of actions that reverses all layers, by Dijkstra."""
    queue: list[tuple[int, int, State]] = [(0, 0, (layers, frozenset([0]), 0))]
    done: set[State] = set()
    entries = 0
    while queue:
        steps, _, state = heapq.heappop(queue)
        if state[0] == 0:
            return steps
        if state in done:
            continue
        done.add(state)
        for cost, following in _actions(state, snapshots):
            entries += 1
            heapq.heappush(queue, (steps + cost, entries, following))
    raise AssertionError("no sequence of actions reverses the layers")


def _actions(state: State, snapshots: int) -> Iterator[tuple[int, State]]:
    left, kept, hand = state
    for place in kept:
        yield 0, (left, kept, place)  # take a kept input in hand
        yield 0, (left, kept - {place}, hand)  # give one up
    if hand is None:
        return
    if len(kept) < snapshots:
        yield 0, (left, kept | {hand}, hand)  # keep the one in hand
    if hand == left - 1:
        yield 0, (left - 1, kept, None)  # backward through the layer that it belongs to
    else:
        yield 1, (left, kept, hand + 1)  # run one layer


def closed_form(layers: int, snapshots: int) -> int:
    """r * layers - C(snapshots + r, snapshots + 1), with the least r such that layers are no more
    than C(snapshots + r, r)."""
    r = 0
    while math.comb(snapshots + r, r) < layers:
        r += 1
    return r * layers - math.comb(snapshots + r, snapshots + 1)


def snapshots_needed(log: Sequence[int]) -> int:
    """How many inputs must have been kept at one time for layers to run in the order of `log`.

    The input of layer n comes from layer n - 1 if that ran just before; otherwise it was kept
    since that ran last (the first layer's: from the start). So this is the least, however the
    answer keeps them.
    """
    made = {0: -1}  # when the input of each layer was last computed
    kept: list[tuple[int, int, int]] = []  # layer, from, to
    for time, number in enumerate(log):
        if time == 0 or log[time - 1] != number - 1:
            kept.append((number, made.get(number, -1), time))
        made[number + 1] = time
    return max(
        len({number for number, start, stop in kept if start < time <= stop})
        for time in range(len(log))
    )
