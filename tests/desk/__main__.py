"""`python -m desk COMMAND`, as the sessions of the noxfile call it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from desk.terminal import ctrl_c_later, interrupt
from kit import forkserver

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # the judging process must go with us
    _imports = contextlib.ExitStack()
    _imports.enter_context(ctrl_c_later())
    if sys.argv[1:2] in (["kata"], ["watch"]):
        forkserver.start()  # it imports torch while the rest is imported here

# ruff: isort: split
from desk import board, gpu, hints, kata, plan, report, reset, timeline, watch
from desk.asked import Misuse
from desk.paper import Paper


def main(arguments: list[str] | None = None, begin: Callable[[], object] = lambda: None) -> int:
    """Run one command; its exit code. 2: what was typed cannot be done; 130: Ctrl-C.

    `begin` raises the KeyboardInterrupt that has come before.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    try:
        begin()
        options = parse(arguments)
        return _run(options, report.JsonPaper() if options.json else Paper())
    except Misuse as error:
        return _say(str(error), as_json, 2)
    except KeyboardInterrupt:
        return _say("Stopped; nothing was left running.", as_json, 130)
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """What was typed, or Misuse."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command == "plan":
        raise Misuse(plan.unknown_option(rest[0]))
    if rest and options.command == "kata" and not rest[0].startswith("-"):
        raise Misuse(f"one kata, or one part of it, is judged at a time; {rest[0]!r} is too much")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _say(message: str, as_json: bool, code: int) -> int:
    if as_json:
        print(report.error(message))
    else:
        print(message if code == 2 else f"\n{message}", file=sys.stderr)
    return code


def _run(options: argparse.Namespace, paper: Paper) -> int:
    if options.command == "board":
        return board.run(paper)
    if options.command == "kata":
        wanted = kata.Wanted(
            options.name,
            options.part,
            options.answers,
            options.device,
            options.all,
            options.verbose,
            options.timeout,
            options.junitxml,
        )
        return kata.run(wanted, paper)
    if options.command == "watch":
        return watch.run(options.name, options.timeout, paper)
    if options.command == "gpu":
        return gpu.run(options.name, options.answers, options.timeout, paper)
    if options.command == "plan":
        sizes = plan.given_sizes(options)
        return plan.run(options.name, options.answers, sizes, options.timeout, paper)
    if options.command == "timeline":
        return timeline.run(options.name, options.answers, options.timeout, paper)
    if options.command == "hint":
        return hints.run(options.name, options.part, options.rung, paper)
    if bool(options.name) == options.every:
        raise Misuse("say what to reset: nox -s reset -- NAME, or --every")
    return reset.run(options.name, options.force, paper)


class _Parser(argparse.ArgumentParser):
    """One that leaves to `main` how an error is told."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise Misuse(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="desk", description="Memory Katas")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("board", help="where every kata stands, and what to do next")

    command = commands.add_parser("kata", help="judge one kata, or the one in hand")
    command.add_argument("name", nargs="?", help="a name, or a number on the board")
    command.add_argument("part", nargs="?", help="the number of one part, to judge it alone")
    command.add_argument("--all", action="store_true", help="run on after the first failure")
    command.add_argument("-v", dest="verbose", action="store_true", help="every spec, every bar")
    words = "pytest's file for CI; the path starts at the repository, where nox runs"
    command.add_argument("--junitxml", default="", metavar="FILE", help=words)
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    _add_answers(command)
    _add_timeout(command)

    command = commands.add_parser("watch", help="the verdict at each save")
    command.add_argument("name", nargs="?", help="a name, or a number on the board")
    _add_timeout(command)

    command = commands.add_parser("gpu", help="the same specs on a CUDA device")
    command.add_argument("name", nargs="?")
    _add_answers(command)
    _add_timeout(command)

    words = "a dry run: the memory that a far larger model needs"
    command = commands.add_parser("plan", help=words, allow_abbrev=False)
    command.add_argument("name", nargs="?")
    _add_answers(command)
    command.add_argument("--timeout", type=float, default=60.0, help="seconds for the plan (60)")
    plan.add_sizes(command)

    words = "live bytes through one step of an answer, drawn beside the reference's"
    command = commands.add_parser("timeline", help=words)
    command.add_argument("name", nargs="?", help="a name, or a number on the board")
    _add_answers(command)
    command.add_argument("--timeout", type=float, default=60.0, help="seconds for it all (60)")

    command = commands.add_parser("hint", help="one hint, for the part in hand or another")
    command.add_argument("name", nargs="?", help="a name, or a number on the board")
    command.add_argument("part", nargs="?", help="without it, the part in hand")
    command.add_argument("rung", nargs="?", metavar="hint", help="without it, the first")

    command = commands.add_parser("reset", help="write a fresh stub; somebody's work is kept")
    command.add_argument("name", nargs="?")
    command.add_argument("--every", action="store_true", help="the stubs of all katas")
    command.add_argument("--force", action="store_true", help="also where work would be replaced")

    for command in commands.choices.values():
        words = "one JSON document and no screen; desk/schema.py says what is in it"
        command.add_argument("--json", action="store_true", help=words)
    return parser


def _add_answers(command: argparse.ArgumentParser) -> None:
    words = "whose answer: katas (yours, the default), solutions, or the path of a file"
    command.add_argument("--answers", default="katas", help=words)


def _add_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument("--timeout", type=float, default=20.0, help="seconds for one spec (20)")


if __name__ == "__main__":
    raise SystemExit(main(begin=_imports.close))
