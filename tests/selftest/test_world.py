"""The real world: values and errors come back from the ranks, whatever happens there."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from desk.explain import Judged, explain
from kit.answers.loading import load
from kit.laws import checks
from kit.laws.checks import Bar, SpecFailure
from kit.ranks.collectives import Collective
from kit.ranks.rank_failures import hang, is_waiting
from kit.ranks.world import World
from selftest import world_programs as programs
from selftest.tiny import House, new_folder

pytestmark = pytest.mark.timeout(120)
REDUCES = "dist.all_reduce(numbers, group=group)"


@pytest.fixture(scope="module")
def ours():
    world = World(2)
    world.start()
    yield world
    pids = world.pids
    world.close()
    assert not any(map(psutil.pid_exists, pids))


def _told(error: BaseException, answer) -> str:
    """The line of the answer that the desk shows for the error."""
    path = Path(answer.__file__)
    return explain(error, Judged(path, path, "", 20.0)).source


def test_results_come_in_rank_order_from_the_same_processes(ours, bad):
    first, second = ours.run(bad, programs.who, 1, "two"), ours.run(bad, programs.who)
    assert first == [(rank, pid, pid, (1, "two")) for rank, pid in enumerate(ours.pids)]
    assert second == [(rank, pid, pid, ()) for rank, pid in enumerate(ours.pids)]


def test_classes_of_the_answer_come_through_both_ways(ours, bad):
    results = ours.run(bad, programs.double, bad.Pair(1, 2))
    assert [pair for pair, _ in results] == [bad.Pair(2, 4)] * 2
    assert all(type(pair) is bad.Pair for pair, _ in results)
    assert [numbers.tolist() for _, numbers in results] == [[0, 0], [1, 1]]


def test_a_class_of_the_answer_that_one_rank_has_pickled_another_reads(ours, bad, tmp_path):
    """Also one of another world, which has met other answers before."""
    other, path = World(1), tmp_path / "other.py"
    path.write_text(programs.ANSWER, encoding="utf-8")
    data = ours.run(bad, programs.pickled)[0]
    other.run(load(path), programs.who)
    assert other.run(bad, programs.unpickled, data) == [bad.Pair(3, 4)]
    other.close()


def test_every_run_finds_torch_as_new(ours, bad):
    first = ours.run(bad, programs.state, True)
    assert ours.run(bad, programs.state, False) == first
    assert first[0] == first[1]
    assert first[0][:2] == (True, torch.float32)


def test_prints_come_with_their_rank(ours, bad, capsys):
    ours.run(bad, programs.speak)
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"rank {rank}: ")]
        assert mine == [f"rank {rank}: {text}" for text in ("one", f"two {rank}", "no end")]
    assert len(lines) == 6


def test_bars_of_rank_0_count(ours, bad):
    checks.bars.clear()
    ours.run(bad, programs.bar)
    assert checks.bars == [Bar("peak", 100, 200, None, None, "2 * 100")]
    checks.bars.clear()


def test_an_error_of_one_rank_is_raised_with_its_line(ours, bad):
    ours.run(bad, programs.who)
    pids = ours.pids
    with pytest.raises(ValueError, match=r"^bad 7") as caught:
        ours.run(bad, programs.on_rank_1, "value_error", 7)
    assert caught.value.__notes__ == ["on rank 1 alone"]
    problem = explain(caught.value, Judged(Path(bad.__file__), Path(), "", 20.0))
    assert problem.got == "ValueError: bad 7\non rank 1 alone"
    assert problem.cause == "your code raised it at this line"
    assert problem.source == 'raise ValueError(f"bad {rank}")'
    assert problem.function == "value_error"
    assert ours.pids == pids


def test_of_two_errors_that_of_the_lower_rank_is_raised(ours, bad):
    with pytest.raises(ValueError, match=r"^bad 0"):
        ours.run(bad, programs.value_errors)


def test_of_two_errors_one_that_the_answer_has_not_raised_itself_is_raised(ours, bad):
    with pytest.raises(OSError, match="no/such/file"):
        ours.run(bad, programs.one_tells_of_another)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("own_error", "OwnError", "this and that"),
        ("local_error", "Local", "of its own"),
        ("recursion", "RecursionError", "maximum recursion depth exceeded"),
        ("todo", "NotImplementedError", ""),
    ],
)
def test_errors_of_every_shape_come_through(ours, bad, name, kind, text):
    with pytest.raises(Exception, match=f"^{text}") as caught:
        ours.run(bad, programs.on_rank_1, name)
    assert type(caught.value).__name__ == kind
    expected = {"own_error": bad.OwnError, "local_error": ValueError}.get(name, Exception)
    assert isinstance(caught.value, expected)
    problem = explain(caught.value, Judged(Path(bad.__file__), Path(), "", 20.0))
    assert problem.function.endswith(name)
    assert (problem.kind == "not written") == (name == "todo")


@pytest.mark.parametrize(
    ("name", "line"),
    [("own_error", 'raise OwnError("this", "that")'), ("local_error", "")],
    ids=["raised", "raised, and it cannot be pickled"],
)
def test_a_spec_failure_keeps_its_texts_and_the_line_and_names_the_rank(ours, bad, name, line):
    with pytest.raises(SpecFailure) as caught:
        ours.run(bad, programs.spec_failure, name)
    error = caught.value
    assert (error.expected, error.got, error.cause) == ("two", "on rank 1: three", "miscounted")
    assert (_told(error, bad) or "") == line


def test_collectives_are_counted(ours, bad):
    first, second = ours.run(bad, programs.counts)
    twelve = Collective("all_reduce", 12, torch.float32)
    assert first == second
    assert first == {
        "no_sync": [],
        "sync": [Collective("all_reduce", 3 * 2 + 2 + 2 + 1, torch.float32)],
        "all_reduce": [twelve],
        "async": [twelve],
        "functional": [twelve],
        "all_gather": [Collective("all_gather", 12, torch.float32)],
        "broadcast": [Collective("broadcast", 12, torch.float64)],
        "reduce": [Collective("reduce", 12, torch.float32)],
        "two": [Collective("all_reduce", 3, torch.float32), Collective("barrier", 0, torch.uint8)],
        "none": [],
    }


# Each of these breaks the world; each time it has to work again, with new processes.


def _break(world: World, answer, program, *args, limit: float = 10.0) -> SpecFailure:
    with pytest.raises(SpecFailure) as caught:
        world.run(answer, program, *args, limit=limit)
    assert world.pids == []
    return caught.value


def test_an_error_counts_also_when_the_other_rank_waits(ours, bad):
    with pytest.raises(ValueError, match="bad 7"):
        ours.run(bad, programs.on_rank_1_while_0_reduces, "value_error", 7)
    assert len(ours.run(bad, programs.who)) == 2


def test_a_collective_that_the_other_rank_never_calls(ours, bad):
    error = _break(ours, bad, programs.on_rank_0, "reduce", torch.ones(2))
    line = _line(REDUCES)
    assert error.expected == "every rank comes to its end"
    assert error.got == (
        f"standstill: rank 0 waits at line {line} ({REDUCES}), rank 1 has finished"
    )
    assert "rank 0 waits in a collective call that rank 1 never makes: every" in error.cause
    assert _told(error, bad) == REDUCES


def test_of_a_rank_that_has_raised_before_the_call_that_others_wait_in_the_error_is_told():
    waits = [(dist.all_reduce.__wrapped__.__code__.co_filename, 1, "all_reduce")]
    error = hang({0: waits, 2: waits}, {1: "ValueError in mean()"}, "answer.py", 10.0)
    assert "rank 1 has finished, after ValueError in mean(), rank 2 waits" in error.got
    assert "rank 1 never makes: it has raised before that" in error.cause


def test_ranks_that_wait_for_each_other_are_told_before_the_limit(ours, bad):
    """An hour: nobody waits for it. The limit of this test is what says so."""
    error = _break(ours, bad, programs.in_two_groups, limit=3600.0)
    line = f"line {_line(REDUCES)} ({REDUCES})"
    assert error.got == f"standstill: rank 0 waits at {line}, rank 1 waits at {line}"
    assert "the ranks wait for each other in different collective calls: every" in error.cause
    assert _told(error, bad) == REDUCES


def test_a_loop_without_end_is_told_with_its_line(ours, bad):
    ours.run(bad, programs.who)
    error = _break(ours, bad, programs.on_rank_1_while_0_reduces, "endless", limit=0.5)
    assert re.search(r"rank 0 is still at .*all_reduce.*, rank 1 is still at line \d+", error.got)
    assert error.cause.startswith("a loop that does not end; rank 1 ran this line")
    assert _told(error, bad) in ("while True:", "pass")


def test_a_rank_that_dies(ours, bad):
    error = _break(ours, bad, programs.on_rank_1_while_0_reduces, "vanish")
    assert error.got == "rank 1 has ended (exit code 3)"
    assert "os._exit()" in error.cause


def test_collectives_that_do_not_fit(ours, bad):
    error = _break(ours, bad, programs.fit_badly)
    assert "SIGABRT" in error.got
    assert "do not fit" in error.cause
    assert _told(error, bad) == REDUCES


def test_a_collective_that_only_one_rank_has_begun(ours, bad):
    error = _break(ours, bad, programs.on_rank_0, "begin", torch.ones(7))
    assert error.expected == "the same collective calls in the same order on every rank"
    assert error.got == "rank 0 made 1, rank 1 made 0"


def test_a_process_group_that_is_destroyed(ours, bad):
    assert ours.run(bad, programs.destroy) == [None, None]
    assert len(ours.run(bad, programs.who)) == 2


# The desk, with a kata whose specs use the fixture.

SPECS = """\
import pytest

