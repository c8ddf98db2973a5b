"""What differs, in words: values, whence they come, and order."""

from __future__ import annotations

import math
import re

import pytest
import torch

from kit.laws.checks import SpecFailure, check_equal
from kit.laws.differences import certain, differences, in_another_order
from kit.laws.mentions import in_words, missing
from kit.laws.trace import described

T = torch.tensor


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (T([1.0, math.nan, 3.0]), T([1.0, 2.0, 3.0]), "NaN at [1]"),
        (T([[1.0, math.inf], [math.inf, 2.0]]), torch.ones(2, 2), "infinite at [0, 1] and 1 more"),
        (torch.zeros(2), T([1.0, 2.0]), "zero everywhere"),
        (T(0.0), T(2.0), "zero"),
        (T([2.0, 4.0]), T([1.0, 2.0]), "2 x what is expected, everywhere"),
        (T([1.0, 2.0]), T([3.0, 6.0]), "1/3 x what is expected, everywhere"),
        (T([-1.0, 2.0]), T([1.0, -2.0]), "-1 x what is expected, everywhere"),
        (T(928.0), T(14.5), "64 x what is expected"),
        (T([1.0, 2.0, 4.0]), T([1.0, 2.0, 3.0]), "4 for 3 at [2]"),
        (T([1, 2]), T([1, 3]), "2 for 3 at [1]"),
        (T(1.6328125), T(1.63084), "what is expected, rounded to bfloat16"),
        (T([0.1, 1e-8]).half().float(), T([0.1, 1e-8]), "what is expected, rounded to float16"),
        (T([1.6328125, 2.0]), T([1.63084, 2.0]), "1.63281 for 1.63084 at [0]"),
        (torch.ones(2, 3), torch.ones(3), "shape (2, 3)"),
        (torch.ones(2, device="meta"), torch.ones(2), "a tensor on meta, not on cpu"),
    ],
)
def test_a_difference_is_told_in_words(got, want, words):
    assert differences(got, want).endswith(words) or words in differences(got, want).split(": ")[0]


def test_of_texts_that_mean_the_same_one_is_enough():
    mentions = ["dtype", ("float16", None, "None")]
    assert in_words(mentions) == "'dtype' and 'float16' or 'None'"
    texts = {"dtype None": [], "None": mentions[:1], "dtype 3": mentions[1:]}
    assert {text: missing(ValueError(text), mentions) for text in texts} == texts


ONE, TWO = T([1.0, 0.1]), T([2.1, 0.2])


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ({"a": ONE, "b": ONE}, "it is that of a"),
        ({"a": ONE, "b": TWO.bfloat16()}, "these are the right values, cast to torch.bfloat16"),
        ({"a": ONE, "b": TWO * 5}, "it is as it was before the call: nothing has been put there"),
        ({"a": ONE}, "all else is there, and right: these are left out"),
        ({"a": ONE, "b": TWO, "c": ONE}, "what was there before has stayed"),
        ({"a": ONE, "b": TWO, "d": ONE}, ""),
        (
            {"a": ONE, "d": TWO},
            "names are missing, and others are there: these are changed, or paired with others",
        ),
        ({"a": TWO}, ""),
        ({"a": ONE, "b": ONE * 3}, ""),
        ({"a": ONE, "b": ONE + 1j}, ""),
        ([ONE], ""),
    ],
)
def test_what_differs_says_itself_whence_it_comes(got, words):
    before = {"a": ONE, "b": TWO * 5, "c": ONE}
    with pytest.raises(SpecFailure) as caught:
        check_equal(got, {"a": ONE, "b": TWO}, "all", cause="a guess", before=before)
    assert caught.value.cause == (words or "a guess")
    assert caught.value.sure == bool(words)


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (ONE.double(), ONE, "in float64; they belong in float32"),
        (T([[1.0, 2.0]]), T([1.0, 2.0]), r"in the shape \(1, 2\), not \(2,\)"),
        (T([1.0, 2.000001]), T([1.0, 2.0]), "in the last digits only"),
        (T([1.0, 2.000001]).double(), T([1.0, 2.0]).double(), "is computed in float32"),
        (described(torch.ones(999)[3]), described(T(1.0)), "view that keeps 3996 bytes alive"),
        (
            described(T(1.0, requires_grad=True)),
            described(T(1.0)),
            "still has its graph: detach it",
        ),
        (described(T(1.000001, requires_grad=True)), described(T(1.0)), "graph: detach it"),
        (T([1.0, 2.1]), T([1.0, 2.0]), None),
        (torch.zeros(2), torch.zeros(2).double(), None),  # zeros say nothing
        (ONE, None, None),
    ],
)
def test_what_is_nearly_right_says_what_is_wrong_with_it(got, want, words):
    found = certain(got, want)
    assert found is None if words is None else re.search(words, found)


@pytest.mark.parametrize(
    ("got", "want", "what", "words"),
    [
        (None, ONE, "gradient of x", "it gets no gradient"),
        (ONE, None, "gradient of x", "there is a gradient, but it should be None"),
        (0 * ONE, None, "gradient of x", "the gradient is zeros"),
        (None, ONE, "kept gradients of x", "it was cleared, but should have been kept"),
        (ONE, None, "kept gradients of x", "it was not cleared"),
        ("the error that this scenario raises", "ValueError", "outcome", "it is refused too late"),
    ],
)
def test_a_gradient_that_is_there_or_not_there_says_what_is_wrong_with_it(got, want, what, words):
    assert certain(got, want, what).startswith(words)
    assert differences(ONE, None) == "[1, 0.1] (float32, shape (2,))"


def test_a_rounding_to_16_bits_is_a_cause():
    assert certain(TWO.half().float(), TWO) == "it is computed in float16, or rounded to it"


def test_a_factor_that_is_no_simple_number_is_told_of_tensors_only():
    assert "1.37 x" in differences(T([1.37, 2.74]), T([1.0, 2.0]))
    assert " x " not in differences(T(1.37), T(1.0))


def test_a_list_in_another_order_is_told_from_one_with_other_things():
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert in_another_order(["a batch", "a batch", two], ["a batch", two, "a batch"])
    assert in_another_order([one, two], [two, one])
    for got in ([one, two], [two, two], [two], "two, one"):
        assert not in_another_order(got, [one, two])
