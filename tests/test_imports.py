"""Imports run one way: colibri_offload → scheduler → storage, colibri_offload → jit; and never in a circle.

Read from the source, so that an import inside a function or for type checkers counts too, except for circles: there
only what runs when a module is loaded matters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = "colibri_offload"
ERRORS = f"{TOP}.errors"
# Package → the packages of ours that it may import.
ALLOWED = {
    f"{TOP}.jit": {f"{TOP}.jit"},
    f"{TOP}.storage": {f"{TOP}.storage"},
    f"{TOP}.scheduler": {f"{TOP}.scheduler", f"{TOP}.storage"},
}


def modules() -> dict[str, Path]:
    """Dotted name → file, of everything that is installed."""
    found = {}
    for folder, name in ((TOP, TOP), *((package.split(".")[1], package) for package in ALLOWED)):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((name, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Modules of ours, by dotted name, that the import statements among `nodes` load."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in inner}
    return names


def at_load_time(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is loaded."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo += ast.iter_child_nodes(node)


def package_of(module: str) -> str:
    return next((package for package in ALLOWED if module == package or module.startswith(f"{package}.")), TOP)


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def test_the_tree_has_been_found() -> None:
    assert {package_of(name) for name in MODULES} == {TOP, *ALLOWED}
    assert ERRORS in MODULES and len(MODULES) > 100


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for name in (name for name in MODULES if package_of(name) == package):
        ours = {other for other in imported(ast.walk(TREES[name])) if other.split(".")[0] == TOP}
        upward = {other for other in ours - {ERRORS} if package_of(other) not in ALLOWED[package]}
        assert not upward, f"{name} imports {', '.join(sorted(upward))}"


def test_errors_import_nothing_of_ours() -> None:
    assert not {name for name in imported(ast.walk(TREES[ERRORS])) if name.startswith(TOP)}


def test_packages_are_imported_by_their_installed_names() -> None:
    """`import jit` works in the checkout only."""
    folders = {package.split(".")[1] for package in ALLOWED}
    for name, tree in TREES.items():
        bare = {other for other in imported(ast.walk(tree)) if other.split(".")[0] in folders}
        assert not bare, f"{name} imports {', '.join(sorted(bare))}"


def test_no_imports_run_in_a_circle() -> None:
    graph = {name: (imported(at_load_time(tree)) & MODULES.keys()) - {name} for name, tree in TREES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(error.args[1])}")
