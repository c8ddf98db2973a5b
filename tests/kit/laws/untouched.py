"""After every call of an answer: what its contract does not change is as it was.

`watch` puts a guard around each function and method of the contract. Before a call the guard
notes what is in force (autocast, grad mode, hooks, defaults, random state of Python) and what the
arguments carry besides values (training flags, hooks, attributes, requires_grad, the data). After
it, returned or raised, everything must be the same. Tensors are referred to weakly: a guard must
not keep alive what an answer frees.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import inspect
import random
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from kit.answers.reset_torch import saved_tensors_hooks_in_force
from kit.answers.settings import SETTINGS
from kit.laws.checks import UNTOUCHED, SpecFailure
from kit.private_torch import data_version, dispatch_modes, leaf_hooks

# What each observable means for the one who changed it.
_CAUSES = {
    "training": "train() or eval() is called: the mode is the caller's",
    "hooks": "a hook is left behind, or one of the caller's is removed",
    "requires_grad": "requires_grad is changed and not restored",
    "data": "the caller's tensor is changed in place",
    "autocast": "autocast is set by hand and not restored; `with` restores it, after an error too",
    "grad mode": "grad mode is set by hand and not restored",
    "dispatch modes": "a mode is entered by hand and not exited, or the caller's is exited too",
    "random": "a seed is set, or extra random numbers are drawn",
    "garbage": "the garbage collector is switched off and not switched on again",
}
_SET = "it is set by hand and not restored"  # whatever else is in force
_RANDOM = "random state of torch"

# The last error that a guarded call has raised, in words: a spec may have expected it.
raised: list[str] = []
# The names of guarded functions that were called in a spec.
called: set[str] = set()

Named = dict[str, int]  # attributes by name: 0, or which callable it is


def watch(
    answer: ModuleType,
    names: Collection[str],
    changes: Mapping[str, tuple[str, ...]],
    drawing: bool = True,
) -> None:
    """Guard what the contract has of the functions and classes that the answer itself defines.

    Args:
        names: of the contract, such as "train", "Scaler" and "Scaler.update".
        changes: what a function may change after all: the first words of what is observed.
        drawing: whether torch's random state may move; else `changes` says where.
    """

    def free(name: str) -> tuple[str, ...]:
        return (*changes.get(name, ()), *([_RANDOM] if drawing else []))

    for name, value in [*vars(answer).items()]:
        if name not in names or getattr(value, "__module__", None) != answer.__name__:
            continue
        if inspect.isfunction(value):
            setattr(answer, name, _guarded(name, value, free(name)))
        elif inspect.isclass(value):
            for method, function in [*vars(value).items()]:
                full = f"{name}.{method}"
                is_named = full in names or method in ("__init__", "__call__")
                if is_named and inspect.isfunction(function):
                    setattr(value, method, _guarded(full, function, free(full)))


def observed(*values: Any) -> dict[str, Any]:
    """What is in force, and what modules, optimizers and tensors carry: to compare two moments."""
    looks = [look for part in _parts([*values], set()) for look in _looks(part)]
    return _in_force() | {observable: look() for observable, look in looks}


def _guarded(name: str, function: Callable[..., Any], free: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        called.add(name.partition(".")[0])
        in_force = _in_force() | _random(free)
        looks = [look for part in _parts([*args, *kwargs.values()], set()) for look in _looks(part)]
        carried = [(observable, look, look()) for observable, look in looks]

        def problem(after: str) -> SpecFailure | None:
            now = _in_force() | _random(free)
            for changed in now:
                if now[changed] != in_force[changed] and not changed.startswith(free):
                    if changed in SETTINGS:  # for all code after it, so it is put back
                        SETTINGS[changed].write(in_force[changed])
                    return _failure(changed, in_force[changed], now[changed], after)
            for observable, look, old in carried:
                new = look()
                if new is not _GONE and new != old and not observable.startswith(free):
                    return _failure(observable, old, new, after)
            return None

        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            after = f"{type(error).__name__} in {name}()"
            raised[:] = [after]
            found = problem(after)
            if found is not None and not isinstance(error, SpecFailure):
                raise found from error
            raise
        found = problem(f"{name}()")
        if found is not None:
            raise found
        return result

    return call


_GONE = object()  # the object of which something is observed is there no longer


def _failure(observable: str, old: Any, new: Any, after: str) -> SpecFailure:
    if "attributes" in observable:
        cause, old, new = _attributes_that_differ(old, new)
    else:
        cause = next((c for part, c in _CAUSES.items() if part in observable), _SET)
    expected = f"{observable} as before {after}: {_shown(old)}"
    return SpecFailure(expected, _shown(new), cause, sure=True, clause=UNTOUCHED)


def _attributes_that_differ(old: Named, new: Named) -> tuple[str, list[str], list[str]]:
    """What has become of which attributes, and the names of these before and now."""
    found = {
        "something is left on the object": [n for n in new if n not in old],
        "something is removed from the object": [n for n in old if n not in new],
        "something on the object is replaced": [n for n in old if n in new and old[n] != new[n]],
    }
    cause = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
    others = {n for names in found.values() for n in names}
    return cause, [n for n in old if n in others], [n for n in new if n in others]


def _shown(value: Any) -> str:
    return str(value).removeprefix("torch.")[:200]


_GLOBAL_HOOKS = [v for k, v in vars(nn_module).items() if k.endswith("hooks")]


def _autocast_blocks() -> int:
    """How many blocks of autocast are entered: its cache ends with the outermost."""
    entered: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return entered - 1


def _in_force() -> dict[str, Any]:
    """What is in force in this thread, and the same for all."""
    return {
        **{name: setting.read() for name, setting in SETTINGS.items()},
        "autocast blocks around": _autocast_blocks(),
        "inference grad mode": torch.is_inference_mode_enabled(),
        "dispatch modes in force": [type(mode).__name__ for mode in dispatch_modes()],
        "hooks on saved tensors": saved_tensors_hooks_in_force(),
        "garbage collector": gc.isenabled(),
        "random state of Python": random.getstate(),
        "global module hooks": sum(len(hooks) for hooks in _GLOBAL_HOOKS if hooks),
    }


def _random(free: tuple[str, ...]) -> dict[str, str]:
    if _RANDOM in free:
        return {}
    # Read without an operation: a ruler that counts around the call would see its tensor.
    state = torch.get_rng_state().untyped_storage()
    found = hashlib.sha256(ctypes.string_at(state.data_ptr(), state.nbytes()))
    return {_RANDOM: found.hexdigest()[:16]}  # nobody can read 5,000 bytes


def _hooks(attributes: Mapping[str, Any]) -> dict[str, int]:
    return {
        key: len(value)
        for key, value in attributes.items()
        if key.endswith("hooks") and isinstance(value, dict) and value
    }


def _parts(values: list[Any], seen: set[int]) -> Iterator[Any]:
    """Modules, optimizers and tensors in the arguments, also in lists, tuples and dicts."""
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and not hasattr(value, "training"):
            continue  # its constructor has only begun
        if isinstance(value, (nn.Module, Optimizer, Tensor)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parts([*value], seen)
        elif isinstance(value, dict):
            yield from _parts([*value.values()], seen)


def _looks(value: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(value, nn.Module):
        modules = [(f"{name or type(value).__name__}", m) for name, m in value.named_modules()]
        yield "training flags", lambda: {n: m.training for n, m in modules}
        yield "hooks of modules", lambda: {n: h for n, m in modules if (h := _hooks(vars(m)))}
        yield (
            "attributes of modules",
            lambda: {f"{n}.{k}": v for n, m in modules for k, v in _attributes(m).items()},
        )
        leaves = [(name, weakref.ref(p)) for name, p in value.named_parameters()]
        yield (
            "requires_grad of parameters",
            lambda: {n: p.requires_grad for n, ref in leaves if (p := ref()) is not None},
        )
        yield (
            "hooks of parameters",
            lambda: {n: len(leaf_hooks(p) or ()) for n, ref in leaves if (p := ref()) is not None},
        )
    elif isinstance(value, Optimizer):
        yield "hooks of the optimizer", lambda: _hooks(vars(value))
        yield "attributes of the optimizer", lambda: _attributes(value)
    elif not isinstance(value, nn.Parameter) and not value.is_inference():
        ref = weakref.ref(value)
        yield f"data of a tensor of shape {tuple(value.shape)}", lambda: _version(ref())


def _version(tensor: Tensor | None) -> Any:
    return _GONE if tensor is None else data_version(tensor)


def _attributes(value: object) -> Named:
    """By name; of a callable also which one it is: a method may be replaced.

    What begins with "_" is a note of torch's optimizers or schedules, or of the answer's own, and
    no contract speaks of it.
    """
    public = [(key, v) for key, v in vars(value).items() if not key.startswith("_")]
    return {key: id(v) if callable(v) else 0 for key, v in public}
