"""What the desk says of every kind of answer, in the words and lines that a candidate sees.

Each answer is a small change of the tiny kata's reference, judged by the real commands in processes
of their own.
"""

from __future__ import annotations

import os
import re
import signal
from functools import cache

import pytest

from selftest.tiny import SOLUTION, House, hears_ctrl_c, house, new_folder, wait_for
from selftest.tiny_answers import ANSWERS, block, judge_text, line_of

pytestmark = pytest.mark.timeout(300)

_OTHERS = {
    "untouched": (),
    "reference": ("--answers", "solutions"),
    "every line": ("--answers", "solutions", "-v"),
}


@cache
def seen(name: str) -> tuple[int, str]:
    """The exit code and the screen of one run, which never breaks the form of a screen."""
    if name in ANSWERS:
        text, arguments = ANSWERS[name]
        code, out = judge_text(name, text, *arguments)
    else:
        code, out = house().desk("kata", "tiny_mean", *_OTHERS[name])
    assert max(map(len, out.splitlines())) <= 100, out
    assert "\x1b" not in out
    assert "Traceback" not in out
    return code, out


def test_an_untouched_stub_is_not_written_yet():
    code, out = seen("untouched")
    assert code == 1
    assert out.startswith("Tiny mean - judging katas/tiny_mean.py on cpu\n")
    assert "TODO  works     is the sum over the count (three)" in out
    assert "not written yet: katas/tiny_mean.py:" in out
    assert "not run: 3 more specs of core part 1\n" in out
    assert "Core part 2 of 2: Counter - steps of a given size - not run (2 specs)\n" in out
    assert "Details of parts 1, 2 - not run (3 specs)\n" in out
    assert (
        "Verdict: part 1 of 2 is not written yet (1 not written, 8 not run, 1 not checked)" in out
    )
    assert "nox -s hint -- tiny_mean 1" in out


def test_the_reference_passes_and_what_passes_folds_to_a_line_but_for_the_last():
    code, out = seen("reference")
    assert code == 0
    assert out.startswith("Tiny mean - judging solutions/tiny_mean.py on cpu\n")
    folded, _, shown = out.partition("Details of part 2 of 2: Counter - steps of a given size\n")
    assert re.sub(r"\d+\.\d s", "0.1 s", folded.partition("\n\n")[2]) == (
        "Core part 1 passed: 4 specs (0.1 s)\n"
        "Core part 2 passed: 2 specs (0.1 s)\n"
        "Details of part 1 passed: 2 specs (0.1 s)\n"
    )
    assert shown.count("  pass  ") == 1
    assert "FAIL" not in out
    assert "holds few bytes" not in out
    assert "not checked (needs a CUDA GPU): 1 spec\n  - saves on a gpu" in out
    assert "Verdict: passed (9 passed, 1 not checked)" in out
    assert re.search(r"Time: +\d+\.\d s\n", out)


def test_a_function_that_makes_the_spec_of_another_fail_is_named_and_judged_next():
    code, out = seen("counts")
    assert code == 1
    found = block(out, "is the sum over the count (three)")
    assert "got       3.33333" in found
    assert "cause     Counter: with the reference's in its place, mean passes this spec" in found
    assert "contract  Counter: Counts in steps of `step`." in found
    line = line_of("counts", "class Counter")
    assert f"answers/counts.py:{line} in Counter" in found
    assert f"Next:    fix Counter in answers/counts.py:{line}\n" in out
    assert "then:    nox -s kata -- tiny_mean 2 --answers answers/counts.py\n" in out
    assert "a hint:  nox -s hint -- tiny_mean 2\n" in out


def test_a_part_that_has_passed_does_not_show_what_its_function_should_do():
    out = seen("means")[1]
    assert "Core part 1 passed" in out
    assert "cause     mean: with the reference's in its place, Counter passes this spec" in out
    assert "then:    nox -s kata -- tiny_mean --answers answers/means.py\n" in out
    assert "a hint:  nox -s hint -- tiny_mean 1\n" in out


def test_what_is_wrong_in_one_answer_is_not_blamed_in_the_next():
    """In the first `mean` fails by its Counter; in the second by itself, beside a Counter."""
    first = ANSWERS["counts"][0]
    second = first.replace("self.step + 1", "self.step * 1").replace("/ len(values)", "* 2")
    for name, text in {"first": first, "second": second}.items():
        house().write(f"{name}.py", text)
    proof = ("--answers=first.py,second.py", "-qrN", "-p", "no:randomly", "-k", "three")
    code, out = house().pytest("tests/specs/tiny_mean", *proof)
    assert code == 1
    assert out.count("with the reference's in its place") == 1
    assert "2 failed" in out


