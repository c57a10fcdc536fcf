"""How the packages are built: no circles of imports, and no packages that import each other."""

import ast
import os

from tests.house.source import Module, modules


def imports(module: Module, known: dict[str, Module]) -> set[str]:
    """The modules of ours that ``module`` names in any import: at the top, under
    ``TYPE_CHECKING``, or inside a function.
    """
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.file}:{node.lineno}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside
            if not inside <= known.keys():
                found.add(node.module or "")
    return found & known.keys()


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What ``start`` imports, and what that imports, and so on."""
    seen: set[str] = set()
    left = [*graph[start]]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    return seen


def circular(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Every import that is part of a circle."""
    reach = {name: reachable(graph, name) for name in graph}
    return {(name, to) for name, all_to in graph.items() for to in all_to if name in reach[to]}


def test_no_module_imports_itself_through_others() -> None:
    """Imports for types alone and those inside functions count: a reader follows them all."""
    found = modules()

    assert circular({name: imports(module, found) for name, module in found.items()}) == set()


def both_ways() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Each pair in one package, of packages or modules, that imports each other → the imports."""
    found = modules()
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, module in found.items():
        for to in imports(module, found):
            one, other = name.split("."), to.split(".")
            same = len(os.path.commonprefix([one, other]))
            if 0 < same < min(len(one), len(other)):
                pair = ".".join(one[: same + 1]), ".".join(other[: same + 1])
                pairs.setdefault(pair, []).append((name, to))
    return {pair: each for pair, each in pairs.items() if pair[::-1] in pairs}


def test_no_two_packages_import_each_other() -> None:
    """Of two neighbours in one package, one can be read without the other."""
    assert both_ways() == {}
