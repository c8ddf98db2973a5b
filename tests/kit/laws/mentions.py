"""What the message of an error must name: texts, and of a tuple of texts one is enough."""

from __future__ import annotations

from collections.abc import Sequence


def says(error: object, mentions: Sequence[object]) -> bool:
    """Whether the message of `error` names all."""
    return all(any(text in str(error) for text in either) for either in map(_either, mentions))


def in_words(mentions: Sequence[object]) -> str:
    """The texts, as a sentence quotes them."""
    return " and ".join(" or ".join(map(repr, either)) for either in map(_either, mentions))


def _either(mention: object) -> list[str]:
    return [*map(str, mention)] if isinstance(mention, tuple) else [str(mention)]
