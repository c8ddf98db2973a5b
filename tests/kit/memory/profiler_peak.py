"""An independent check of the ruler: what the CPU allocator itself reports to the profiler."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from kit.private_torch import MEMORY_EVENT, DispatchMode, profiler_events


class AllocatorPeaks(NamedTuple):
    """The most bytes that a step held on the CPU above what was alive before it.

    at_any_time        with what a kernel allocates and frees inside one operator, which is another
                       amount for another processor
    between_operators  without: what is alive whenever no operator runs
    """

    at_any_time: int
    between_operators: int


def allocator_peaks(step: Callable[[], object], *, unit: int = 1) -> AllocatorPeaks:
    """Run `step` once and read the CPU allocator; each allocation counts in whole units of bytes.

    The profiler records each allocation and each free. It does not record the free of memory that
    is older than the step, so a step that frees such memory is reported too high. Raises what the
    step raises.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, _Marks():
        step()
    events = profiler_events(prof)
    operators = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() == _Marks.NAME
    )
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == MEMORY_EVENT and event.device_type().name == "CPU"
    ]
    changes.sort(key=itemgetter(0))
    level = at_any_time = between = 0
    for number, (moment, nbytes) in enumerate(changes):
        whole_units = -(-abs(nbytes) // unit) * unit
        level += whole_units if nbytes > 0 else -whole_units
        at_any_time = max(at_any_time, level)
        # Inside an operator only its last change counts: what it leaves behind.
        following = changes[number + 1][0] if number + 1 < len(changes) else None
        if following is None or following > _end_of_operator(operators, moment):
            between = max(between, level)
    return AllocatorPeaks(at_any_time, between)


def _end_of_operator(operators: list[tuple[int, int]], moment: int) -> int:
    """The end of the operator that ran at that moment; the moment itself if none did."""
    place = bisect(operators, (moment, moment)) - 1
    return max(moment, operators[place][1]) if place >= 0 else moment


class _Marks(DispatchMode):
    """Has the profiler note when each operator below autograd begins and ends."""

    NAME = "an operator"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with record_function(self.NAME):
            return func(*args, **(kwargs or {}))
