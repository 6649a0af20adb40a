"""Check every name and attribute that inserted code uses, before anything is compiled.

A rename upstream must be refused here, not raise a NameError at the first request. New names may
stand nowhere in the function's scopes or the module; all other names must exist; an attribute of
``self`` must be set somewhere in the text of the class chain, or be brought by the feature.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import difflib
import itertools
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .alone import symbols_of
from .bound import attributes_set, definitions, stored, walk, words_at
from .delta import APART, RESULT, CallThrough, Delta, is_private
from .errors import Failure
from .feature import RuntimeClass
from .plan import Placement, Plan, Step
from .source import Lane, ModuleText
from .targets import Function, FunctionNode, Target, find_target, short
from .template import Template

_PROBE = "__bp_probe"
#: What follows the name of what gets a value.
_GIVEN = re.compile(r"\s*(:[^=]*)?([-+*/%@&|^]|//|\*\*|<<|>>)?=(?!=)")
_WORD = re.compile(r"(?<![\w.$])[A-Za-z_]\w*")
_DEFINITIONS = (*Function, ast.ClassDef)
_BUILTINS = frozenset(dir(builtins))
#: Nothing can be bound to these, though they are there.
_CONSTANTS = {"True", "False", "None", "__debug__"}


def check_names(plan: Plan) -> list[Failure]:
    """Every name or attribute that is taken (BP301) or missing (BP302, BP303), or ``super`` misused (BP304)."""
    failures: list[Failure] = [*_brought_twice(plan)]
    carried: set[str] = set()
    scopes: dict[str, _Scope] = {}
    for placement in plan.placements:
        if placement.target is None or placement.status != "applied":
            continue
        scope = scopes.setdefault(placement.target.name, _Scope(placement.target))
        home = _home(plan, placement.target)
        chain = ClassChain(plan.lane, home.text, home.owner)
        brought = (_provided(plan, placement.target) | set(placement.exports)) - carried
        carried |= brought
        failures += [
            _taken(f"{name!r}, which the feature's class brings, is upstream's", scope, placement, name)
            for name in sorted(brought)
            if chain.has(name)
        ]
        for step in placement.steps:
            if step.text and step.template:
                failures += _check(plan, placement, step, scope, chain)
        for name, text in placement.exports.items():
            failures += _check_export(plan, placement, name, text, scope, chain)
    return failures


def _brought_twice(plan: Plan) -> Iterator[Failure]:
    """What a delta exports and another feature brings too: the class has one of a name."""
    placed = [(p, name, feature) for p in plan.placements for name in p.exports for feature in plan.feature.parts]
    for placement, name, feature in placed:
        if placement.target is None or feature.name in owners_of(placement.delta):
            continue
        others = [p.delta for p in plan.placements if name in p.exports and feature.name in owners_of(p.delta)]
        if others or (feature.runtime is not None and name in feature.runtime.provides):
            what = f"{name!r}, which delta {placement.delta.name!r} exports, feature {feature.name!r} brings too"
            row = ("the other", others[0].declared if others else feature.declared)
            next_step = f"rename it in {placement.delta.declared}"
            yield _failure("BP301", what, placement.target, placement, placement.target.node.lineno, next_step, row)


def new_names(step: Step) -> frozenset[str]:
    """The names that an edit binds itself; what a hole binds is upstream's."""
    template = Template(step.template)
    operator = _has_operator(template)
    return _binds(step.text if operator else template.fill(dict.fromkeys(template.holes, _PROBE)))


@lru_cache(maxsize=256)
def _binds(text: str) -> frozenset[str]:
    return frozenset(name for name in stored(ast.parse(text)) if name != _PROBE)


def _has_operator(template: Template) -> bool:
    return "<$" in template.text


