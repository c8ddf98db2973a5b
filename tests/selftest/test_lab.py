"""The lab: what an experiment is, what is kept of it, and what the report shows."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the lab draws with matplotlib")

from rich.console import Console

from kit.catalog import ROOT, all_katas
from lab import __main__ as command
from lab import draw, measure, report, runner
from lab.claims import ARTICLES, CLAIMS
from lab.notebook import Lab, Page, Text, conditions
from selftest import lab_programs as programs

pytestmark = pytest.mark.timeout(300)  # experiments take their time on a busy machine

CPU = torch.device("cpu")
EXPERIMENTS = command.all_experiments()
names = command.name_of


def test_every_experiment_says_what_it_asks_how_long_it_takes_and_which_claims_it_measures():
    assert len({experiment.ORDER for experiment in EXPERIMENTS}) == len(EXPERIMENTS)
    for experiment in EXPERIMENTS:
        assert experiment.TITLE, names(experiment)
        assert experiment.QUESTION.endswith("?"), names(experiment)
        assert set(experiment.SECONDS) == {"quick", "full"}
    assert sum(experiment.SECONDS["quick"] for experiment in EXPERIMENTS) / 2 < 180


def test_every_claim_is_of_an_article_and_is_measured_by_one_experiment():
    assert {claim.article for claim in CLAIMS.values()} == set(ARTICLES)
    measured = Counter(name for experiment in EXPERIMENTS for name in experiment.CLAIMS)
    assert measured == Counter(CLAIMS.keys())


def experiment(run: Any, title: str = "A tiny one") -> Any:
    found = SimpleNamespace(TITLE=title, QUESTION="Why?", SECONDS={"quick": 1, "full": 2})
    found.__name__ = "lab.experiments.tiny"
    found.run = run
    return found


def carry_out(run: Any, folder: Any) -> list[Page]:
    console = Console(quiet=True)
    return command._carry_out(console, [experiment(run)], folder, CPU, quick=True)


def test_an_interrupted_run_keeps_what_is_measured_and_goes_on(tmp_path):
    calls = Counter[str]()

    def measured(name: str) -> int:
        calls[name] += 1
        if name == "second" and calls[name] == 1:
            raise KeyboardInterrupt
        return len(name)

    def run(lab: Lab) -> None:
        sizes = [lab.sample(name, partial(measured, name)) for name in ("first", "second")]
        lab.say(f"{sizes}")

    with pytest.raises(KeyboardInterrupt):
        carry_out(run, tmp_path)
    (page,) = carry_out(run, tmp_path)
    assert calls == {"first": 1, "second": 2}
    assert page.samples == {"first": 5, "second": 6}
    assert page.blocks == [Text("[5, 6]")]


def test_samples_of_other_conditions_or_broken_ones_are_measured_again(tmp_path):
    for quick in (True, False):
        lab = Lab(Page("tiny", "", ""), tmp_path, CPU, quick=quick)
        assert lab.sample("x", lambda quick=quick: quick) is quick
    (tmp_path / "samples" / "tiny.json").write_text("{")
    assert Lab(Page("tiny", "", ""), tmp_path, CPU, quick=True).sample("x", lambda: 7) == 7


def test_a_claim_that_nobody_made_and_a_verdict_that_is_none_are_refused(tmp_path):
    lab = Lab(Page("tiny", "", ""), tmp_path, CPU, quick=True)
    with pytest.raises(ValueError, match="has no claim 'q9-nothing'"):
        lab.claim("q9-nothing", "1", verdict="holds")
    with pytest.raises(ValueError, match="not 'perhaps'"):
        lab.claim("q9-zero1", "1", verdict="perhaps")


def drawn(lab: Lab) -> None:
    for name in ("one", "two"):
        figure, (axes,) = draw.figure()
        draw.stacked_bars(axes, {"plain": {"weights": 2**20, "activations": 2**21}})
        lab.plot(name, figure, "Activations < 2 x weights", 'Bars "of" bytes.')
    lab.table("A <table>", ["a", "b"], [["1", "2 | 3"]])
    lab.code("A program", {"faulty": "a < b", "mended": "a <= b"})
    lab.claim("q9-zero1", "3.9 times", verdict="holds", when="many ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    pages = carry_out(drawn, folder)
    report.write(folder, pages, conditions(CPU, quick=True))
    return folder


def test_the_page_stands_alone_and_has_every_plot(folder):
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 2
    links = re.findall(r'(?:src|href|action)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert {*re.findall(r'(?:url\(|href=")#([\w-]+)', page)} <= {*ids}
    assert "A &lt;table&gt;" in page
    assert "<code>a &lt;= b</code>" in page
    assert "{{" not in page


def test_plots_are_files_too_and_json_and_markdown_have_everything(folder):
    assert {path.suffix for path in (folder / "plots").iterdir()} == {".svg", ".png"}
    data = json.loads((folder / "report.json").read_text())
    assert data["version"] == 1
    assert data["conditions"]["torch"] == torch.__version__
    kinds = [block["kind"] for block in data["experiments"][0]["blocks"]]
    assert kinds == ["plot", "plot", "table", "code"]
    text = (folder / "report.md").read_text()
    assert "![Activations < 2 x weights. Bars" in text
    assert "| 1 | 2 / 3 |" in text
    assert "faulty:\n\n```python\na < b\n```\n" in text
    assert text.count("| not measured |") == len(CLAIMS) - 1
    assert "| 3.9 times | holds | many ranks |" in text


def run(capsys: Any, *words: str) -> tuple[int, str]:
    code = command.main(list(words))
    return code, capsys.readouterr().out


def test_the_list_has_a_question_each_and_a_slip_gets_what_was_meant(capsys):
    code, out = run(capsys, "--list", "--quick")
    assert code == 0
    for module in EXPERIMENTS:
        assert names(module) in out
    code, out = run(capsys, "four_configuration")
    assert (code, "did you mean four_configurations?" in out) == (2, True)


def test_an_experiment_runs_from_the_command_line_and_measures_its_claims(
    capsys, monkeypatch, tmp_path
):
    (module,) = [m for m in EXPERIMENTS if names(m) == "four_configurations"]
    monkeypatch.setattr(module, "make", partial(module.make, layers=8))  # and not 32
    monkeypatch.setattr(module, "_layers", lambda lab: 1)  # of what is timed
    code, out = run(capsys, "four_configurations", "--quick", "--out", str(tmp_path))
    assert code == 0
    assert "index.html" in out
    (page,) = json.loads((tmp_path / "report.json").read_text())["experiments"]
    assert {claim["claim"] for claim in page["claims"]} == set(module.CLAIMS)
    peaks = {
        way: max(sum(row.values()) for row in page["samples"][f"timeline {way}"])
        for way in module.WAYS
    }
    # 8 layers of two linear ones, 1024 wide: weights P, Adam's two averages 2 P
    state = 3 * 4 * 8 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    assert state < peaks["both"] < peaks["checkpointed"] < peaks["AMP"] < peaks["fp32"]


@pytest.mark.parametrize(
    ("run_it", "words", "want"),
    [
        (programs.is_not_here, "Not measured here: no such GPU.", 0),
        (programs.breaks_off, "Broke off: ValueError: no shape.", 1),
    ],
)
def test_the_report_says_what_was_not_measured(capsys, monkeypatch, tmp_path, run_it, words, want):
    monkeypatch.setattr(runner, "_WARM", set())  # neither needs what takes seconds to import
    trouble, budget = (m for m in EXPERIMENTS if names(m) in ("trouble", "largest_batch"))
    monkeypatch.setattr(trouble, "run", run_it)
    monkeypatch.setattr(budget, "run", programs.says)
    code, out = run(capsys, "trouble", "largest_batch", "--out", str(tmp_path))
    assert code == want
    report = (tmp_path / "report.md").read_text()
    assert words in report
    assert "The other one." in report
    assert report.index(budget.TITLE) < report.index(trouble.TITLE)
    assert words[1:-1] in " ".join(out.split())


def test_a_budget_refuses_the_step_that_exceeds_it():
    x = torch.ones(1024)
    assert measure.fits(lambda: x * 2, CPU, budget=8192, known=[x])
    assert not measure.fits(lambda: x * 2, CPU, budget=8191, known=[x])


def test_a_budget_of_a_gpu_is_given_to_the_current_one_and_taken_back(monkeypatch):
    """As torch has it: the call that sets a limit takes no "cuda" without a number."""
    seen = []

    def limit(fraction: float, device: object) -> None:
        seen.append((torch.cuda._utils._get_device_index(device), fraction))

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def too_much() -> None:
        raise torch.OutOfMemoryError

    assert measure.fits(int, torch.device("cuda"), budget=25)
    assert not measure.fits(too_much, torch.device("cuda", 3), budget=200)
    assert seen == [(1, 0.25), (1, 1.0), (3, 1.0), (3, 1.0)]


ROWS = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- topics -->")[2]
ROWS = ROWS.partition("<!-- /topics -->")[0]


def test_the_readme_maps_every_topic_to_what_is_there():
    links = re.findall(r"\]\(([^)]+)\)", ROWS)
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.M)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, link
    rows = [line for line in ROWS.splitlines() if line.startswith("| ")][1:]
    assert all(re.search(r"\]\(", row) for row in rows)
    articles = {name for row in rows for name in row.split("|")[2].replace(" ", "").split(",")}
    assert articles == set(ARTICLES)
    for name in [names(experiment) for experiment in EXPERIMENTS]:
        assert f"tests/lab/experiments/{name}.py" in links, name
    assert {f"katas/{kata.name}.py" for kata in all_katas()} <= set(links)
