"""The largest batch that fits, found by trying: doubling, then bisection. Made to be copied."""

from __future__ import annotations

from collections.abc import Callable


def largest_batch(fits: Callable[[int], bool], most: int = 2**20) -> int:
    """The largest batch for which `fits` is true, up to `most`; 0 if not even one sample fits.

    Doubles until a batch fails, then halves the gap: about 2 log2(answer) tries. `fits` must be
    true up to some batch and false beyond it. On cuda it may be

        >>> def fits(batch: int) -> bool:
        ...     try:
        ...         train_step(model, make_batch(batch), optimizer)
        ...         torch.cuda.synchronize()
        ...     except torch.OutOfMemoryError:
        ...         fitted = False
        ...     else:
        ...         fitted = True
        ...     optimizer.zero_grad()
        ...     gc.collect()
        ...     torch.cuda.empty_cache()
        ...     return fitted
        >>> largest_batch(fits)

    What is easily got wrong there:

    1. A whole step is tried, with the optimizer's: a forward pass alone does not reach the peak,
       and Adam makes its state, twice the weights, in the first step.
    2. Clean up after `except`, not in it: the traceback there still holds the step's tensors.
    3. Leave some room in practice: other shapes and a fragmented allocator need more.
    4. A batch that fitted was a step of training. Start afresh after the search.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most}")
    good, bad = 0, most + 1  # what fitted, and what did not or must not be tried
    size = 1
    while size < bad:
        if fits(size):
            good, size = size, min(2 * size, most) if size < most else bad
        else:
            bad = size
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
