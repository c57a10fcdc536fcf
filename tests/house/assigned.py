"""Which assignments finish somebody else's object: `other.attribute = …`.

Allowed are those that a reader expects:

1. an object assigns its own attributes, and a class those of its own instances;
2. a *record*, which is a dataclass that is not frozen and has no coroutines, is written by those
   who keep it, unless what is assigned is a function: that is how collaborators are tied together.

The class of `other` is found from annotations, constructors and what functions say they return.
Where they do not tell, the attribute must belong to records alone, wherever it is declared.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from tests.house.source import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef

_OF_CONTAINERS = {"get", "items", "pop", "popitem", "popleft", "setdefault", "values"}

LEFT_OUT = "mcp_sessions_conformance"
"""Its peers and faults are set up by the vectors they play."""


@dataclass(frozen=True)
class Class:
    name: str
    node: ast.ClassDef
    is_record: bool
    is_frozen: bool
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    """Attribute → its annotation, empty if there is none."""


class Declared:
    """Every class and function of the modules, by name."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.classes: dict[str, list[Class]] = {}
        self.returns: dict[str, list[str]] = {}
        for module in modules.values():
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append(_class(node))
                elif isinstance(node, Function):
                    returns = ast.unparse(node.returns) if node.returns is not None else ""
                    self.returns.setdefault(node.name, []).append(returns)

    def named_in(self, annotation: str) -> set[str]:
        return set(re.findall(r"\w+", annotation)) & self.classes.keys()

    def and_bases(self, names: set[str]) -> set[str]:
        """These classes, and those of ours that they inherit from."""
        found, left = set[str](), [*names]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                bases = [
                    ast.unparse(base) for each in self.classes[name] for base in each.node.bases
                ]
                left += [base for base in bases if base in self.classes]
        return found

    def methods(self, names: set[str], method: str) -> list[str]:
        """What ``method`` returns in the classes with ``names``, as it is annotated there."""
        return [
            ast.unparse(node.returns)
            for name in self.and_bases(names)
            for each in self.classes[name]
            for node in each.node.body
            if isinstance(node, Function) and node.name == method and node.returns is not None
        ]

    def with_attribute(self, attribute: str, names: set[str] | None) -> list[Class]:
        among = self.classes if not names else self.and_bases(names)
        found = [each for name in among for each in self.classes[name]]
        return [each for each in found if attribute in each.attributes]


def _class(node: ast.ClassDef) -> Class:
    is_dataclass = is_frozen = False
    for decorator in node.decorator_list:
        made = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(made, ast.Name) and made.id == "dataclass":
            is_dataclass = True
            is_frozen = "frozen=True" in ast.unparse(decorator)
    fixed = {"NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum"}
    is_frozen |= bool(fixed & {ast.unparse(base) for base in node.bases})
    acts = any(isinstance(each, ast.AsyncFunctionDef) for each in node.body)
    found = Class(node.name, node, is_dataclass and not is_frozen and not acts, is_frozen)
    arguments: dict[str, str] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.arg) and each.annotation is not None:
            arguments[each.arg] = ast.unparse(each.annotation)
    for each in ast.walk(node):
        targets: list[ast.expr] = []
        annotation = ""
        if isinstance(each, ast.AnnAssign):
            targets.append(each.target)
            annotation = ast.unparse(each.annotation)
        elif isinstance(each, ast.Assign):
            targets = each.targets
            if isinstance(each.value, ast.Name):
                annotation = arguments.get(each.value.id, "")
            elif isinstance(each.value, ast.Call):
                annotation = ast.unparse(each.value.func)
        elif isinstance(each, Function) and "property" in map(ast.unparse, each.decorator_list):
            found.attributes.setdefault(
                each.name, ast.unparse(each.returns) if each.returns is not None else ""
            )
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.attributes[target.attr] = found.attributes.get(target.attr) or annotation
            elif isinstance(target, ast.Name) and each in node.body:
                found.attributes[target.id] = annotation
    return found


