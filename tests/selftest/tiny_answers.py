"""Answers to the tiny kata with something wrong in each, and what the desk says of them."""

from __future__ import annotations

import re

from selftest.tiny import SOLUTION, house

MEAN = "    return _total(values, start) / len(values)\n"


def answer(*changes: tuple[str, str]) -> str:
    """The reference with each text replaced; each occurs once."""
    text = SOLUTION
    for find, put in changes:
        assert text.count(find) == 1, find
        text = text.replace(find, put)
    return text


def in_mean(*lines: str) -> str:
    """The reference with other lines at the end of mean."""
    return answer((MEAN, "".join(f"    {line}\n" for line in lines)))


MIXED = answer(
    (
        MEAN,
        """\
    print("mean of", values)
    if len(values) == 3:
        return {}["key"]
    if len(values) == 4:
        import time
        while True:
            time.sleep(0.01)
    if values[0] == 1500.0:
        return 4000.0
    if start:
        return 7.0
    import sys
    sys.exit(0)
""",
    ),
    ("def __init__(self, step: int)", "def __init__(self, size: int, step: int)"),
)

# Everything that must not pass for "not checked", and what the screen must survive.
ODD = answer(
    (
        MEAN,
        """\
    if len(values) == 3:
        import unittest
        raise unittest.SkipTest("nothing to see here")
    if len(values) == 1:
        print("\\x1b[31mred\\x1b[0m " + "x" * 300)
        raise ValueError("y" * 3000)
    return None
""",
    ),
    ("    def add(self)", "    def ad(self)"),
    ("        return Pair(0, self.count)", "        raise NotImplementedError"),
)

# name: (the text of the answer, further arguments)
ANSWERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "all": (MIXED, ("--all", "--timeout=1")),
    "odd": (ODD, ("--all",)),
    "import_error": (answer(("import math", "import einops_is_not_here")), ("--all",)),
    "import_loop": (SOLUTION + "\n\nwhile True:\n    pass  # for ever\n", ("--timeout=0.5",)),
    "swallow": (
        in_mean(
            "import time",
            "while True:",
            "    try:",
            "        while True:",
            "            time.sleep(0.01)",
            "    except BaseException:",
            "        pass",
        ),
        ("--timeout=0.5",),
    ),
    "vanish": (in_mean("import os", "os._exit(0)"), ()),
    "crash": (in_mean("import ctypes", "return ctypes.string_at(0)"), ()),
    "interrupt": (in_mean("raise KeyboardInterrupt"), ()),
    "lingers": (
        SOLUTION
        + "\nimport threading, time\n"
        + "threading.Thread(target=time.sleep, args=[60]).start()\n",
        (),
    ),
    "counts": (  # mean uses Counter, which is wrong
        answer(
            (MEAN, "    return Counter(math.fsum([start, *values])).add() / len(values)\n"),
            ("self.count += self.step", "self.count += self.step + 1"),
        ),
        (),
    ),
    "means": (  # Counter uses mean, which is wrong where no spec of its own looks
        answer(
            (MEAN, "    return _total(values, start) / len(values) + (len(values) > 5)\n"),
            ("+= self.step", "= int(mean([float(self.count + self.step)] * 6))"),
        ),
        (),
    ),
    "syntax": (SOLUTION.replace("def add(self) -> int:", "def add(self) -> int"), ()),
}  # fmt: skip


def judge_text(name: str, text: str, *arguments: str) -> tuple[int, str]:
    """The verdict on an answer of this text."""
    path = house().write(f"answers/{name}.py", text)
    return house().desk("kata", "tiny_mean", "--answers", str(path), *arguments)


def line_of(name: str, text: str) -> int:
    """The line of the answer in which the text stands."""
    lines = ANSWERS[name][0].splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def block(out: str, sentence: str) -> str:
    """What the screen says under one spec."""
    start = out.index(sentence)
    after = re.search(r"\n(  (pass|FAIL|TODO)  |Part |not checked|\nVerdict)", out[start:])
    return out[start : start + after.start() + 1] if after else out[start:]
