"""How an exception becomes words, without a process around it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from desk import events, source
from desk.events import Broken, Chart, Collected, Finished, Outcome, Problem, Spec, Started
from desk.explain import Judged, explain
from desk.verdict import Job, Verdict
from desk.words import state, summary
from kit.answers.loading import load
from kit.catalog import Kata, Part
from kit.laws.checks import ERRORS, SpecFailure, in_scenario
from selftest.tiny import SOLUTION
from selftest.tiny_answers import in_mean


@pytest.fixture
def judged(tmp_path):
    """Write an answer and its reference; what explain wants to know of them."""

    def write(text: str, subject: str = "mean") -> Judged:
        path, reference = tmp_path / "mine.py", tmp_path / "reference.py"
        path.write_text(text)
        reference.write_text(SOLUTION)
        return Judged(path, reference, subject, 20.0)

    return write


def told(judged: Judged, call=lambda module: module.mean([1.0])) -> Problem:
    """What is said when the import, or the call after it, fails."""
    importing = True
    try:
        module = load(judged.path)
        importing = False
        call(module)
    except BaseException as error:
        return explain(error, dataclasses.replace(judged, importing=importing))
    raise AssertionError("nothing went wrong")


@pytest.mark.parametrize(
    ("line", "kind", "got"),
    [
        ("LIMIT = 1 / 0", "error at import", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "sys.exit()", "SystemExit: 3"),
        ("from math import sums", "import error", "ImportError: cannot import name 'sums'"),
        ("raise NotImplementedError", "error at import", "NotImplementedError: "),
    ],
)
def test_an_import_that_fails_is_told_with_its_line(judged, line, kind, got):
    problem = told(judged(f"{SOLUTION}\n{line}\n"))
    assert problem.kind == kind
    assert problem.got.startswith(got)
    assert (problem.line, problem.source) == (len(SOLUTION.splitlines()) + 2, line)
    assert problem.function == ""


def test_a_missing_name_and_a_wrong_signature_are_told_beside_the_stub(judged):
    problem = told(judged(SOLUTION.replace("def mean", "def means")))
    assert problem.kind == "missing name"
    assert problem.expected == "mean(values, *, start=0.0), as in the stub"
    assert problem.got.endswith("mine.py does not define mean, but means")
    assert problem.source.startswith("def means(")
    text = SOLUTION.replace("*, start: float = 0.0", "begin: float = 0.0")
    problem = told(judged(text), lambda module: module.mean([1.0], start=2.0))
    assert problem.kind == "wrong signature"
    assert (problem.expected, problem.got) == (
        "mean(values, *, start=0.0)",
        "mean(values, begin=0.0)",
    )
    assert problem.source.startswith("def mean(")
    text = SOLUTION.replace("def __init__(self, step: int)", "def start(self, step: int)")
    problem = told(judged(text, "Counter"), lambda module: module.Counter(3))
    assert (problem.expected, problem.got) == ("Counter(step)", "Counter()")


def test_an_error_inside_the_answer_is_told_with_its_last_line_and_what_that_called(judged):
    problem = told(judged(SOLUTION.replace("_total(values, start) /", "_total(values) /")))
    assert problem.kind == "error"
    assert "missing 1 required positional argument" in problem.got
    assert problem.function == "mean"
    text = SOLUTION.replace("math.fsum([start, *values])", "math.fsum(values, start)")
    problem = told(judged(text), lambda module: module.mean(["x"]))
    assert problem.function == "_total"
    text = SOLUTION.replace("return _total(values, start)", "return __import__('json').loads('x')")
    assert "JSONDecodeError" in told(judged(text)).got
    assert "(decoder.py), which this line has called" in told(judged(text)).cause
    called = told(judged(in_mean("import json; json.loads('[')"), "other"))
    assert called.cause.endswith("which this line has called (the spec is about other)")


def test_an_error_of_torch_is_told_with_what_it_means(judged):
    lines = ["import torch", "torch.nn.Linear(2, 1)(torch.zeros(1, 2, dtype=torch.bfloat16))"]
    problem = told(judged(in_mean(*lines)))
    assert problem.source == lines[1]
    assert "one of them was cast" in problem.cause
    lines = [
        "from contextlib import contextmanager",
        "once = contextmanager(lambda: (yield))()",
        "with once: pass",
        "once.__enter__()",
    ]
    assert "can be entered once" in told(judged(in_mean(*lines))).cause


def test_an_error_of_all_ranks_is_told_by_the_last_line_of_the_first(judged):
    trace = "Traceback (most recent call last): (RANK {0})\n  File 'x.py'\nKeyError: 'moment {0}'\n"
    words = "ranks:[1, 2]\n" + "".join(map(trace.format, (1, 2)))
    problem = told(judged(in_mean(f"raise RuntimeError({words!r})")))
    assert problem.got == "RuntimeError: KeyError: 'moment 1'"


def test_a_tensor_that_is_no_key_is_not_written_out(judged):
    problem = told(judged(in_mean("import torch", "return {}[torch.ones(3)]")))
    assert problem.got == "KeyError: tensor(...) is no key"


def test_an_assert_on_a_gpu_is_told_with_the_way_to_its_cause(judged):
    words = "CUDA error: device-side assert triggered\\nCompile with `TORCH_USE_CUDA_DSA`"
    problem = told(judged(in_mean(f'raise RuntimeError("{words}")')))
    assert problem.got == "RuntimeError: CUDA error: device-side assert triggered"
    assert "out of range" in problem.cause
    assert "nox -s kata" in problem.cause
    assert not problem.sure


def test_not_written_is_only_what_the_answer_itself_says(judged):
    assert told(judged(in_mean("raise NotImplementedError"))).kind == "not written"
    assert told(judged(in_mean("return _raise()") + _RAISE)).kind == "error"


# A NotImplementedError that comes out of code in another file, as torch has some.
_RAISE = """