class _Scope:
    def __init__(self, declared: Declared, inside: ast.ClassDef | None, around: list[Function]):
        self._declared = declared
        self._inside = inside
        self._around = around

    def classes_of(self, expression: ast.expr, depth: int = 0) -> set[str]:
        """The classes that ``expression`` may be of, or hold; empty where nothing tells."""
        if depth > 8:
            return set()
        match expression:
            case ast.Name(id="self" | "cls") if self._inside is not None:
                return {self._inside.name}
            case ast.Name():
                return self._of_name(expression.id, depth)
            case ast.Call(func=ast.Name(id=name)) if name in self._declared.classes:
                return {name}
            case ast.Call(func=ast.Name(id=name)) if name in self._declared.returns:
                return self._named_in(self._declared.returns[name])
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                names = self.classes_of(value, depth + 1)
                if found := self._named_in(self._declared.methods(names, name)):
                    return found
                if name in _OF_CONTAINERS:
                    return names
                if found := self._named_in(self._declared.returns.get(name, [])):
                    return found
                copied = expression.args if ast.unparse(expression.func) == "copy.copy" else []
                return names | self._all(copied, depth)
            case ast.Call():
                return self._all(expression.args, depth)
            case ast.Attribute(value=value, attr=name):
                names = self.classes_of(value, depth + 1)
                holders = self._declared.with_attribute(name, names) if names else []
                return {c for h in holders for c in self._declared.named_in(h.attributes[name])}
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self.classes_of(value, depth + 1)
            case ast.NamedExpr(value=value):
                return self.classes_of(value, depth + 1)
            case ast.IfExp(body=body, orelse=other):
                return self._all([body, other], depth)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return self._all(parts, depth)
            case _:
                return set()

    def _all(self, parts: list[ast.expr], depth: int) -> set[str]:
        return {found for part in parts for found in self.classes_of(part, depth + 1)}

    def _named_in(self, annotations: list[str]) -> set[str]:
        if self._inside is not None and "Self" in annotations:
            return {self._inside.name}
        return {found for text in annotations for found in self._declared.named_in(text)}

    def _of_name(self, name: str, depth: int) -> set[str]:
        for function in reversed(self._around):
            found: set[str] = set()
            for node in _binding(function):
                match node:
                    case ast.arg(arg=each, annotation=ast.expr() as annotation) if each == name:
                        found |= self._declared.named_in(ast.unparse(annotation))
                    case ast.AnnAssign(target=ast.Name(id=each), annotation=annotation):
                        if each == name:
                            found |= self._declared.named_in(ast.unparse(annotation))
                    case ast.Assign(targets=targets, value=value):
                        if any(name in _names(target) for target in targets):
                            found |= self.classes_of(value, depth + 1)
                    case ast.NamedExpr(target=target, value=value):
                        if target.id == name:
                            found |= self.classes_of(value, depth + 1)
                    case (
                        ast.For(target=target, iter=value)
                        | ast.AsyncFor(target=target, iter=value)
                        | ast.comprehension(target=target, iter=value)
                    ):
                        if name in _names(target):
                            names = self.classes_of(value, depth + 1)
                            each = self._named_in(self._declared.methods(names, "__iter__"))
                            found |= each or names
                    case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                        if name in _names(target):
                            found |= self.classes_of(value, depth + 1)
                    case _:
                        pass
            if found:
                return found
        return set()


@cache
def _binding(function: Function) -> list[ast.AST]:
    """What gives a name a value or a type, anywhere in ``function``."""
    kinds = (ast.arg, ast.AnnAssign, ast.Assign, ast.NamedExpr, ast.For, ast.AsyncFor)
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, (*kinds, ast.comprehension, ast.withitem))
    ]


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def assigned_from_outside(modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Where (file and line), and what is assigned as it is written there."""
    ours = {name: module for name, module in modules.items() if not name.startswith(LEFT_OUT)}
    declared = Declared(ours)
    for module in ours.values():
        for node in module.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in {"setattr", "delattr"}:
                yield f"{module.file}:{node.lineno}", f"setattr({ast.unparse(node.args[0])})"
        for target, inside, around in _targets(module.tree, None, []):
            owner = target.value
            if isinstance(owner, ast.Name) and owner.id in {"self", "cls"}:
                continue
            names = _Scope(declared, inside, around).classes_of(owner)
            found = declared.with_attribute(target.attr, names)
            found = found or declared.with_attribute(target.attr, None)
            found = [each for each in found if not each.is_frozen]
            is_own = inside is not None and all(each.node is inside for each in found)
            if not found or not (is_own or all(_is_written(each, target.attr) for each in found)):
                yield f"{module.file}:{target.lineno}", ast.unparse(target)


def _is_written(each: Class, attribute: str) -> bool:
    return each.is_record and "Callable" not in each.attributes[attribute]


def _targets(
    node: ast.AST, inside: ast.ClassDef | None, around: list[Function]
) -> Iterator[tuple[ast.Attribute, ast.ClassDef | None, list[Function]]]:
    """Every attribute that is assigned or deleted, its class and the functions around it."""
    if isinstance(node, ast.ClassDef):
        inside, around = node, []
    elif isinstance(node, Function):
        around = [*around, node]
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node, inside, around
    for child in ast.iter_child_nodes(node):
        yield from _targets(child, inside, around)
