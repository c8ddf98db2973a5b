"""Lets the runs of somebody's processes go on beside the other tests: they take half a minute."""

from __future__ import annotations

import pytest

from selftest import tiny

pytest.register_assert_rewrite("selftest.canaries")


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = [getattr(item, "module", None) for item in session.items]
    wanted = any(getattr(module, "result", None) is tiny.result for module in modules)
    if wanted and not session.config.option.collectonly:
        tiny.started()


def pytest_sessionfinish() -> None:
    tiny.stop()