from kit.laws import checks
from kit.laws.checks import check_equal
from specs.worldly import ranks


class TestPart1Mean:
    '''Part 1: mean - of the ranks.'''

    subject = "mean"

    @pytest.mark.works
    def test_it_starts(self, answer):
        assert answer.mean([1.0]) == 1.0

    @pytest.mark.exact
    def test_every_rank_has_its_mean(self, answer, world):
        check_equal(world.run(answer, ranks.mean, 2), [0.0, 2.0], "the means", cause="none")

    @pytest.mark.survives
    def test_raises(self, answer, world):
        world.run(answer, ranks.mean, 3)

    @pytest.mark.survives
    def test_hangs(self, answer, world):
        world.run(answer, ranks.mean, 4, limit=0.5)

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [3], ids=["three ranks"], indirect=True)
    def test_works_in_a_larger_world(self, answer, world):
        check_equal(world.run(answer, ranks.mean, 1), [0.0, 1.0, 2.0], "means", cause="none")
"""

RANKS = """\
def mean(answer, rank, factor):
    return answer.mean([float(factor * rank)])
"""

GOES_WRONG = """\
def mean(values, *, start=0.0):
    print("mean of", values)
    if values == [3.0]:
        raise KeyError("three")
    while values == [4.0]:
        pass
    return sum(values)