def test_a_function_is_named_that_only_the_spec_has_called():
    house().add_kata("called")
    house().write("tests/specs/called/changes.py", "CHANGES = {}\n")
    spec = house().root / "tests/specs/called/test_part1_mean.py"
    text = spec.read_text(encoding="utf-8").replace("[1.0], start=2.0", "[answer.Counter(1).add()]")
    spec.write_text(text.replace("3.0, ", "1.0, "), encoding="utf-8")
    house().write("counts.py", SOLUTION.replace("+= self.step", "+= self.step + 1"))
    house().write("texts.py", SOLUTION.replace("return self.count", "return str(self.count)"))
    for name, label in {"counts.py": "cause    ", "texts.py": "perhaps  "}.items():  # this raises
        code, out = house().desk("kata", "called", "1", "--answers", name)
        assert code == 1
        found = block(out, "starts where it is told")
        words = "Counter: with the reference's in its place, mean passes this spec"
        assert f"{label} {words}" in found, found


def test_every_spec_and_every_bar_is_shown_if_asked_and_a_bar_where_it_fails():
    out = seen("every line")[1]
    assert out.count("  pass  ") == 8
    assert "pass  works     is the sum over the count (three, one)\n" in out
    assert "Core part 1 of 2: mean - the middle of some numbers\n" in out
    held, broken = (block(text, "holds few bytes") for text in (out, seen("all")[1]))
    for text in (held, broken):
        assert re.search(r"plain +4\.00 KiB  #{44}\n", text)
        assert re.search(r"reference +1\.95 KiB  #{21}\n", text)
        assert re.search(r"limit +2\.40 KiB  #{26}\n", text)
    assert re.search(r"yours +1\.95 KiB  #{21}\n", held)
    assert re.search(r"yours +3\.91 KiB  #{43}\n", broken)
    assert "expected  peak of at most 2.40 KiB (0.6 * plain)" in broken


def test_all_goes_on_after_every_kind_of_failure_and_each_is_told_with_its_line():
    code, out = seen("all")
    assert code == 1
    assert out.count("  FAIL  ") == 8, out
    assert "Verdict: failing at part 1 of 2 (1 passed, 8 failed, 1 not checked)" in out
    assert f"Next:    fix mean in answers/all.py:{line_of('all', 'return {}')}\n" in out
    assert "then:    nox -s kata -- tiny_mean --answers answers/all.py\n" in out
    assert "a hint:  nox -s hint -- tiny_mean 1\n" in out

    def told(sentence: str, line: str, *words: str, where: str = "mean") -> None:
        text = block(out, sentence)
        assert f"at        answers/all.py:{line_of('all', line)} in {where}" in text
        for each in words:
            assert each in text

    told("is the sum over the count (three)", "return {}", "got       KeyError: 'key'")
    told("is the sum over the count (three)", "return {}", 'return {}["key"]')
    told("is the sum over the count (three)", "return {}", "printed   mean of [1.0, 2.0, 6.0]")
    told("is the sum over the count (one)", "sys.exit(0)", "got       SystemExit: 0")
    wrong = ("expected  the mean = 3.0", "got       7.0", "perhaps   start is not used")
    told("starts where it is told", "def mean", *wrong)
    signature = ("expected  Counter(step)", "got       Counter(size, step)", "missing 1 required")
    told("counts in steps", "def __init__", *signature, where="Counter.__init__")
    text = block(out, "loses no digits")
    assert "time-out: still running after 1 s" in text
    first = line_of("all", "while True")
    assert re.search(rf"at        answers/all\.py:({first}|{first + 1}) in mean", text)


def test_a_skip_fails_what_is_odd_keeps_the_form_and_what_is_not_written_is_counted_apart():
    code, out = seen("odd")
    assert code == 1
    text = block(out, "is the sum over the count (three)")
    assert "SkipTest: nothing to see here" in text
    assert "ends the spec before it has checked anything" in text
    text = block(out, "is the sum over the count (one)")
    assert "ValueError: yyy" in text
    assert text.count("\n") < 20
    assert "printed   red xxx" in text
    text = block(out, "counts in steps")
    assert "expected  Counter.add()" in text
    assert "does not define Counter.add, but Counter.ad" in text
    assert f"answers/odd.py:{line_of('odd', 'def ad(self)')}" in text
    assert "TODO  exact     knows its limits" in out
    assert "1 not written, 1 not checked" in out


