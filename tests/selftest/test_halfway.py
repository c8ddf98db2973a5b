"""Answers made of a reference: whoever has written a part, and nothing of later ones, passes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.answers.catalogue import catalogue
from kit.catalog import ROOT, find_kata
from selftest.tiny import Repository

NO_BFLOAT16 = {"if dtype != torch.float32:\n        # Between": "if False:\n        # Between"}
NO_CHECKPOINT = {"if checkpoint and block not in inner": "if False and block not in inner"}
NO_SYNC_LAST = {
    "    # what the model has may be gathered.\n": (
        "    if sync == 'last':\n        raise NotImplementedError\n"
    )
}
NO_SEGMENTS = {
    "        if self.segment_size == 1:\n": (
        "        if self.segment_size > 1:\n            raise NotImplementedError\n"
        "        if True:\n"
    )
}
NO_STATE = {
    "with torch.enable_grad(), ctx.random.restored(), ctx.autocast.restored():": (
        "with torch.enable_grad():"
    ),
    "        with ctx.autocast.restored():\n            out": "        if True:\n            out",
}
NO_PRECISIONS = {
    "    _check_epoch(window, dtype, scaler, max_norm)\n": (
        "    _check_epoch(window, dtype, scaler, max_norm)\n"
        "    if dtype != torch.float32 or scaler is not None:\n        raise NotImplementedError\n"
    )
}


HERE = Repository(ROOT)


def judged(answer: Path, name: str, part: int) -> Any:
    """The verdict on a part."""
    _, out = HERE.desk("kata", name, str(part), "--answers", str(answer), "--json")
    (verdict,) = json.loads(out)["verdicts"]
    return verdict


@pytest.mark.parametrize(
    ("name", "part", "edits", "lap"),
    [
        ("fsdp_wrap", 1, NO_BFLOAT16 | NO_CHECKPOINT, "core"),
        ("fsdp_wrap", 2, NO_CHECKPOINT, "core"),
        ("fsdp_wrap", 3, NO_SYNC_LAST, "all"),
        ("gradient_accumulation", 3, NO_PRECISIONS, "all"),
        ("checkpointed_model", 1, NO_SEGMENTS, "core"),
        ("segment_checkpointing", 1, NO_STATE, "all"),
    ],
)
def test_a_part_is_passed_without_what_later_parts_add(tmp_path, name, part, edits, lap):
    text = find_kata(name).solution.read_text(encoding="utf-8")
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (answer := tmp_path / "answer.py").write_text(text, encoding="utf-8")
    verdict = judged(answer, name, part)
    asked = [spec for spec in verdict["specs"] if spec["part"] == part]
    results = {spec["id"]: spec["result"] for spec in asked if lap in ("all", spec["lap"])}
    assert results
    assert {i: r for i, r in results.items() if r not in ("passed", "not_checked")} == {}


def test_what_is_known_to_go_wrong_in_another_function_is_the_cause(tmp_path):
    """Part 3 is judged, and train uses a train_step that is wrong."""
    kata = find_kata("amp_loop")
    mistake = next(e for e in catalogue(kata)[0] if e.name == "reads_the_skip_off_the_scale")
    text = mistake.source(kata.solution.read_text(encoding="utf-8"))
    (answer := tmp_path / "answer.py").write_text(text, encoding="utf-8")
    failed = [s for s in judged(answer, kata.name, 3)["specs"] if s["result"] == "failed"]
    problem = failed[0]["problem"]
    assert problem["function"] == "train_step"
    assert problem["cause"].startswith("reads the skip off the scale")