"""


def test_the_desk_tells_what_happened_in_a_rank():
    home = House(new_folder())
    home.add_kata("worldly")
    (home.root / "tests/specs/worldly/test_part2_counter.py").unlink()
    home.write("tests/specs/worldly/test_part1_mean.py", SPECS)
    home.write("tests/specs/worldly/ranks.py", RANKS)
    path = home.write("answers/odd.py", GOES_WRONG)
    temporary = home.root / "tmp"
    temporary.mkdir()
    arguments = ("kata", "worldly", "--all", "--answers", str(path))
    code, out = home.run("desk", *arguments, TMPDIR=str(temporary))
    assert not list(temporary.iterdir()), "temporary files are left"
    assert code == 1
    assert "Core part 1 passed: 2 specs (" in out
    assert "pass  survives  works in a larger world (three ranks)" in out
    raised = out[out.index("FAIL  survives  raises") : out.index("FAIL  survives  hangs")]
    assert "got       KeyError: 'three'\n                  on rank 1 alone\n" in raised
    assert "cause     your code raised it at this line" in raised
    assert 'at        answers/odd.py:4 in mean\n                  raise KeyError("three")' in raised
    assert "rank 0: mean of [0.0]" in raised
    hung = out[out.index("FAIL  survives  hangs") :]
    assert "expected  every rank done within 0.5 s" in hung
    assert "got       time-out: rank 0 has finished, rank 1 is still at line" in hung
    assert "perhaps   a loop that does not end; rank 1 ran this line when the time was" in hung
    assert re.search(r"at        answers/odd\.py:[56] in mean", hung)


def _line(text: str) -> int:
    lines = programs.ANSWER.splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_collective_below_an_operator_of_torch_is_waiting_and_a_loop_of_operators_is_not():
    """DTensor.full_tensor() on one rank: the innermost frames are those that pass the call on."""
    answer, passes_on = ("answer.py", 3, "norm"), ("lib/torch/_ops.py", 865, "__call__")
    collective = ("lib/torch/distributed/_functional_collectives.py", 140, "wait_tensor")
    assert is_waiting([answer, collective, passes_on])
    assert not is_waiting([answer, passes_on])
    assert not is_waiting([])
