"""Lets the runs of somebody's processes go on beside the other tests: they take half a minute."""

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


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = [getattr(item, "module", None) for item in session.items]
    wanted = any(getattr(module, "result", None) is tiny.result for module in modules)
    if wanted and not session.config.option.collectonly:
        tiny.started()


def pytest_sessionfinish() -> None:
    tiny.stop()
