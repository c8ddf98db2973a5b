"""No random number of a spec escapes `--seed-shift`, and all are drawn on the cpu."""

from __future__ import annotations

import ast
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kit.answers.loading import load
from kit.answers.reset_torch import reset_torch
from kit.catalog import ROOT
from kit.laws import draw
from kit.laws.toys import text_batches
from kit.ranks.world import World
from selftest import world_programs as programs

FILES = [
    path
    for folder in ("specs", "kit", "bench")
    for path in sorted((ROOT / "tests" / folder).rglob("*.py"))
    if path != Path(draw.__file__)
]
DRAWING = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "rand_like", "randn_like"}
SEEDING = {"manual_seed", "manual_seed_all", "seed", "Generator"}
# They hold weights, which are drawn where they are made.
MODULES = {"Linear", "Embedding", "Conv1d", "Conv2d", "MultiheadAttention"}


def _numbers() -> list[list[float]]:
    """What comes from each of the ways to draw, and from a fresh start of a spec."""
    reset_torch()
    found = [torch.rand(3), draw.randn(3), draw.rand(3)]
    draw.seed(4)
    found += [torch.rand(3), draw.next_random(torch.device("cpu"))]
    generator = draw.generator(4)
    found += [draw.randn(3, generator=generator), draw.randint(1000, (3,), generator=generator)]
    found.append(next(text_batches(1, 2, 8))[0])
    return [numbers.tolist() for numbers in found]


def test_a_shift_moves_every_number_and_the_same_shift_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    for value in ("0", "1", "2", "1"):
        monkeypatch.setenv(draw.SHIFT_VARIABLE, value)
        seen.append(_numbers())
    assert seen[1] == seen[3]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert all(a != b for a, b in zip(seen[one], seen[other], strict=True))


def test_no_shift_leaves_a_seed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(draw.SHIFT_VARIABLE, raising=False)
    draw.seed(3)
    mine = torch.rand(3)
    torch.manual_seed(3)
    assert mine.equal(torch.rand(3))


def test_ranks_draw_from_moved_seeds_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(draw.SHIFT_VARIABLE, "7")
    path = tmp_path / "answer.py"
    path.write_text(programs.ANSWER, encoding="utf-8")
    with closing(World(1)) as world:
        (there,) = world.run(load(path), programs.state, False)
    reset_torch()
    assert there[2] == torch.rand(1).item()


def test_a_leaf_on_a_device_is_drawn_on_the_cpu() -> None:
    draw.seed(5)
    x = draw.randn(3, 2, device="meta", requires_grad=True)
    assert x.is_meta
    assert x.is_leaf
    assert x.requires_grad
    after = torch.rand(1)
    draw.seed(5)
    torch.randn(3, 2)
    assert after.equal(torch.rand(1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_else_seeds_or_draws(path: Path) -> None:
    escaped = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        on_device = keywords.get("device", "'meta'") != "'meta'"
        if (
            (owner == "torch" and name in SEEDING)
            or (owner == "torch" and name in DRAWING and "generator" not in keywords)
            or (owner == "nn" and name in MODULES and on_device)
        ):
            escaped.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert not escaped
