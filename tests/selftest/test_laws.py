"""The laws themselves: suspects, what is left untouched, scenarios."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import math
import os
import random
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn

from kit.answers.settings import SETTINGS
from kit.catalog import all_katas
from kit.laws import checks, untouched
from kit.laws.bars import bar
from kit.laws.checks import ERRORS, UNTOUCHED, SpecFailure, check_bar, check_close, check_equal
from kit.laws.endings import check_ending
from kit.laws.failures import FAILURES, failing, folders_apart
from kit.laws.law import Law
from kit.laws.rules import ROOTS, root_followed
from kit.laws.scenarios import scenarios
from kit.laws.scripts import play
from kit.laws.sequences import for_all

T = torch.tensor


@pytest.mark.parametrize(
    "check",
    [
        lambda s: check_equal(3, 4, "x", cause="a guess", suspects=s),
        lambda s: check_close(3.0, 4.0, "x", cause="a guess", suspects=s),
        lambda s: check_bar("x", 3, 2, formula="f", cause="a guess", suspects=s),
    ],
)
def test_a_suspect_that_fits_is_the_cause_and_any_other_is_a_guess(check):
    with pytest.raises(SpecFailure) as sure:
        check({"five": 5, "three": 3})
    assert (sure.value.cause, sure.value.sure) == ("three", True)
    assert "cause" in str(sure.value)
    with pytest.raises(SpecFailure) as perhaps:
        check({"five": 5})
    assert (perhaps.value.cause, perhaps.value.sure) == ("a guess", False)
    assert "perhaps   a guess" in str(perhaps.value)


def test_a_suspect_may_be_of_any_dtype():
    with pytest.raises(SpecFailure, match="cause     flipped"):
        check_close(T([True]), T([False]), "x", cause="", suspects={"flipped": T([True])})


def test_of_suspects_that_fit_within_the_tolerance_the_nearest_is_the_cause():
    suspects = {"by chance": 4.00001, "it": 4.0, "far": 5.0}
    with pytest.raises(SpecFailure) as caught:
        check_close(4.0, 3.0, "x", cause="a guess", suspects=suspects)
    assert (caught.value.cause, caught.value.sure) == ("it", True)


def test_of_a_dict_the_part_that_differs_is_shown():
    got, want = {"a": {"x": T([1.0, 2.0])}}, {"a": {"x": T([1.0, 3.0])}}
    with pytest.raises(SpecFailure, match=r"x of a of state = \[1, 3\]"):
        check_equal(got, want, "state", cause="")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, ["state empty", "with 'more' besides"]),
        (2, ["state with 'n0', 'n1'", "without 'n0'; with 'more' besides"]),
        (9, ["state with its 9 names", "without 'n0'; with 'more' besides"]),
    ],
)
def test_of_many_names_those_that_differ_are_shown(count, words):
    want = {f"n{number}": number for number in range(count)}
    got = {name: number for name, number in want.items() if number} | {"more": 3}
    with pytest.raises(SpecFailure) as caught:
        check_equal(got, want, "state", cause="")
    assert [caught.value.expected, caught.value.got] == words


def test_the_shortest_sequence_that_fails_is_the_one_that_is_shown():
    def check(numbers: list[int]) -> None:
        check_equal(sum(n > 7 for n in numbers), 0, f"numbers above 7 in {numbers}", cause="")

    with pytest.raises(SpecFailure, match=r"in \[8\]"):
        for_all(lambda st: st.lists(st.integers(0, 100)), check)


def _answer(function) -> ModuleType:
    module = ModuleType("answer")
    function.__module__ = "answer"
    module.f = module.of_its_own = function
    untouched.watch(module, ["f"], {}, drawing=False)
    return module


def _in_tf32() -> None:
    torch.set_float32_matmul_precision("high")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # then torch cannot say how it is
        torch.backends.cuda.matmul.fp32_precision = "ieee"


CULPRITS = {
    "autocast on cpu": lambda model, x: torch.set_autocast_enabled("cpu", True),
    "autocast dtype on cpu": lambda model, x: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast cache": lambda model, x: torch.set_autocast_cache_enabled(False),
    "autocast blocks around": lambda model, x: torch.autocast_increment_nesting(),
    "grad mode": lambda model, x: torch.set_grad_enabled(False),
    "number of threads": lambda model, x: torch.set_num_threads(2),
    "backends.cudnn.benchmark": lambda model, x: setattr(torch.backends.cudnn, "benchmark", True),
    "precision of matrix products": lambda model, x: _in_tf32(),
    "flash attention": lambda model, x: torch.backends.cuda.enable_flash_sdp(False),
    "default dtype": lambda model, x: torch.set_default_dtype(torch.float64),
    "hooks on saved tensors": lambda model, x: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    ).__enter__(),
    "garbage collector": lambda model, x: gc.disable(),
    "random state of Python": lambda model, x: random.random(),
    "random state of torch": lambda model, x: nn.Dropout()(x),
    "training flags": lambda model, x: model[1].eval(),
    "hooks of modules": lambda model, x: model[0].register_forward_hook(lambda *_: None),
    "hooks of parameters": lambda model, x: model[0].weight.register_hook(lambda grad: None),
    "attributes of modules": lambda model, x: setattr(model[0], "mine", 1),
    "requires_grad of parameters": lambda model, x: model[0].weight.requires_grad_(False),
    "data of a tensor of shape (2,)": lambda model, x: x.add_(1),
}


@pytest.mark.parametrize("observable", CULPRITS)
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_what_a_call_must_leave_untouched_is_watched(observable, raises):
    def f(model: nn.Module, data: list[torch.Tensor]) -> None:
        CULPRITS[observable](model, data[0])
        if raises:
            raise KeyError("mine")

    before = {name: setting.read() for name, setting in SETTINGS.items()}
    try:
        with pytest.raises(SpecFailure) as failure:
            _answer(f).f(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), [torch.ones(2)])
    finally:
        gc.enable()
    assert {name: setting.read() for name, setting in SETTINGS.items()} == before
    assert failure.value.expected.startswith(f"{observable} as before ")
    assert ("KeyError in f()" in failure.value.expected) is raises
    assert failure.value.clause == UNTOUCHED


def test_a_function_that_the_contract_has_not_is_the_answers_own_business():
    _answer(lambda model: model.eval()).of_its_own(nn.Linear(2, 2))


ATTRIBUTES = {
    "something is left on the object: Sequential.other, 0.mine": (
        lambda model: (setattr(model[0], "mine", 1), setattr(model, "other", 2))
    ),
    "something is removed from the object: 0.scale": lambda model: delattr(model[0], "scale"),
    "something on the object is replaced: 0.scale": lambda model: setattr(model[0], "scale", abs),
    "something is left on the object: 0.mine; something is removed from the object: 0.scale": (
        lambda model: setattr(model[0], "mine", vars(model[0]).pop("scale"))
    ),
}


@pytest.mark.parametrize("cause", ATTRIBUTES)
def test_what_becomes_of_attributes_is_said_with_their_names(cause):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].scale = math.sqrt
    with pytest.raises(SpecFailure) as failure:
        _answer(lambda model: ATTRIBUTES[cause](model)).f(model)
    assert failure.value.cause == cause
    assert ("0.scale" in failure.value.got) is ("replaced" in cause)


def test_a_call_that_leaves_all_as_it_was_passes_and_keeps_nothing_alive():
    gone = []

    def f(data: list[torch.Tensor], model: nn.Module) -> int:
        data.clear()
        model._calls = 1  # a note of its own
        gc.collect()
        gone.append(there() is None)
        return 3

    tensor = torch.ones(3)
    there = weakref.ref(tensor)
    data = [tensor]
    del tensor
    assert _answer(f).f(data, nn.ReLU()) == 3
    assert gone == [True]


def test_an_error_that_is_kept_is_noticed_and_a_cycle_is_not():
    kept = []

    def keeps(function):
        try:
            function()
        except KeyError as error:
            kept.append(error)
            raise

    def names(function):
        try:
            function()
        except KeyError as error:
            mine = error  # its traceback has this frame: a cycle, until the collector comes
            assert mine
            raise

    check_ending(names, "error", lambda: None)
    with pytest.raises(SpecFailure, match="still alive") as failure:
        check_ending(keeps, "error", lambda: None)
    assert failure.value.sure


@scenarios("grad mode")
def sees(answer, device, name, want, call):
    return call(), want


class Worlds:
    @sees("a guess")
    def spec(self):
        with torch.no_grad():
            yield "the caller's no_grad", False, torch.is_grad_enabled
            yield "one that is broken", True, torch.is_grad_enabled
            yield "where things lie", torch.device("meta"), lambda: torch.ones(2).device


def test_what_a_spec_yields_is_tried_in_what_is_in_force_there():
    assert [*inspect.signature(Worlds.spec).parameters] == ["self", "answer", "device"]
    with pytest.raises(
        SpecFailure,
        match=r"grad mode = True\n.*\n  scenario  one that is broken .1 of 3 scenarios.",
    ):
        Worlds().spec(None, torch.device("meta"))
    assert torch.is_grad_enabled()


class Passes:
    @sees("a guess")
    def spec(self):
        yield "one that works", True, lambda: True
        yield "no graph", True, lambda: torch.ones(1).sum().backward()
        yield "one that works too", True, lambda: True


def test_an_error_of_a_backward_pass_is_seen_like_a_value():
    words = r"no error in the backward pass\n  got       RuntimeError: element 0 of tensors"
    with pytest.raises(SpecFailure, match=words) as failure:
        Passes().spec(None, torch.device("cpu"))
    assert (failure.value.cause, failure.value.scenario) == (
        "a guess",
        "no graph (1 of 3 scenarios fails)",
    )


def test_what_differs_at_a_step_is_shown_before_what_differs_later():
    law = importlib.import_module("specs.gradient_accumulation.laws").EPOCH
    want = {"outcome": "returns", "_world": law.base(), "_error": None}
    want |= {"gradients at step 3": 1, "rate at step 2": 1, "weights": 1}
    found = law._differences("", {**want, "gradients at step 3": 2, "rate at step 2": 2}, want, "")
    assert [each.observable for each in found] == ["rate at step 2", "gradients at step 3"]


def _laws():
    for kata in all_katas():
        if (kata.specs / "laws.py").is_file():
            for path in kata.specs.glob("test_*.py"):
                importlib.import_module(f"specs.{kata.name}.{path.stem}")  # its specs add scenarios
            module = importlib.import_module(f"specs.{kata.name}.laws")
            for name, law in vars(module).items():
                if isinstance(law, Law):
                    yield pytest.param(law, id=f"{kata.name}.{name}")


@pytest.mark.parametrize("law", [*_laws()])
def test_each_scenario_of_a_law_has_one_spec(law):
    assert len(law.scenarios) == sum(map(len, law.groups.values())) > 0


def test_an_oracle_that_fails_by_itself_agrees_with_no_answer():
    law = copy.copy(importlib.import_module("specs.amp_loop.laws").STEP)
    law.oracle, law._right, law.scenarios = lambda w: 1 / 0, {}, {"a step": law.base}
    with pytest.raises(RuntimeError, match="an error that nobody asked for: a step"):
        law._wanted("a step", torch.device("cpu"))


@bar("bytes of nothing", "1", "a guess")
def measured(self, device):
    """A spec."""
    return (lambda module: {"answer": 3, "reference": 1}[module]), 2, 4


def test_a_bar_measures_answer_and_reference_and_asks_for_both():
    assert [*inspect.signature(measured).parameters] == ["self", "device", "answer", "reference"]
    with pytest.raises(SpecFailure, match="bytes of nothing of at most"):
        measured(None, device=None, answer="answer", reference="reference")
    bar_of_it = checks.bars.pop()
    assert (bar_of_it.yours, bar_of_it.limit, bar_of_it.reference, bar_of_it.plain) == (3, 2, 1, 4)


class Counter:
    """Counts, and refuses what is not above 0."""

    def __init__(self):
        self.total, self.one = 0, 1

    def add(self, number):
        if number == 13:
            raise RuntimeError("out of order")
        if not number > 0:
            raise ValueError(f"not {number}")
        self.total += number
        return self.total

    def seen(self):
        return {"total": self.total}


def test_a_script_tells_what_each_call_gives_and_what_is_seen_then():
    seen = play(Counter(), "add(2); add(-1.5); add(one); add(13)")
    assert seen == {
        "what comes after add(2)": 2,
        "total after add(2)": 2,
        "what comes after add(2); add(-1.5)": "ValueError, with '-1.5' in it",
        "total after add(2); add(-1.5)": 2,
        "what comes after add(2); add(-1.5); add(one)": 3,
        "total after add(2); add(-1.5); add(one)": 3,
        "what comes after add(2); add(-1.5); add(one); add(13)": "RuntimeError",
        "total after add(2); add(-1.5); add(one); add(13)": 3,
    }
    last = "what comes after add(2); add(-1.5); add(one); add(13)"
    assert str(seen[last]) == "RuntimeError: out of order"  # its words are shown, and free


def test_a_rename_from_a_folder_elsewhere_fails(tmp_path):
    source, target = tmp_path / "one" / "part", tmp_path / "other" / "run.pt"
    for path in (source, target):
        path.parent.mkdir()
        path.touch()
    with folders_apart():
        os.replace(target, target.with_name("renamed"))
        for rename in (os.replace, os.rename, type(source).replace, type(source).rename):
            with pytest.raises(OSError, match="from one disk to another"):
                rename(source, target)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_is_made_to_fail_and_its_error_must_come_out(tmp_path, failure):
    model, path = nn.Linear(20, 30), tmp_path / "run.pt"

    def save():
        torch.save(model.state_dict(), tmp_path / "part")
        os.replace(tmp_path / "part", path)

    save()
    size = path.stat().st_size
    with failing(failure, model, size):
        save()
    with (
        pytest.raises(SpecFailure, match="no error"),
        failing(failure, model, size),
        contextlib.suppress(OSError, RuntimeError, KeyboardInterrupt),
    ):
        save()
    save()
    assert [*model.state_dict()] == ["weight", "bias"]


@pytest.mark.parametrize("belief", ROOTS)
def test_the_rule_that_an_answer_follows_is_found(belief):
    def follows(n):
        return next(k for k in range(1, n + 2) if ROOTS[belief](n, k))

    assert root_followed(follows) == belief
    assert not root_followed(lambda n: -1 if n == 50 else follows(n))
    assert not root_followed(lambda n: None)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(AssertionError, "an assert checks it"), (ValueError, "the message does not say .0.")],
)
def test_why_an_input_is_not_refused_as_it_should_be_is_told(error, cause):
    def call(size):
        if error is ValueError:
            raise error("no size")
        assert size > 0, f"size {size}"

    with pytest.raises(SpecFailure, match=cause) as failure:
        checks.check_raises(lambda: call(0), ValueError, mentions=[0, "size"], when="for 0")
    assert failure.value.clause == ERRORS
