"""Every command of the repository. `nox` draws the board; `nox -l` lists the rest.

All sessions share one environment, `.venv`, which is made here and filled again only when
pyproject.toml changes. `nox --no-venv` installs nothing and runs on the interpreter that nox itself
runs on, which is how a machine with a torch of its own is used.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["board"]

# nox looks for uv whether or not a session wants it, and would say so above every screen.
logging.getLogger("nox").addFilter(lambda record: "uv binary" not in record.getMessage())

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "memory-katas-installed"
TYPED = ("tests/kit", "tests/desk", "tests/lab", "solutions", "noxfile.py")
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")


@nox.session
def board(session: nox.Session) -> None:
    """Where every kata stands by its newest verdict, and what to do next."""
    _desk(session, "board")


@nox.session
def kata(session: nox.Session) -> None:
    """Judge one kata or a part of it: -- [NAME] [PART] [-v] [--all] [--answers WHOSE]."""
    _desk(session, "kata")


@nox.session
def watch(session: nox.Session) -> None:
    """The verdict a second after each save, and a key for everything else: -- [NAME]."""
    _desk(session, "watch")


@nox.session
def hint(session: nox.Session) -> None:
    """One hint at a time, for the part in hand or another: -- [NAME] [PART] [HINT]."""
    _desk(session, "hint")


@nox.session
def reset(session: nox.Session) -> None:
    """A fresh stub, never over your work unasked: nox -s reset -- NAME [--force], or --every."""
    _desk(session, "reset")


@nox.session
def plan(session: nox.Session) -> None:
    """A dry run, the memory of a far larger model on each rank: -- [NAME] [--layers N ...]."""
    _desk(session, "plan")


@nox.session
def timeline(session: nox.Session) -> None:
    """A picture of live bytes through one step, yours beside the reference's: -- [NAME]."""
    _desk(session, "timeline")


@nox.session
def gpu(session: nox.Session) -> None:
    """The same specs on CUDA, with what only a GPU shows: -- [NAME] [--lab]."""
    words = [word for word in session.posargs if word != "--lab"]
    _desk(session, "gpu", words)
    if words != session.posargs:
        _run(session, _python(session, "lab"), "-m", "lab")


