"""What leans on private torch means what the kit takes it for, and stands in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kit import private_torch
from kit.catalog import ROOT
from selftest.canaries import CANARIES

MODULE = Path(private_torch.__file__)


def _names() -> dict[str, str]:
    """The public names that the module defines, each with its docstring."""
    body, found = ast.parse(MODULE.read_text(encoding="utf-8")).body, {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            said = after.value if isinstance(after, ast.Expr) else None
            found[node.targets[0].id] = str(getattr(said, "value", ""))
    return {name: text for name, text in found.items() if not name.startswith("_")}


NAMES = _names()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:torch.distributed is")
@pytest.mark.parametrize("name", CANARIES)
def test_it_means_what_it_says(name: str) -> None:
    if name in ("fsdp_chunks", "fake_mode_depth") or name.startswith("FSDP"):
        _needs_fsdp2()
    try:
        CANARIES[name]()
    except Exception as error:
        raise AssertionError(
            f"torch {torch.__version__} has changed what kit.private_torch.{name} leans on: "
            f"{NAMES[name]}"
        ) from error


def _needs_fsdp2() -> None:
    if torch.__version__ < "2.7":
        pytest.skip("FSDP2 of torch 2.6 does not run on the cpu")


def test_every_name_has_a_canary_and_says_what_it_leans_on() -> None:
    assert set(CANARIES) == set(NAMES)
    assert [name for name, text in NAMES.items() if not text] == []


# Attributes of tensors, storages, modules, operators and groups, whose type no parser can tell.
PRIVATE = re.compile(
    r"_cdata|_schema|_overloadname|_indices|_values|_make_subclass|_version|_saved_.*|_base"
    r"|_(post_accumulate_grad|forward|backward|forward_pre|backward_pre|state_dict)_hooks"
    r"|_op_dispatcher|_spec|_local_tensor|_fsdp_.*|_get_sequence_number_for_group"
    r"|_parameters|_buffers|_modules|enter_stack|fake_device|kineto_results"
)


def uses_of_private_torch(source: str) -> Iterator[str]:
    """The lines of a program that lean on what torch does not promise."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        paths: list[str] = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            # every attribute of self and of cls is the author's own, or is an override
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            paths = [ast.unparse(node)]
            if PRIVATE.fullmatch(node.attr) and not own:
                yield lines[node.lineno - 1].strip()
        elif isinstance(node, ast.FunctionDef) and node.name == "_should_skip_dynamo":
            yield lines[node.lineno - 1].strip()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths = [node.value] if re.fullmatch(r"torch(\.\w+)+", node.value) else []
            if PRIVATE.fullmatch(node.value):
                yield lines[node.lineno - 1].strip()
        if any(re.match(r"torch\b.*\._(?!_)", path) for path in paths):
            yield lines[node.lineno - 1].strip()


FILES = [
    ROOT / "tests/conftest.py",
    *(
        path
        for folder in ("kit", "desk", "specs", "lab")
        for path in ROOT.glob(f"tests/{folder}/**/*.py")
    ),
]


def test_private_torch_is_used_in_one_module_only() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in FILES
        if path != MODULE
        for line in uses_of_private_torch(path.read_text(encoding="utf-8"))
    }
    assert not found, "give it a name in kit.private_torch, with a canary"


def test_what_counts_as_private_torch() -> None:
    for line in (
        "import torch._dynamo",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.utils import _python_dispatch",
        "torch._C._jit_get_all_schemas()",
        "torch.ops.aten._to_copy.default",
        "storage._cdata",
        "func._schema.name",
        "getattr(tensor, 'fake_device')",
        "importlib.import_module('torch._dynamo')",
    ):
        assert set(uses_of_private_torch(line)) == {line}
    for line in (
        "import torch",
        "torch.Tensor.__add__",
        "self._modules = 3",
        "callspec._idlist",
        "'torch._version is compared'",
    ):
        assert not set(uses_of_private_torch(line)), line