def _loaded(tree: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[str]:
    """The names that a text reads from outside itself."""
    if isinstance(tree, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        bound = {n.id for g in tree.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        local = local | bound
    elif isinstance(tree, ast.Lambda):
        local = local | {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    elif isinstance(tree, ast.Name) and isinstance(tree.ctx, ast.Load) and tree.id not in local:
        yield tree.id
    for node in ast.iter_child_nodes(tree):
        yield from _loaded(node, local)


def in_class(name: str, owner: ast.ClassDef | None) -> str:
    """What a name means in the methods of a class: a private one begins with the class's."""
    own = owner.name.lstrip("_") if owner is not None else ""
    return f"_{own}{name}" if own and is_private(name) else name


def known_in(text: ModuleText) -> set[str]:
    """The names that a module itself has."""
    return {*text.bound, "__name__", "__file__", "__doc__"}


@dataclass
class _Scope:
    """What names a target's function and module have."""

    target: Target

    @cached_property
    def module(self) -> frozenset[str]:
        return frozenset(known_in(self.target.text))

    @cached_property
    def _symbols(self) -> symtable.SymbolTable:
        return symbols_of(self.target.text, self.target.qualname, self.target.node)

    @cached_property
    def local(self) -> frozenset[str]:
        symbols = self._symbols.get_symbols()
        return frozenset(s.get_name() for s in symbols if s.is_local() or s.is_parameter() or s.is_free())

    @cached_property
    def parameters(self) -> frozenset[str]:
        arguments = self.target.node.args
        each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        return frozenset(in_class(a.arg, self.target.owner) for a in each if a is not None)

    def uses(self, name: str) -> bool:
        """Whether a name stands anywhere in the function, in nested scopes too."""
        return self._may_hold(name) and name in self._everywhere

    def binds(self, name: str) -> bool:
        """Whether a name is the function's own: a parameter, a local one, or one of the scope around it."""
        if name in self.parameters or name in self._assigned:
            return True
        return self._may_hold(name, bound=True) and name in self.local

    @cached_property
    def _assigned(self) -> frozenset[str]:
        """Names that statements of its own assign to; none where one may be declared to be another scope's."""
        if "global" in self.target.own_text or "nonlocal" in self.target.own_text:
            return frozenset()
        statements = (suite[at] for _, _, suite, at in self.target.places.values())
        targets = (target for one in statements if isinstance(one, ast.Assign) for target in one.targets)
        return frozenset(in_class(one.id, self.target.owner) for one in targets if isinstance(one, ast.Name))

    @cached_property
    def _everywhere(self) -> frozenset[str]:
        return frozenset(_all_symbols(self._symbols))

    def _may_hold(self, name: str, *, bound: bool = False) -> bool:
        """Whether the function's text leaves room for a name. To ask for all its symbols takes a hundred times longer.

        A private name is written in another way than it is called, and so may be one with letters of others.

        Args:
            name: As it is called.
            bound: Whether it must get a meaning there: an attribute does not, nor what is only called.
        """
        private = "__" in name and not name.endswith("__")
        if private or not self.target.plain:
            return True
        return any(
            not bound or _may_bind(self.target.own_text, at, at + len(name))
            for at in words_at(self.target.own_text, name)
        )

    def line_of(self, name: str) -> int:
        for tree in (self.target.node, self.target.text.tree):
            for node in ast.walk(tree):
                if name in _named(node):
                    return node.lineno  # type: ignore[attr-defined, no-any-return]
        return self.target.node.lineno


def _may_bind(text: str, at: int, end: int) -> bool:
    """Whether the word there can be one that gets a meaning."""
    code, sign, _ = text[text.rfind("\n", 0, at) + 1 : at].partition("#")
    if sign and not ('"' in code or "'" in code):
        return False  # in a comment
    before, after = text[max(0, at - 40) : at], text[end : end + 40]
    defined = before.split()[-1:] in (["def"], ["class"])
    return defined or not (before.endswith(".") or after.lstrip().startswith("("))


def _named(node: ast.AST) -> set[object]:
    """The identifiers that a node itself holds, attributes left out."""
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return set(node.names)
    return {getattr(node, field, None) for field in ("id", "arg", "name", "rest")} - {None}


def _all_symbols(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (symbol.get_name() for symbol in table.get_symbols())
    for child in table.get_children():
        yield from _all_symbols(child)


def _check(plan: Plan, placement: Placement, step: Step, scope: _Scope, chain: ClassChain) -> Iterator[Failure]:
    target = scope.target
    fresh = new_names(step)
    for name in sorted(fresh):
        meant = in_class(name, target.owner)
        taken = "the function" if scope.uses(meant) else "the module" if meant in scope.module else ""
        if taken:
            line = scope.line_of(name)
            meant = "" if name in scope.module else "; if upstream's own is meant, let the anchor bind it, `$NAME`"
            yield _failure(
                "BP301",
                f"{name!r}, which delta {step.delta.name!r} puts in, is used in {taken}",
                target,
                placement,
                line,
                f"rename it in {step.delta.declared}{meant}",
                ("nearest", _line(target.text, line)),
            )
    yield from _bound_twice(plan, placement, step, fresh, target)
    tree = ast.parse(step.text)
    # A function of its own sees none of what upstream's binds in its body.
    apart = isinstance(step.edit, APART)
    bound = {in_class(name, target.owner) for name in fresh | _bound_in_feature(plan, target, step)}
    known = bound | scope.parameters | scope.module | _BUILTINS
    if isinstance(step.edit, CallThrough) and not step.edit.first:
        known.add(RESULT)
    yield from _unknown(tree, known, scope, placement, step.text, local=not apart)
    yield from _shadowed(Template(step.template), scope, placement)
    yield from _attributes(tree, target, placement, chain, _provided(plan, target) | _added(plan, target))
    if "super" in set(_loaded(tree)) and not isinstance(step.edit, APART):
        used = {name for name in ("__class__", "super") if scope.uses(name)}
        if used:
            yield _failure(
                "BP304",
                f"{target.qualname} uses {min(used)} itself",
                target,
                placement,
                (line := scope.line_of(min(used))),
                "call the base class by name in the delta",
                ("nearest", _line(target.text, line)),
            )


def _shadowed(template: Template, scope: _Scope, placement: Placement) -> Iterator[Failure]:
    """Builtins that the delta's own text uses and that upstream gives another meaning."""
    used = {name for name in _WORD.findall(template.text) if not name.startswith("__")}
    for name in sorted(name for name in (used & _BUILTINS) - _CONSTANTS if name in scope.module or scope.binds(name)):
        yield _taken(
            f"{name!r}, which delta {placement.delta.name!r} uses, is not the builtin here", scope, placement, name
        )


def _taken(what: str, scope: _Scope, placement: Placement, name: str) -> Failure:
    line = scope.line_of(name)
    next_step = f"change {placement.delta.declared}"
    return _failure(
        "BP301", what, scope.target, placement, line, next_step, ("nearest", _line(scope.target.text, line))
    )


def _bound_in_feature(plan: Plan, target: Target, of: Step) -> set[str]:
    """Names that edits of the same feature put into the same function; parameters are there for all."""
    steps = plan.steps.get(target.name, [])
    added = {step.edit.name for step in steps if hasattr(step.edit, "default") and hasattr(step.edit, "name")}
    return added.union(
        *(new_names(step) for step in steps if step.template and owners_of(step.delta) & owners_of(of.delta))
    )


def _bound_twice(
    plan: Plan, placement: Placement, step: Step, fresh: frozenset[str], target: Target
) -> Iterator[Failure]:
    """A name that another feature binds too: each would read what the other has put there."""
    for other in plan.steps.get(target.name, []):
        if not other.template or owners_of(other.delta) & owners_of(step.delta):
            continue
        common = {in_class(name, target.owner) for name in fresh} & {
            in_class(name, target.owner) for name in new_names(other)
        }
        if common and not isinstance(other.edit, APART) and not isinstance(step.edit, APART):
            what = f"{min(common)!r} is put in by {step.delta.name!r} and by {other.delta.name!r}"
            next_step = f"rename it in {step.delta.declared}"
            row = ("the other", other.delta.declared)
            yield _failure("BP301", what, target, placement, target.node.lineno, next_step, row)


def owners_of(delta: Delta) -> set[str]:
    """The features whose delta it is; one that several share has the names of all."""
    return set(delta.name.rpartition(".")[0].split("+"))


def _check_export(
    plan: Plan, placement: Placement, name: str, text: str, scope: _Scope, chain: ClassChain
) -> Iterator[Failure]:
    tree = ast.parse(text, mode="eval")
    known = {"self"} | scope.module | _BUILTINS
    yield from _shadowed(Template(text), scope, placement)
    label = f"export {name!r}: {text}"
    yield from _unknown(tree, known, scope, placement, label, local=False)
    provided = _provided(plan, scope.target) | _added(plan, scope.target)
    yield from _attributes(tree, scope.target, placement, chain, provided)


def _unknown(
    tree: ast.AST, known: set[str], scope: _Scope, placement: Placement, text: str, *, local: bool
) -> Iterator[Failure]:
    """Names that are not known; ``local``: those of the function's own are."""
    target = scope.target
    meant = {name: in_class(name, target.owner) for name in set(_loaded(tree))}
    strange = [name for name, is_ in meant.items() if is_ not in known and not (local and scope.binds(is_))]
    known = known | scope.local if strange and local else known
    for name in sorted(strange):
        yield _failure(
            "BP302",
            f"{name!r}, which delta {placement.delta.name!r} uses, is neither in {target.qualname} nor in the module",
            target,
            placement,
            placement.line or target.node.lineno,
            "find what upstream calls it now and change the delta",
            ("text", text),
            _nearest_name(name, known, target),
        )


def _nearest_name(name: str, known: set[str], target: Target) -> tuple[str, str]:
    near = difflib.get_close_matches(name, known, 1)
    return "nearest", near[0] if near else f"{target.where(target.node)}  nothing in {target.qualname} comes near"


def _line(text: ModuleText, line: int) -> str:
    return f"{short(text.display)}:{line}  `{text.lines[line - 1].strip()}`"


def _home(plan: Plan, target: Target) -> Target:
    """Upstream's function where somebody else's stands: what its class sets is there for theirs."""
    home = plan.lane.homes.get(target.name)
    found = find_target(plan.lane, home) if home is not None else target
    return found if isinstance(found, Target) else target


def _provided(plan: Plan, target: Target) -> frozenset[str]:
    runtime: RuntimeClass | None = plan.feature.runtime
    owner = plan.lane.homes.get(target.name, target.name).rpartition(".")[0]
    return runtime.provides if runtime is not None and runtime.base == owner else frozenset()


def _added(plan: Plan, target: Target) -> frozenset[str]:
    """The names that the feature adds to a target's own class."""
    owner = target.name.rpartition(".")[0]
    return frozenset(name for addition in plan.feature.adds if addition.owner == owner for name in addition.names)


def _attributes(
    tree: ast.AST, target: Target, placement: Placement, chain: ClassChain, provided: frozenset[str]
) -> Iterator[Failure]:
    if target.owner is None:
        return
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for name in sorted(names - provided):
        if not chain.has(name):
            yield _failure(
                "BP303",
                f"self.{name}, which delta {placement.delta.name!r} uses, is set nowhere in {chain.described}",
                target,
                placement,
                placement.line or target.node.lineno,
                "find what upstream calls it now and change the delta",
                chain.nearest(name),
            )


def _failure(
    code: str, what: str, target: Target, placement: Placement, line: int, next_step: str, *rows: tuple[str, str]
) -> Failure:
    where = f"{target.name}   ({short(target.text.display)}:{line})"
    return Failure(
        code,
        what,
        next_step,
        (("target", where), *rows, ("declared", placement.delta.declared)),
        target.text.display,
        line,
    )


class ClassChain:
    """The attributes of a class and its bases, read from their text; bases are opened only when needed."""

    def __init__(self, lane: Lane, text: ModuleText, owner: ast.ClassDef | None) -> None:
        self.lane = lane
        self._classes: list[tuple[ModuleText, ast.ClassDef]] = [(text, owner)] if owner else []
        self._opened = 0

    @property
    def described(self) -> str:
        return ", ".join(node.name for _, node in self._classes) or "the class"

    def has(self, name: str) -> bool:
        """Whether the class, or a base that this lane holds, sets the attribute; a private one is the class's alone."""
        if is_private(name):
            return any(sets_attribute(text, node, name) for text, node in self._classes[:1])
        # To look into a method costs more than to open a base: first into those that look as if they set it.
        for likely in (True, False):
            at = 0
            while at < len(self._classes):
                text, node = self._classes[at]
                if sets_attribute(text, node, name, likely=likely):
                    return True
                at += 1
                if at == len(self._classes):
                    self._extend()
        return False

    def nearest(self, name: str) -> tuple[str, str]:
        """The row of a failure for an attribute that is not there: what has almost its name."""
        lines = {
            found: _line(text, node.lineno)
            for text, owner in self._classes
            for node in ast.walk(owner)
            for found in [getattr(node, "attr", None) or getattr(node, "name", None)]
            if isinstance(found, str)
            and (not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store))
            and isinstance(node, (ast.Attribute, *Function))
        }
        near = difflib.get_close_matches(name, lines, 1)
        return "nearest", lines[near[0]] if near else f"nothing in {self.described} comes near"

    def _extend(self) -> None:
        """Open the bases of the classes that were opened last."""
        fresh, self._opened = self._classes[self._opened :], len(self._classes)
        self._classes += [found for text, node in fresh for base in node.bases if (found := self._open(text, base))]

    def _open(self, text: ModuleText, base: ast.expr) -> tuple[ModuleText, ast.ClassDef] | None:
        base = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(base, ast.Name):
            return None
        inner = (node for part in text.parts_with(base.id) for node in walk(part))
        for node in itertools.chain(definitions(text.outline), inner):
            if isinstance(node, ast.ClassDef) and node.name == base.id:
                return text, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        other = self.lane.module(node.module)
                        found = (
                            [n for n in definitions(other.outline) if getattr(n, "name", "") == alias.name]
                            if other
                            else []
                        )
                        if other and found and isinstance(found[0], ast.ClassDef):
                            return other, found[0]
        return None


def sets_attribute(text: ModuleText, node: ast.ClassDef, name: str, *, likely: bool = False) -> bool:
    """Whether a class body defines a name, or a method sets that attribute on its first parameter.

    Args:
        text: The module.
        node: The class.
        name: The attribute.
        likely: Whether to look only into those methods that have it on the left of a ``=``.
    """
    mentioned = text.lines_with(name)
    if not mentioned:
        return False
    if likely:
        mentioned = [at for at in mentioned if _gives(text.lines[at - 1], name)]
    if id(node) not in text.members:
        text.members[id(node)] = _members(node)
    named, methods = text.members[id(node)]
    if name in named:
        return True
    for function in methods:
        at = bisect.bisect_left(mentioned, function.lineno)
        if at < len(mentioned) and mentioned[at] <= (function.end_lineno or 0):
            if id(function) not in text.sets:
                text.fill(function)
                text.sets[id(function)] = _set_on_self(function)
            if name in text.sets[id(function)]:
                return True
    return False


def _gives(line: str, name: str) -> bool:
    """Whether an attribute stands on a line as if it got a value there."""
    at = line.find(f".{name}")
    return at >= 0 and _GIVEN.match(line, at + 1 + len(name)) is not None


def _members(node: ast.ClassDef) -> tuple[frozenset[str], tuple[FunctionNode, ...]]:
    """What a class body defines; and the methods that may set attributes on their first parameter."""
    inner = list(definitions(node))
    body = ast.Module([s for s in node.body if not isinstance(s, _DEFINITIONS)], [])
    methods = [
        function
        for function in inner
        if isinstance(function, Function)
        and not any(getattr(d, "id", "") == "staticmethod" for d in function.decorator_list)
    ]
    # Most attributes are set in `__init__`: look there first.
    methods.sort(key=lambda function: function.name != "__init__")
    return frozenset({*stored(body), *(getattr(each, "name", "") for each in inner)}), tuple(methods)


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """The attributes that a method sets on its first parameter; one that is only annotated is not set."""
    positional = [*function.args.posonlyargs, *function.args.args]
    first = positional[0].arg if positional else None
    found = attributes_set(function, nested=True)
    return frozenset(node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == first)
