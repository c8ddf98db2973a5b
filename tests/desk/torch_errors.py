"""Errors of torch in words: what they say at the end, and what they mean."""

from __future__ import annotations

from kit.laws.checks import notes_of

# What a message means, by a part of it, where the message does not say it.
_MEANINGS = {
    "_GeneratorContextManager' object has no attribute 'args'": (
        "what @contextmanager gives can be entered once: make a new one each time, or a class"
    ),
    "Invariant encountered: value was None when it should not be": (
        "a parameter of this unit is sharded already: by the caller, or as part of a unit around"
        " it, for inner units come first"
    ),
    "fully_shard has already been applied": (
        "it is a unit already: the model itself may be of a class of blocks, or a block stands at"
        " two places"
    ),
    "must have the same dtype, but got": (
        "one of them was cast, and not the other: by hand, or by an autocast of another dtype,"
        " whose cache still has its copies of weights"
    ),
}


def meaning(error: BaseException) -> str:
    """What an error means, if that is known; else nothing."""
    return next((words for part, words in _MEANINGS.items() if part in str(error)), "")


def said(error: BaseException) -> str:
    """Type, message and notes; of an error in another process, a note says which.

    Where a message has tracebacks, as one of several ranks has, the first one ends with what it is.
    A tensor that is no key would be pages of numbers.
    """
    text = str(error)
    if isinstance(error, KeyError) and "tensor(" in text:
        text = f"{text.partition('(')[0]}(...) is no key"
    if tracebacks := text.split("Traceback (most recent call last)")[1:]:
        text = tracebacks[0].strip().splitlines()[-1]
    return "\n".join([f"{type(error).__name__}: {text}", *notes_of(error).others])