_raise = eval(compile("lambda: (x for x in ()).throw(NotImplementedError())", "kernel", "eval"))
"""


def test_what_the_spec_cannot_use_is_told_with_the_definition_and_the_line_of_the_spec(judged):
    mine = judged(in_mean("return None"))
    problem = told(mine, lambda module: module.mean([1.0]).item())
    assert problem.expected == "a call of mean and a result that can be used"
    assert "'NoneType' object has no attribute 'item'" in problem.got
    assert problem.source.startswith("def mean(")
    assert problem.cause.startswith(
        "the spec has met a None, as a missing `return` or gradient leaves one"
    )
    assert "`problem = told(mine, lambda module: module.mean([1.0]).item())`" in problem.cause
    problem = told(mine, lambda module: torch.nn.Linear(2, 2)(torch.ones(1, 3)))
    assert "torch.nn.Linear(2, 2)(torch.ones(1, 3))" in problem.cause
    assert "tests/selftest/test_desk_explain.py" in problem.cause
    assert problem.cause.endswith("forward)")


def test_an_error_of_a_backward_pass_is_told_as_one(judged):
    mine = judged(in_mean("return None"))
    problem = told(mine, lambda module: torch.ones(1).sum().backward())
    assert problem.expected == "no error in the backward pass"
    assert problem.cause.startswith("what your code has returned has no graph")
    twice = torch.ones(1, requires_grad=True).exp().sum()
    twice.backward()
    assert not told(mine, lambda module: twice.backward()).sure


def test_a_call_that_a_function_besides_the_contract_cannot_take_is_told_with_it(judged):
    mine = judged(SOLUTION + "\n\ndef _own(a):\n    return a\n")
    problem = told(mine, lambda module: module._own(1.0, a=2.0))
    assert "multiple values for argument 'a'" in problem.got
    assert problem.cause == "_own is called with other arguments than it can take"
    assert problem.source == "def _own(a):"


def test_the_cause_of_an_error_leads_to_the_line(judged):
    mine = judged(in_mean("return {}[0]"))

    def call(module):
        try:
            module.mean([1.0])
        except KeyError as error:
            raise ValueError("told by the spec") from error

    assert told(mine, call).source == "return {}[0]"


@pytest.mark.parametrize(
    ("data", "kind", "got"),
    [
        (b"", "unreadable file", "the file is empty"),
        (b"x = 1\n# caf\xe9\n", "unreadable file", "byte 0xe9 in line 2"),
        (b"x = (\n", "syntax error", "SyntaxError: '(' was never closed"),
        (b"\tx = 1\n", "syntax error", "IndentationError: unexpected indent"),
        (b"x = 1\x00\n", "syntax error", ""),
        (b"return 1\n", "syntax error", "SyntaxError: 'return' outside function"),
    ],
)
def test_a_file_that_is_not_python_is_told_without_running_it(tmp_path, data, kind, got):
    path = tmp_path / "mine.py"
    path.write_bytes(data)
    problem = source.check_file(path)
    assert problem
    assert problem.kind == kind
    assert got in problem.got


def test_a_missing_file_and_a_folder_have_a_problem_and_a_file_with_warnings_has_none(tmp_path):
    missing, folder = source.check_file(tmp_path / "none.py"), source.check_file(tmp_path)
    assert missing
    assert missing.got == "there is no such file"
    assert folder
    assert folder.got == "it is a folder"
    path = tmp_path / "mine.py"
    path.write_text(SOLUTION + "\nPATTERN = '\\d'\n")
    assert source.check_file(path) is None


KATA = Kata("tiny", "Tiny", "Tiny", (Part(1, "mean", 5, "core"), Part(2, "Counter", 5, "core")))
SPEC = Spec("a", 1, "core", "mean", "works", "is so", "one", False, "mean, Returns: it")
ON_GPU = Spec("b", 2, "core", "Counter", "saves", "is so on a gpu", "", True)


def test_events_come_through_a_line_unchanged():
    problem = Problem("wrong", "1", "2", "cause", "mine.py", 3, "mean", "return 1", 4)
    chart = Chart("peak", "0.6 * plain", [("plain", 4, "4 B")])
    for event in (
        Collected([SPEC, ON_GPU]),
        Started("a"),
        Outcome("a", events.FAILED, 0.5, problem, charts=[chart], prints=["x"]),
        Outcome("a", events.PASSED),
        Broken(problem, ["x"]),
        Finished(),
    ):
        assert events.decode(events.encode(event)) == event


def test_only_a_finished_run_in_which_something_passed_is_a_pass():
    collected = Collected([SPEC, ON_GPU])
    passed, skipped = Outcome("a", events.PASSED), Outcome("b", events.SKIPPED)
    assert _verdict(collected, passed, skipped, Finished()).passed
    assert _verdict(collected, passed, Finished()).passed
    assert not _verdict(collected, passed, skipped).passed
    assert not _verdict(collected, skipped, Finished()).passed
    assert not _verdict(Collected([]), Finished()).passed
    assert not _verdict(collected, Outcome("a", events.SKIPPED), skipped, Finished()).passed
    failed = Outcome("b", events.FAILED)
    assert not _verdict(collected, passed, failed, Finished()).passed
    assert not _verdict(collected, passed, Broken(Problem("wrong", "")), Finished()).passed


def test_a_gpu_spec_is_not_checked_on_a_cpu_and_without_any_check_the_run_may_have_ended():
    todo = Outcome("a", events.TODO, problem=Problem("not written", ""))
    verdict = _verdict(Collected([SPEC, ON_GPU]), todo, Finished())
    assert state(verdict) == "part 1 of 2 is not written yet"
    assert summary(verdict).endswith("(1 not written, 1 not checked)")
    verdict.job = dataclasses.replace(verdict.job, device="cuda")
    assert summary(verdict).endswith("(1 not written, 1 not run)")
    # As on a torch that cannot run what the kata is about.
    both = (Outcome("a", events.SKIPPED), Outcome("b", events.SKIPPED))
    collected = Collected([SPEC, ON_GPU])
    assert state(_verdict(collected, *both, Finished())).endswith("nothing could be checked")
    assert state(_verdict(collected, *both)).endswith("the run did not end")


def _verdict(*seen: events.Event) -> Verdict:
    verdict = Verdict(Job(KATA, path=None))
    for event in seen:
        verdict.take(event)
    return verdict


def test_the_scenario_of_an_error_is_told_apart_from_its_words(judged):
    def call(module):
        try:
            module.mean(7)
        except TypeError as error:
            raise in_scenario(error, "a number", "a word", tried=3) from None

    problem = told(judged(SOLUTION), call)
    assert "scenario" not in problem.got
    assert problem.scenario == "a number (and 1 more of 3: a word)"


def test_a_mistake_that_is_the_cause_breaks_the_sentence_of_its_own_spec(judged):
    mine = judged(SOLUTION)
    contract = "Mean.\n\n        order  any\n        count  of all\n    "
    mine.reference.write_text(f'def mean():\n    """{contract}"""\n')
    mine = dataclasses.replace(mine, clauses={"test_a": ("mean", "order")})
    failure = SpecFailure("1", "2", "a mistake", sure=True, clause="count")
    assert explain(failure.but(home="test_a"), mine).contract == "mean, order: any"
    for home in ("", "test_of_a_part_that_is_not_judged"):
        assert explain(failure.but(home=home), mine).contract == "mean, count: of all"


def test_what_is_refused_against_the_contract_is_told_with_what_it_refuses(judged):
    mine = judged('def mean(values):\n    raise ValueError("odd")\n')
    mine.reference.write_text(
        'def mean():\n    """Mean.\n\n    Raises:\n        no values.\n    """\n'
    )
    problem = told(mine)
    assert problem.cause == "your code refuses at this line what the contract allows"
    assert problem.contract == "mean, Raises: no values."


def test_what_an_error_says_and_leaves_behind_is_a_sentence_of_the_module(judged):
    mine = judged(SOLUTION)
    mine.reference.write_text('"""Means.\n\n    errors  name the value\n"""\n')
    failure = SpecFailure("1", "2", "changed", clause=ERRORS)
    for clause in ("Raises", 3):
        told = explain(failure, dataclasses.replace(mine, clause=clause))
        assert told.contract == "mean, errors: name the value"
