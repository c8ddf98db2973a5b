"""The clauses of a docstring are read by their form, and its words are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.answers.contract import Contract, contract_of, functions, sentence, words

TEXT = '''\
"""A tiny kata.

Errors are ValueError unless it says otherwise.
"""


def step(model, *batches, dtype):
    """One step of a model,
    with a loss.

        autocast   on for the forward pass; 2  spaces do not matter
                   here, and off
                   for the backward pass
        two words  are a name

        >>> step(model, dtype=torch.float16)
        0.5

    Args:
        model: changed in
            place.
        *batches: pairs.
    Returns:
        the loss,
        a float.
    Raises:
        another dtype: float64.

    Details:
        1. A sentence.
        2. A sentence that goes on in the
           next line.
    """


def _private():
    """Nobody reads this."""


class Scaler:
    """Scales.

        scale  a float
    """

    def update(self):
        """Once a step."""

    def _hidden(self):
        """Nobody reads this either."""
'''


@pytest.fixture
def path(tmp_path) -> Path:
    file = tmp_path / "tiny.py"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_every_layer_is_read(path):
    assert contract_of(path, "step") == Contract(
        summary="One step of a model, with a loss.",
        laws={
            "autocast": "on for the forward pass; 2  spaces do not matter here, and off "
            "for the backward pass",
            "two words": "are a name",
        },
        args={"model": "changed in place.", "*batches": "pairs."},
        returns="the loss, a float.",
        raises="another dtype: float64.",
        details={1: "A sentence.", 2: "A sentence that goes on in the next line."},
    )


def test_classes_and_methods_have_contracts(path):
    assert contract_of(path, "Scaler").laws == {"scale": "a float"}
    assert contract_of(path, "Scaler.update").summary == "Once a step."
    assert contract_of(path, "Scaler.nothing") == Contract()
    assert functions(path) == ["step", "Scaler", "Scaler.update"]


@pytest.mark.parametrize(
    ("clause", "text"),
    [
        ("two words", "step, two words: are a name"),
        ("model", "step, model: changed in place."),
        ("Returns", "step, Returns: the loss, a float."),
        ("Raises", "step, Raises: another dtype: float64."),
        (1, "step, detail 1: A sentence."),
        (3, ""),
        ("nothing", ""),
    ],
)
def test_a_clause_is_a_sentence(path, clause, text):
    assert sentence(path, "step", clause) == text


def test_words_are_counted_without_code_and_headings(path):
    module, summary, laws = 3 + 7, 8, 11 + 3 + 4 + 5
    arguments, returns, raises, scaler = 4 + 2, 4, 3, 1 + 3 + 3
    core = module + summary + laws + arguments + returns + raises + scaler
    assert words(path) == (core, 2 + 9)
