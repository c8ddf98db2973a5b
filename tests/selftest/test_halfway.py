"""Whoever has written a part, and nothing that only later parts ask for, passes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kit.catalog import ROOT, find_kata

NO_BFLOAT16 = {"if dtype != torch.float32:\n        # Between": "if False:\n        # Between"}
NO_CHECKPOINT = {"if checkpoint and block not in inner": "if False and block not in inner"}
NO_SYNC_LAST = {
    "    # The ranks that share the model, which need not be all.\n": (
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
    command = [sys.executable, "-m", "desk", "kata", name, str(part)]
    done = subprocess.run(
        [*command, "--answers", str(answer), "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    )
    (verdict,) = json.loads(done.stdout)["verdicts"]
    asked = [spec for spec in verdict["specs"] if spec["part"] == part]
    results = {spec["id"]: spec["result"] for spec in asked if lap in ("all", spec["lap"])}
    assert results
    assert {i: r for i, r in results.items() if r not in ("passed", "not_checked")} == {}
