"""Who may import whom under python/tradewind, as data, and the check of a tree against it.

An import counts as lazy inside a function or under TYPE_CHECKING: importing the module does not run
it. Imports by importlib with a literal name, and attributes of the package itself
(`tradewind.report`, which loads a module by PEP 562), count as imports too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """One module or package of tradewind. `imports`: the others that it may import when loaded;
    `lazily`: those besides that it may import only lazily; `torch`: when it may load torch:
    "loaded", "lazily" or "never". Where it is not "loaded", its imports may not load it either."""

    imports: str = ""
    lazily: str = ""
    torch: str = "never"


# The engine rooms never import each other: `engine` alone composes them.
ENGINE_ROOMS = "optim share checkpoint watch"
# Facts about machine, place and run, without torch: anyone may import these.
FACTS = "machine place track progress alerts"
EVERYTHING = f"{FACTS} {ENGINE_ROOMS} engine data meter doctor report launch"

# A new module or package of python/tradewind is entered here.
ROOMS: dict[str, Room] = {
    "__init__": Room(lazily=EVERYTHING, torch="lazily"),
    "__main__": Room("launch"),
    "_build_info": Room(),
    "_native": Room(torch="loaded"),
    "_core": Room("_native _build_info", torch="loaded"),
    "machine": Room(),
    "place": Room("machine", torch="lazily"),
    "progress": Room("progress_bar progress_plot"),
    "progress_bar": Room("progress"),
    "progress_plot": Room("progress"),
    "track": Room("machine place", torch="lazily"),
    "alerts": Room("machine place track"),
    "report": Room("machine place track progress", torch="lazily"),
    "doctor": Room(f"{FACTS} report", f"{ENGINE_ROOMS} engine data meter", torch="lazily"),
    "launch": Room(FACTS, "report doctor data checkpoint"),
    "meter": Room("machine place", torch="loaded"),
    "data": Room(f"{FACTS} meter", torch="loaded"),
    "optim": Room("_core machine place", torch="loaded"),
    "share": Room("_core machine place", torch="loaded"),
    "checkpoint": Room("_core machine place", torch="loaded"),
    "watch": Room("_core machine place", torch="loaded"),
    "engine": Room(f"_core {FACTS} {ENGINE_ROOMS} data meter", "report", torch="loaded"),
}
PACKAGE = "tradewind"


@dataclass(frozen=True)
class Import:
    target: str  # dotted
    line: int
    is_lazy: bool


def violations(package: Path) -> list[str]:
    """One line for each import under `package` that the table does not have."""
    files = _files(package)
    found = [
        f"{room}: not a module of the table in python_arrows.py"
        for room in sorted({_room_of(name) for name in files} - set(ROOMS))
    ]
    names = frozenset(files)
    imports = {
        name: _imports_of(name, path.stem == "__init__", path.read_text(), names)
        for name, path in files.items()
    }
    for name, path in files.items():
        if _room_of(name) in ROOMS:
            where = path.relative_to(package).as_posix()
            found += [f"{where}:{complaint}" for complaint in _complaints(name, imports[name])]
            found += [f"{where}: {complaint}" for complaint in _torch_by_way(name, imports)]
    return found


def _files(package: Path) -> dict[str, Path]:
    """Dotted name of each module, a stub only where there is no source."""
    files: dict[str, Path] = {}
    for path in sorted([*package.rglob("*.pyi"), *package.rglob("*.py")]):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        files[".".join((PACKAGE, *parts))] = path
    return files


def _room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def _complaints(name: str, imports: list[Import]) -> Iterator[str]:
    room_name = _room_of(name)
    room = ROOMS[room_name]
    for found in imports:
        top = found.target.split(".")[0]
        if top == "torch" and (
            room.torch == "never" or (room.torch == "lazily" and not found.is_lazy)
        ):
            yield f"{found.line}: {room_name} imports torch; in this room: {room.torch}"
        if top != PACKAGE:
            continue
        other = _room_of(found.target)
        if other in (room_name, "__init__") or other in room.imports.split():
            continue
        if other not in room.lazily.split():
            yield f"{found.line}: {room_name} may not import {other}"
        elif not found.is_lazy:
            yield f"{found.line}: {room_name} may import {other} only lazily"


def _torch_by_way(name: str, imports: dict[str, list[Import]]) -> Iterator[str]:
    """Modules by way of which loading `name` loads torch, where its room must not."""
    if ROOMS[_room_of(name)].torch == "loaded":
        return
    seen, pending = {name}, [name]
    while pending:
        current = pending.pop()
        parents = [current.rsplit(".", i)[0] for i in range(1, current.count(".") + 1)]
        loaded = [found.target for found in imports.get(current, []) if not found.is_lazy]
        if current != name and any(target.split(".")[0] == "torch" for target in loaded):
            yield f"loads torch by way of {current}"
        pending += [target for target in (*loaded, *parents) if target not in seen]
        seen.update(pending)


@cache
def _imports_of(name: str, is_package: bool, text: str, names: frozenset[str]) -> list[Import]:
    collector = _Collector(name if is_package else name.rpartition(".")[0], names)
    collector.visit(ast.parse(text))
    return collector.imports


class _Collector(ast.NodeVisitor):
    def __init__(self, package: str, names: frozenset[str]) -> None:
        self.package = package
        self.names = names  # of all modules
        self.imports: list[Import] = []
        self.aliases = {PACKAGE}  # names bound to the package itself
        self.depth = 0  # of functions and TYPE_CHECKING

    def add(self, target: str, node: ast.AST) -> None:
        self.imports.append(Import(target, getattr(node, "lineno", 0), self.depth > 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)
            if alias.name == PACKAGE and alias.asname:
                self.aliases.add(alias.asname)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package.split(".")
        start = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (start, node.module) if part)
        for alias in node.names:
            inner = f"{module}.{alias.name}"
            is_dunder = alias.name.startswith("__")
            # A public name of the package counts as a room, which no table has: name its module.
            is_module = inner in self.names or (module == PACKAGE and not is_dunder)
            self.add(inner if is_module else module, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (
            isinstance(node.value, ast.Name)
            and node.value.id in self.aliases
            and node.attr in ROOMS
        ):
            self.add(f"{PACKAGE}.{node.attr}", node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        first = node.args[0] if node.args else None
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            self.add(str(first.value), node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).split(".")[-1] != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        self.visit_lazily(node.body)
        for child in node.orelse:
            self.visit(child)

    def visit_lazily(self, nodes: list[ast.stmt]) -> None:
        self.depth += 1
        for child in nodes:
            self.visit(child)
        self.depth -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_lazily(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_lazily(node.body)