@pytest.mark.parametrize(
    ("name", "kind", "words", "line"),
    [
        ("import_error", "import error", "No module named 'einops_is_not_here'", "import einops"),
        ("import_loop", "time-out", "time-out: still running after 0.5 s", "# for ever"),
        ("syntax", "syntax error", "SyntaxError: expected ':'", "def add"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_once(name, kind, words, line):
    code, out = seen(name)
    assert code == 1
    assert out.count(f"This file cannot be judged: {kind}") == 1
    assert words in out
    assert "FAIL" not in out
    assert f"Verdict: broken file: {kind}" in out
    number = line_of(name, line)
    near = f"({number - 1}|{number})" if name == "import_loop" else str(number)
    assert re.search(rf"at        answers/{name}\.py:{near}\b", out)


def test_a_syntax_error_has_a_caret_under_its_place():
    lines = seen("syntax")[1].splitlines()
    caret = next(number for number, line in enumerate(lines) if line.strip() == "^")
    assert lines[caret - 1].strip() == "def add(self) -> int"
    assert lines[caret].index("^") == len(lines[caret - 1].rstrip())


def test_a_loop_that_swallows_the_time_out_is_ended_from_outside():
    code, out = seen("swallow")
    assert code == 1
    assert "time-out: still running after 0.5 s, and it cannot be interrupted" in out
    loop = range(line_of("swallow", "while True"), line_of("swallow", "  pass") + 1)
    found = re.search(r"at        answers/swallow\.py:(\d+) in mean", out)
    assert found
    assert int(found.group(1)) in loop


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("vanish", "the process ended during this spec (exit code 0)", "def mean"),
        ("crash", "the process ended during this spec (signal 11, SIGSEGV)", "string_at"),
        ("interrupt", "KeyboardInterrupt", "raise Keyb"),
    ],
)
def test_what_ends_the_process_is_a_failure_with_its_line(name, words, line):
    code, out = seen(name)
    assert code == 1
    assert words in out
    assert f"at        answers/{name}.py:{line_of(name, line)} in mean" in out
    if name != "interrupt":
        assert "Verdict: failing at part 1 of 2: process ended" in out


def test_a_thread_left_running_does_not_hold_the_verdict():
    code, out = seen("lingers")
    assert code == 0
    assert "Verdict: passed" in out


def test_ctrl_c_leaves_nothing_behind():
    home, folder = house(), new_folder()
    # Whoever has loaded it leaves its number as a name: two may have, and one be ended in writing.
    text = f"import os\nos.mkdir(f'{folder}/pid{{os.getpid()}}')\nwhile True:\n    pass\n"
    path = home.write("answers/endless.py", text)
    temporary = folder / "tmp"
    temporary.mkdir()
    command = ("desk", "kata", "tiny_mean", "--answers", str(path))
    with hears_ctrl_c():
        process = home.start(*command, TMPDIR=str(temporary))
    wait_for(lambda: [*folder.glob("pid*")])
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 130
    assert out.endswith("Stopped; nothing was left running.\n")
    assert "Traceback" not in out
    assert not list(temporary.glob("memory-katas-*"))
    for path in folder.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("pid")), 0)


def is_the_fault_of_the_judge(code: int, out: str, words: str) -> None:
    assert code == 1
    assert "The judge itself failed; this says nothing about the answer:" in out
    assert words in out
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os; os._exit(7)\n", "the warm process could not be started"),
        ("raise OSError('no libtorch')\n", "OSError: no libtorch"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_the_fault_of_the_judge(text, words):
    home = House(new_folder())
    home.add_kata("broken")
    home.write("tests/torch.py", text)
    is_the_fault_of_the_judge(*home.run("desk", "kata", "broken"), words)


def test_a_spec_that_cannot_be_imported_is_the_fault_of_the_judge():
    house().add_kata("broken")
    house().write("tests/specs/broken/test_part1_mean.py", "1 / 0\n")
    is_the_fault_of_the_judge(*house().desk("kata", "broken"), "ZeroDivisionError")
