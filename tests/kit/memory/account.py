"""Memory by kind: what the bytes of a training step are, at its peak and at any time.

    books = account(step, model=model, optimizer=optimizer)
    books.most["unsharded"]     # the most bytes of gathered parameters at any one time

What a storage is may become known late in its life, so evidence is gathered while it lives, and at
the end every storage is given one kind for all of its life: the first of these that fits.

    unsharded        parameters that FSDP2 has gathered: what `UntypedStorage.resize_` empties and
                     grows, and before or after the step what is gathered then
    shards           the model's parameters and buffers, before or after the step
    optimizer state  what `optimizer.state` holds, before or after the step
    gradients        what is or was the `grad` of a parameter, sharded or gathered; what FSDP2 reads
                     into a reduce-scatter; casts of these, and what is added to them in place
    communication    what else collective operators and FSDP2's copies around them read or write:
                     the buffers, casts of shards for an all-gather, gradients on their way back
    activations      the rest: activations, the data, and transients of the backward pass, of the
                     loss and of the optimizer (Adam with foreach has one of the shards' size)

The bytes are counted by the rules of `kit.memory.ruler`. In a dry run it is fake tensors that
count, but not those of DTensor's sharding propagation, which have the global size: it enters the
fake mode that is active already once more, and that shows.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from kit.memory.ruler import Reading, collector_paused, measurable, measure
from kit.memory.storage_log import StorageLog

KINDS = ("shards", "optimizer state", "gradients", "unsharded", "communication", "activations")


class Change(NamedTuple):
    """So many bytes more of one kind, before a point of the timeline; of old ones at point 0.

    `waits`: made in a forward pass and freed in a backward pass, as activations are.
    """

    point: int
    kind: str
    delta: int
    waits: bool


@dataclass(frozen=True)
class Account:
    """What one step did to memory, in bytes of each kind; every dict has every kind.

    reading  the whole; on cuda it is the allocator's own, and the dicts are counted beside it. Its
             baseline and peak have in them whatever else lives on the device
    before   alive before the step
    at_peak  alive when the count first was at its peak; the sum is this peak
    most     the most that was alive at any one time, for each kind at a time of its own
    after    alive after the step
    changes  all that came and went, in order
    """

    reading: Reading
    before: dict[str, int]
    at_peak: dict[str, int]
    most: dict[str, int]
    after: dict[str, int]
    changes: tuple[Change, ...] = ()

    @property
    def peak(self) -> int:
        """The most that was alive at any time, of what is the model's and the step's."""
        return sum(self.before.values()) + self.reading.above_baseline


def account(
    step: Callable[[], object],
    device: torch.device | str = "cpu",
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    known: Iterable[object] = (),
) -> Account:
    """Run `step` once and read its memory by kind. `known` and errors are those of `measure`."""
    device = measurable(device)
    gc.collect()  # what is garbage already, such as old gradients in a cycle, is not of this step
    log = StorageLog(device.type, model, optimizer, known)

    def count() -> None:
        with log.counting():
            step()

    with log.watching_gradients():
        if device.type == "cuda":
            return _add_up(log, measure(count, device))
        with collector_paused() as collect:
            count()
            collect()
            return _add_up(log)


def _add_up(log: StorageLog, reading: Reading | None = None) -> Account:
    """Give every storage its kind, and read the sums off; what is freed later is not followed."""
    log.note_owned()
    counted = log.reading()
    records = [*log.old, *(change.record for change in log.changes)]
    kinds = {record: record.kind() for record in records}
    now = Counter[str]()
    for record in log.old:
        now[kinds[record]] += record.before
    before = at_peak = most = _copy(now)
    for _, changes in groupby(log.changes, key=attrgetter("point")):
        for _, record, delta in changes:
            now[kinds[record]] += delta
        most = {kind: max(most[kind], now[kind]) for kind in KINDS}
        if sum(now.values()) > sum(at_peak.values()):
            at_peak = _copy(now)
    history = [Change(0, kinds[record], record.before, False) for record in log.old]
    for point, record, delta in log.changes:
        waits = not record.before and record.freed_in_backward and not record.made_in_backward
        history.append(Change(point, kinds[record], delta, waits))
    return Account(reading or counted, before, at_peak, most, _copy(now), tuple(history))


def _copy(counts: Mapping[str, int]) -> dict[str, int]:
    return {kind: counts[kind] for kind in KINDS}
