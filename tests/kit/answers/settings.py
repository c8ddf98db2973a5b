"""What is set for the process or the thread, by name: how it is read, set, and at first.

An answer that sets one of these changes what all code after it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import backends


class Setting(NamedTuple):
    """How a setting is read and set; `fresh` is None where a machine has its own."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    fresh: Any = None


def _unless_mixed(read: Callable[[], Any]) -> Callable[[], Any]:
    """`read`, or "mixed" where torch refuses to say: some of it is set by `fp32_precision`."""

    def safe() -> Any:
        try:
            return read()
        except RuntimeError:
            return "mixed"

    return safe


def _flag(owner: Any, name: str) -> Setting:
    read = _unless_mixed(lambda: getattr(owner, name))
    return Setting(read, lambda value: setattr(owner, name, value))


def _autocast(device: str, dtype: torch.dtype) -> dict[str, Setting]:
    return {
        f"autocast on {device}": Setting(
            lambda: torch.is_autocast_enabled(device),
            lambda value: torch.set_autocast_enabled(device, value),
            False,
        ),
        f"autocast dtype on {device}": Setting(
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
            dtype,
        ),
    }


SETTINGS = {
    **_autocast("cpu", torch.bfloat16),
    **_autocast("cuda", torch.float16),
    "autocast cache": Setting(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True
    ),
    "grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
    "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "anomaly mode": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled, False),
    "precision of matrix products": Setting(
        _unless_mixed(torch.get_float32_matmul_precision),
        torch.set_float32_matmul_precision,
        "highest",
    ),
    "deterministic algorithms": Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0
    ),
    "number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "backends.mkldnn.enabled": _flag(backends.mkldnn, "enabled"),
    **{
        f"backends.cudnn.{name}": _flag(backends.cudnn, name)
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    },
    **{
        f"{kind} attention": Setting(
            getattr(backends.cuda, f"{kind}_sdp_enabled"),
            getattr(backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
}
