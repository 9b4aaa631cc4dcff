"""The house: a package stands on a floor and imports only from floors below; there are no circles.

Read from the source, so that imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FACE = "(face)"  # octavo/__init__.py

FLOORS = {
    "errors": 0,
    "version": 0,
    "config": 1,
    "outputs": 1,
    "sampling_params": 1,
    "metrics": 1,
    "graph": 2,
    "models": 3,
    "weights": 3,
    "core": 4,
    "tokenizer": 4,
    "sampling": 4,
    "structured": 4,
    "collectives": 4,
    "backends": 5,
    "worker": 6,
    "executor": 7,
    "engine": 8,
    "server": 9,
    "llm": 9,
    FACE: 9.5,  # names what lies below, for those outside and for the command line
    "cli": 10,
    "__main__": 11,
}

MAX_LINES = 600
NATIVE = "octavo._native"  # compiled from csrc/
READS_ENVIRONMENT = {"octavo.backends.cpu.backend"}  # OCTAVO_ISA


def modules() -> dict[str, Path]:
    """Every module of octavo by its dotted name."""
    found = {}
    for path in sorted((ROOT / "octavo").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(name: str) -> Iterator[str]:
    """The absolute names that a module imports; `from a.b import c` gives a.b.c where that is a module, else a.b."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


def own_imports(name: str) -> set[str]:
    found = {target for target in imported(name) if target.split(".")[0] == "octavo" and target != NATIVE}
    assert found <= MODULES.keys(), f"{name} imports what is not there: {sorted(found - MODULES.keys())}"
    return found


def package_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else FACE


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_there_is_something_to_read():
    assert {"octavo", "octavo.core.scheduler", "octavo.backends.torch"} <= MODULES.keys()
    assert "octavo.core.block_pool" in own_imports("octavo.core.block_manager")


def test_every_package_has_a_floor():
    assert {package_of(name) for name in MODULES} <= FLOORS.keys(), "give the new package a floor in this test"


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name: str):
    own = package_of(name)
    for target in own_imports(name):
        other = package_of(target)
        assert other == own or FLOORS[other] < FLOORS[own], f"{name} imports {target}, which is not below it"


def test_there_are_no_circles():
    try:
        TopologicalSorter({name: own_imports(name) - {name} for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


def test_the_native_runtime_is_called_by_its_backend_alone():
    assert [name for name in MODULES if NATIVE in imported(name)] == ["octavo.backends.cpu.native"]


def test_torch_stays_in_its_backend_and_between_workers():
    for name in MODULES:
        if not under(name, "octavo.backends.torch") and name != "octavo.collectives.torch_distributed":
            assert not [t for t in imported(name) if under(t, "torch")], f"{name} imports torch"


def test_http_stays_in_the_server():
    for name in MODULES:
        if not under(name, "octavo.server"):
            for library in ("fastapi", "starlette", "uvicorn", "pydantic"):
                assert not [t for t in imported(name) if under(t, library)], f"{name} imports {library}"


def test_core_needs_no_arrays():
    for name in MODULES:
        if under(name, "octavo.core"):
            assert not [t for t in imported(name) if under(t, "numpy") or under(t, "torch")], f"{name} imports arrays"


def test_oracles_are_no_runtime_dependencies():
    for name in MODULES:
        assert not [t for t in imported(name) if under(t, "transformers") or under(t, "gguf")], name


def test_nothing_is_pickled():
    for name in MODULES:
        assert not [
            t
            for t in imported(name)
            if t.split(".")[0] in {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve"}
        ], f"{name} imports a pickler"

    for name, tree in TREES.items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call):
                assert ast.unparse(call.func) != "torch.load", f"{name} calls torch.load, which unpickles"
                assert "allow_pickle" not in [keyword.arg for keyword in call.keywords], f"{name} may unpickle"


def test_no_environment_variables():
    readers = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                named = {node.attr}
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                named = {alias.name for alias in node.names}
            else:
                continue
            if named & {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}:
                readers.add(name)
    assert readers == READS_ENVIRONMENT


def test_files_can_be_read_in_one_sitting():
    for folder in ("octavo", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it"