@nox.session
def tests(session: nox.Session) -> None:
    """The proof of the repository: right answers pass, mistakes and stubs are caught."""
    python = _python(session, "prove")
    # By files, for what one process has measured serves all answers of a file. Many tests only
    # wait, for ranks or for a limit, so that three keep two processors busy.
    shared = ("--numprocesses=3", "--dist=loadfile")
    proof = ("--answers=solutions,right,stubs,mistakes", "--device=cpu", *shared)
    _run(session, python, "-m", "pytest", "tests/specs", "tests/selftest", *proof, *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """The proof with other seeds, orders and processors; two hours, and it can be interrupted."""
    python = _python(session, "prove")
    _run(session, python, "-m", "bench.soak", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed of verdicts and of the ruler (a quarter of an hour): -- [watch, peers, ...]."""
    words = list(session.posargs)
    peers = words[:1] == ["peers"]  # references beside those of libraries, which it needs
    python = _python(session, "prove", *(["peers"] if peers else []))
    if peers:
        _add(session, python, "peers")
    files = ["tests/bench", "--ignore=tests/bench/test_peers.py"]
    if words and (ROOT / "tests" / "bench" / f"test_{words[0]}.py").is_file():
        files = [f"tests/bench/test_{words.pop(0)}.py"]
    options = ("-p", "no:randomly", "--benchmark-columns=median,iqr,rounds")
    _run(session, python, "-m", "pytest", *files, "-q", *options, *words)


@nox.session
def lab(session: nox.Session) -> None:
    """What the articles claim, measured and drawn: -- [NAME ...] [--list] [--quick] [--open]."""
    _run(session, _python(session, "lab"), "-m", "lab", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Break the references in every small way and list what no spec notices: -- [NAME]; slow."""
    python = _python(session, "mutants")
    _add(session, python, "mutants")
    _run(session, python, "-m", "bench.mutants", *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw the README's pictures again, from real screens; -- --check only compares them."""
    _run(session, _python(session, "judge"), "-m", "desk.pictures", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types: ruff check, ruff format --check, mypy --strict."""
    python = _python(session, "prove", "lint")
    _run(session, python, "-m", "ruff", "check", ".")
    _run(session, python, "-m", "ruff", "format", "--check", ".")
    _run(session, python, "-m", "mypy", *TYPED)


def _desk(session: nox.Session, command: str, words: list[str] | None = None) -> None:
    """Run a command of the desk, which says itself what is wrong; nox only takes its exit code."""
    words = session.posargs if words is None else words
    python = _python(session, "judge")
    # When nox began: so far it has worked and not waited, apart from making .venv.
    started = {"MEMORY_KATAS_STARTED": str(time.time() - time.process_time())}
    nox_log = logging.getLogger("nox")
    nox_log.addFilter(_is_of_no_command)
    try:
        _run(session, python, "-m", "desk", command, *words, env=started)
    except CommandFailed as error:
        code = re.search(r"\d+$", str(error.reason))
        sys.exit(int(code.group()) if code else 1)  # nox has a line for a session that returns
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        nox_log.removeFilter(_is_of_no_command)


def _is_of_no_command(record: logging.LogRecord) -> bool:
    """Whether a line of nox is not about how a command has ended."""
    text = record.getMessage()
    return not (text.startswith("Interrupted") or "failed with exit code" in text)


def _run(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> None:
    """Run in the foreground. Nothing is cut short at Ctrl-C: the desk ends its own processes."""
    session.run(
        *command,
        env={"PYTHONPATH": str(ROOT / "tests"), **(env or {})},
        external=True,
        log=False,
        interrupt_timeout=10,
        terminate_timeout=5,
    )


def _python(session: nox.Session, *groups: str) -> str:
    """The interpreter with everything that the session needs."""
    if _is_without_venv():
        _check_installed(session, _requirements(*groups))
        return sys.executable
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (python.exists() and STAMP.exists() and STAMP.read_text() == _stamp()):
        _install(session, python)
    return str(python)


def _is_without_venv() -> bool:
    # Sessions of the backend "none" look the same to nox with and without --no-venv.
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    forced = any(
        word in ("-fb", "--force-venv-backend") and value == "none"
        for word, value in itertools.pairwise(own)
    )
    return forced or "--no-venv" in own or "--force-venv-backend=none" in own


def _stamp() -> str:
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    return f"{hashlib.sha256(pyproject).hexdigest()} {sys.version}"


def _install(session: nox.Session, python: Path) -> None:
    """Make .venv and fill it. The stamp comes last, so that a half-made one is made again."""
    session.log("preparing .venv, once; torch is large, so this takes a few minutes")
    STAMP.unlink(missing_ok=True)
    if not _is_healthy(python):
        shutil.rmtree(VENV, ignore_errors=True)
        _quietly(session, sys.executable, "-m", "venv", str(VENV))
    packages = nox.project.dependency_groups(PROJECT, "dev")
    _quietly(session, str(python), "-m", "pip", "install", "--quiet", *packages)
    STAMP.write_text(_stamp())


def _add(session: nox.Session, python: str, group: str) -> None:
    """Install what only this session needs."""
    if not _is_without_venv():
        wanted = nox.project.dependency_groups(PROJECT, group)
        _quietly(session, python, "-m", "pip", "install", "--quiet", *wanted)


def _is_healthy(python: Path) -> bool:
    """Whether it runs, has a pip, and is of the version that nox runs on."""
    program = "import pip, sys; print(sys.version)"
    if not python.exists():
        return False
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == sys.version.strip()


def _quietly(session: nox.Session, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        for line in (done.stdout + done.stderr).strip().splitlines()[-4:]:
            session.log(line[:300])
        session.error(
            ".venv could not be prepared; the lines above say why. Without a network, "
            f"`{sys.executable} -m nox --no-venv` uses what is installed there already"
        )


def _requirements(*groups: str) -> list[str]:
    named = nox.project.dependency_groups(PROJECT, *groups)
    return list(dict.fromkeys([*PROJECT["project"]["dependencies"], *named]))


def _check_installed(session: nox.Session, requirements: list[str]) -> None:
    """Say everything that is missing or does not fit, at once."""
    lines = [line for requirement in requirements if (line := _unmet(Requirement(requirement)))]
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        session.error(f"{sys.executable} lacks what {session.name} needs:{listed}")


def _unmet(wanted: Requirement) -> str:
    if wanted.marker and not wanted.marker.evaluate():
        return ""
    want = f"wanted {wanted.name}{wanted.specifier}"
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed, {want}"
    # A torch of one's own is often a pre-release or has a local version such as +cu126.
    if wanted.specifier.contains(found, prereleases=True):
        return ""
    return f"{wanted.name} is {found}, {want}"


def _misplaced(arguments: list[str]) -> str:
    """What was meant by `nox -s kata amp_loop`: a word for the desk stands after two hyphens."""
    flags = ("-s", "-e", "--session", "--sessions")
    after = list(itertools.dropwhile(lambda word: word not in flags, arguments))[1:]
    name, *words = [*itertools.takewhile(lambda word: not word.startswith("-"), after)] or [""]
    is_misplaced = any(word not in globals() for word in words)
    if (
        name not in ("kata", "watch", "hint", "reset", "plan", "timeline", "gpu")
        or not is_misplaced
    ):
        return ""
    return f"nox -s {name} -- {' '.join(words)}"


if meant := _misplaced(sys.argv[1:]):
    print(f"Two hyphens are missing before what is meant for the session: {meant}", file=sys.stderr)
    sys.exit(2)
