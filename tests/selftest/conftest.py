"""What several tests of the house itself need."""

from __future__ import annotations

from types import ModuleType

import pytest

from kit.answers.loading import load
from selftest import tiny, world_programs

pytest.register_assert_rewrite("selftest.canaries")


@pytest.fixture(scope="module")
def bad() -> ModuleType:
    """An answer whose functions do to a world whatever can go wrong."""
    path = tiny.new_folder() / "bad.py"
    path.write_text(world_programs.ANSWER, encoding="utf-8")
    return load(path)
