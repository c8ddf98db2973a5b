"""A memory bar as a spec: how bytes are measured, and the limit that they are held to.

@pytest.mark.saves("unscale_", "memory")
@bar("peak of unscale_", "3 x one gradient of eight", "gradients are divided into copies")
def test_unscales_in_place(self, device):
    size = 4 * 64 * 1024
    return lambda module: peak_of(module, size, device), 2 * size, 8 * size
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kit.laws.checks import check_bar


def bar(title: str, formula: str, cause: str) -> Callable[[Any], Any]:
    """Make a spec of a function that returns what measures a module, its limit and a plain answer.

    Args:
        title: what is measured; arguments of the spec may stand in it, in braces.
        formula: of the limit, likewise.
        cause: why an answer most likely takes more.
    """

    def with_measure(function: Any) -> Any:
        own = inspect.signature(function).parameters

        def spec(self: object, **given: Any) -> None:
            __tracebackhide__ = True
            answer, reference = given["answer"], given["reference"]
            wanted = {name: value for name, value in given.items() if name in own}
            measure, limit, plain = function(self, **wanted)
            yours, true = measure(answer), measure(reference)
            name, why = title.format_map(wanted), formula.format_map(wanted)
            check_bar(name, yours, limit, plain=plain, reference=true, formula=why, cause=cause)

        names = dict.fromkeys([*own, "answer", "reference"])
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        functools.update_wrapper(spec, function)
        vars(spec)["__signature__"] = inspect.Signature(parameters)  # pytest reads it
        return spec

    return with_measure
