"""The soak covers what it promises, says how each run ended, and goes on where it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import soak
from bench.soak import PROCESSORS, Run


def test_it_covers_every_processor_and_twenty_seeds_in_orders_of_their_own() -> None:
    every = soak.runs([])
    assert len({run.name for run in every}) == len({run.log for run in every}) == len(every) == 26
    proofs, seeds = every[: len(PROCESSORS)], every[len(PROCESSORS) :]
    for run, processor in zip(proofs, PROCESSORS.values(), strict=True):
        assert run.variables in (processor, processor | {"CI": "true"})
    assert {"CI" in run.variables for run in proofs} == {True, False}
    for run in proofs:
        assert "--answers=solutions,right,stubs,mistakes" in run.arguments
        assert "tests/selftest" in run.arguments
    for number, run in enumerate(seeds, 1):
        assert {f"--seed-shift={number}", f"--randomly-seed={number}"} < set(run.arguments)
        mistakes = ",mistakes" if number <= 5 else ""
        assert f"--answers=solutions,right{mistakes}" in run.arguments
    assert {str(run.variables) for run in seeds} == {str(v) for v in PROCESSORS.values()}
    assert all("solutions,right,a.py" in str(run.arguments) for run in soak.runs(["a.py"]))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs of tests of their own, one of which fails until a file is there."""
    specs = tmp_path / "test_it.py"
    late = "from pathlib import Path\n\n\ndef test_late(): assert Path('late').exists()\n"
    specs.write_text(f"def test_good(): pass\n\n\n{late}", encoding="utf-8")
    alone = [f"--rootdir={tmp_path}", f"--confcutdir={tmp_path}"]
    every = [
        Run("one", [str(specs), "-k", "good", *alone]),
        Run("late", [str(specs), *alone]),
        Run("nothing", [str(tmp_path / "missing.py"), *alone]),
    ]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of the time of such a run
    folder = tmp_path / "state"
    monkeypatch.setattr(soak, "STATE", folder)
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "runs", lambda also: every)
    monkeypatch.setattr(soak, "_command", lambda run: [sys.executable, "-m", "pytest", "-q", *run])
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    return folder


def test_a_line_for_each_run_and_what_has_passed_is_not_run_again(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.main(["--jobs=2"]) == 1
    first = capsys.readouterr().out
    assert "passed         one: 1 passed" in first
    assert "FAILED         late: 1 failed, 1 passed" in first
    assert "test_it.py::test_late" in first
    assert "FAILED         nothing: no result" in first
    assert "1 of 3 runs passed" in first

    (state.parent / "late").touch()
    with (state / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"name": "late", "code"')  # cut off by the end of the machine
    assert soak.main(["--only=e"]) == 0
    second = capsys.readouterr().out
    assert "passed before  one: 1 passed" in second
    assert "passed         late: 2 passed" in second
    assert "1 of 1 runs passed" in second

    (state.parent / "pyproject.toml").write_text("# other", encoding="utf-8")
    assert "passed before" not in (soak.main(["--only=one"]), capsys.readouterr().out)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs=0"], "--jobs must be at least 1, not 0"),
        (["--also", "nowhere.py"], "--also: there is no file nowhere.py"),
        (["--only=mars"], "--only: no run has 'mars' in its name"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_is_done(
    state: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        soak.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not state.exists()
