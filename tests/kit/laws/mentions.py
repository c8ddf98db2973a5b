"""What the message of an error must name: texts, and of a tuple of texts one is enough."""

from __future__ import annotations

from collections.abc import Sequence


def missing(error: object, mentions: Sequence[object]) -> list[object]:
    """What the message of `error` does not name."""
    return [m for m in mentions if not any(text in str(error) for text in _either(m))]


def in_words(mentions: Sequence[object]) -> str:
    """The texts, as a sentence quotes them."""
    return " and ".join(" or ".join(map(repr, either)) for either in map(_either, mentions))


def _either(mention: object) -> list[str]:
    texts = map(str, mention if isinstance(mention, tuple) else (mention,))
    return [*dict.fromkeys(texts)]
