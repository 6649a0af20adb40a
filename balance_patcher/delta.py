"""What a file in ``deltas/`` is written in: anchors, edits, deltas and features.

Everything here is a frozen declaration. It is checked when it is made, so a wrong declaration
is an error at import (BP001, BP002) and never a patch that silently finds nothing.
"""

from __future__ import annotations

import ast
import keyword
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from .errors import PatchError, refuse
from .holes import scan
from .matching import Bound
from .pattern import Pattern, compile_pattern
from .template import Template

_T = TypeVar("_T")

#: In the text of a :class:`Prologue`: the target's own parameters, as call arguments.
PARAMETERS = "PARAMETERS"

TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Level:
    """A compound statement around the anchor that has a name of its own.

    Attributes:
        name: What edits call it: ``InsertBefore(..., at="loop")``.
        pattern: A pattern; mostly a header, ``while $_``.
        direct: The next level (or the anchor) stands directly in its body, with nothing between.
        outermost: It stands directly in the function, and what it holds in no ``else``.
    """

    name: str
    pattern: str
    direct: bool = True
    outermost: bool = False


@dataclass(frozen=True)
class Anchor:
    """A pattern and where it must stand; it is matched exactly once.

    Attributes:
        pattern: What to find, see :mod:`balance_patcher.pattern`.
        inside: The levels around it, the outermost first.
        after: A pattern that the statement directly before it matches.
        before: A pattern that the statement directly after it matches.
        allow: For a hole, the texts that it may be bound to.
    """

    pattern: str
    inside: tuple[Level, ...] = ()
    after: str | None = None
    before: str | None = None
    allow: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_all("inside", self.inside, Level)
        holes = declared_here(lambda: self.holes)  # compiles every pattern, so a bad one is an error here
        for name, texts in self.allow.items():
            if name not in holes:
                raise bad(f"`allow` names ${name}, which the anchor does not bind")
            need_all(f"allow[{name!r}]", texts, str)
        for level in self.inside:
            if compile_pattern(level.pattern).kind in ("expression", "statements"):
                raise bad(f"level {level.name!r} is no compound statement: `{level.pattern}`")
        for text in (self.after, self.before):
            if text and compile_pattern(text).kind == "statements":
                raise bad(f"`after` and `before` are one statement each: `{compile_pattern(text)}`")
        if self.compiled.kind == "statements" and self.compiled.opens:
            raise bad(f"a run of statements has a fixed length; `$$$` cannot stand among them: `{self.compiled}`")
        names = [level.name for level in self.inside]
        if len(set(names)) < len(names) or "anchor" in names:
            raise bad("levels need names of their own, and `anchor` is taken")

    @property
    def compiled(self) -> Pattern:
        return compile_pattern(self.pattern)

    @property
    def holes(self) -> frozenset[str]:
        """Every name that a match binds."""
        texts = [self.pattern, *(level.pattern for level in self.inside), self.after, self.before]
        return frozenset().union(*(compile_pattern(text).holes for text in texts if text))

    @property
    def operators(self) -> frozenset[str]:
        """Those of them that stand for an operator."""
        texts = [self.pattern, *(level.pattern for level in self.inside), self.after, self.before]
        return frozenset().union(*(_operators(text) for text in texts if text))

    def __str__(self) -> str:
        parts = [f"`{self.compiled}`"]
        parts += [f"inside  `{compile_pattern(level.pattern)}`" for level in reversed(self.inside)]
        if self.after:
            parts.append(f"after  `{compile_pattern(self.after)}`")
        if self.before:
            parts.append(f"before  `{compile_pattern(self.before)}`")
        return "  ".join(parts)


@dataclass(frozen=True)
class There:
    """What stands exactly once in another function, ``module:Qual.name``, where a variant is the right one."""

    target: str
    pattern: str

    def __post_init__(self) -> None:
        check_target("`There`", self.target)
        declared_here(lambda: compile_pattern(self.pattern))


@dataclass(frozen=True)
class Nowhere:
    """A name, ``module:Class.name``, that its module does not have in any way where a variant is the right one."""

    target: str

    def __post_init__(self) -> None:
        check_target("`Nowhere`", self.target)


@dataclass(frozen=True)
class InsertBefore:
    """Put statements before the anchor or before one of its levels."""

    text: str
    at: str = "anchor"


@dataclass(frozen=True)
class InsertAfter:
    """Put statements after the anchor or after one of its levels."""

    text: str
    at: str = "anchor"


@dataclass(frozen=True)
class Replace:
    """Put statements in the anchor's place; its comments are kept above them."""

    text: str
    at: str = "anchor"


@dataclass(frozen=True)
class Prologue:
    """Put statements first in the function, after its docstring.

    ``$$$PARAMETERS`` stands for upstream's own parameters, passed on as call arguments.
    """

    text: str


@dataclass(frozen=True)
class AddParameter:
    """Add a parameter that has a literal default, if the function has none of that name."""

    name: str
    default: str


#: What upstream's function has returned, in the text of a call-through that comes after it.
RESULT = "balance_result"


@dataclass(frozen=True)
class CallThrough:
    """Call upstream's function, then run ``then``, and return upstream's result unchanged.

    If upstream raises, ``then`` does not run; it may read the result as ``balance_result``. With ``first`` it runs
    before upstream's function is called; what it raises keeps that from being called.
    """

    then: str
    first: bool = False


@dataclass(frozen=True)
class Override:
    """Give the feature's class a method of its own over upstream's, which ``super()`` reaches.

    Upstream's text stays as it is. What the variant's anchor binds is used in place of reading it at run time, so the
    anchor has to be all that upstream's method does, its docstring apart. ``$$$PARAMETERS`` passes its parameters on.
    """

    text: str


#: What is a function of its own and leaves upstream's text as it is.
APART = (CallThrough, Override)

Edit = InsertBefore | InsertAfter | Replace | Prologue | AddParameter | CallThrough | Override
TextEdit = InsertBefore | InsertAfter | Replace


@dataclass(frozen=True)
class Variant:
    """One upstream shape of a delta; exactly one variant of a delta may match.

    Attributes:
        name: Short, for tables.
        anchor: Where the edits go; ``None`` when they need only the function itself.
        edits: What is done, in this order where two stand at one point.
        exports: Texts that the feature's runtime class gets as methods, by name; holes are filled.
        status: ``applied``; or ``absorbed`` and ``not-applicable``, which have no edits.
        note: A sentence for the report.
        given: What must be so in other functions; with only some of it, the anchor is refused.
    """

    name: str
    anchor: Anchor | None = None
    edits: tuple[Edit, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)
    status: str = "applied"
    note: str = ""
    given: tuple[There | Nowhere, ...] = ()

    def __post_init__(self) -> None:
        need_all("edits", self.edits, Edit)
        need_all("given", self.given, There | Nowhere)
        if self.status not in ("applied", "absorbed", "not-applicable"):
            raise bad(f"variant {self.name!r} has the unknown status {self.status!r}")
        if (self.status == "applied") != bool(self.edits):
            raise bad(f"variant {self.name!r}: edits go with `applied`, and only with it")
        if self.status != "applied" and self.anchor is None and not self.given:
            raise bad(f"variant {self.name!r} has no anchor, so it would match everything")
        known = (self.anchor.holes if self.anchor else frozenset()) | {PARAMETERS}
        operators = self.anchor.operators if self.anchor else frozenset()
        for text in [*map(edit_text, self.edits), *self.exports.values()]:
            unknown = Template(text).holes - known
            if unknown:
                raise bad(f"variant {self.name!r} uses ${min(unknown)}, which its anchor does not bind")
            wrong = _operators(text) - operators
            if wrong:
                raise bad(f"variant {self.name!r} uses <${min(wrong)}>, which is no operator in its anchor")
        for name, text in self.exports.items():
            _check_export(name, text)
        levels = {"anchor", *(level.name for level in (self.anchor.inside if self.anchor else ()))}
        for edit in self.edits:
            if isinstance(edit, TextEdit) and (self.anchor is None or edit.at not in levels):
                raise bad(f"variant {self.name!r} edits at {edit.at!r}, which is no level of its anchor")
            _check_text(edit)


def edit_text(edit: Edit) -> str:
    """The Python text of an edit, holes and all; empty for a parameter."""
    if isinstance(edit, AddParameter):
        return ""
    return edit.then if isinstance(edit, CallThrough) else edit.text


def _check_text(edit: Edit) -> None:
    if isinstance(edit, AddParameter):
        _check_parameter(edit)
        return
    template = Template(edit_text(edit))
    probe = _probe(template)
    try:
        tree = ast.parse(probe)
    except SyntaxError as error:
        raise bad(f"the text of an edit is not Python ({error.msg})", ("text", template.text)) from None
    if all(map(_does_nothing, tree.body)):
        raise bad(f"the text of an edit does nothing: `{' '.join(template.text.split())}`")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            raise bad("an edit must not rely on `assert`, which -O removes; write `if …: raise`")
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            raise bad("an edit must not declare global or nonlocal names")
    suspends = any(map(_suspends, tree.body))
    if isinstance(edit, CallThrough) and (suspends or any(map(_leaves, tree.body))):
        raise bad("a call-through returns upstream's result: no return, yield or await of its own")
    if suspends:
        raise bad("an edit must not yield or await: of a plain function it would make another kind")
    _check_compiles(edit, tree, template.text)
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    if isinstance(edit, CallThrough) and any(node.id == RESULT for node in names):
        raise bad(f"a call-through returns upstream's result: `{RESULT}` stays what it is")
    marked = "\n".join(f"{line}  # mark" if line.strip() else line for line in probe.splitlines())
    try:
        same = ast.dump(ast.parse(marked)) == ast.dump(tree)
    except SyntaxError:
        same = False
    if not same or "\\\n" in probe:
        raise bad("every line of an edit ends in a marker comment: no multi-line strings, no backslashes")


def _check_compiles(edit: Edit, tree: ast.Module, text: str) -> None:
    """What parses need not compile: a ``break`` needs a loop, which upstream may have around what is put in."""
    looping = isinstance(edit, TextEdit)
    holder = ast.parse("def edit(self):\n    while self:\n        pass" if looping else "def edit(self):\n    pass")
    function: Any = holder.body[0]
    (function.body[0] if looping else function).body = tree.body
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(holder, "<edit>", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise bad(f"the text of an edit cannot stand in a function ({error.msg})", ("text", text)) from None


def _check_parameter(edit: AddParameter) -> None:
    if not edit.name.isidentifier() or keyword.iskeyword(edit.name) or is_private(edit.name):
        raise bad(f"a parameter cannot be called {edit.name!r}")
    try:
        ast.literal_eval(edit.default)
        literal = len(edit.default.splitlines()) == 1
    except (ValueError, SyntaxError, TypeError):
        literal = False
    if not literal:
        raise bad(f"the default of parameter {edit.name!r} is no literal on one line: {edit.default}")


def _check_export(name: str, text: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or is_private(name):
        raise bad(f"an export cannot be called {name!r}")
    try:
        ast.parse(_probe(Template(text)), mode="eval")
    except SyntaxError:
        raise bad(f"the export {name!r} is no expression: {text}") from None


def _does_nothing(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Pass) or isinstance(value, ast.Constant)


def _leaves(node: ast.AST) -> bool:
    """Whether a statement leaves the function that it stands in."""
    return any(isinstance(inner, ast.Return) for inner in _own(node))


def _suspends(node: ast.AST) -> bool:
    """Whether a statement suspends it, in a comprehension too: that makes a generator of it, or a coroutine."""
    kinds = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
    return any(isinstance(inner, kinds) or getattr(inner, "is_async", 0) for inner in _own(node))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement but those of functions, classes and lambdas in it."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _own(child)


def _operators(text: str) -> frozenset[str]:
    return frozenset(hole.name for hole in scan(text) if hole.kind == "op" and hole.name != "_")


def _probe(template: Template) -> str:
    """The text with something harmless in every hole."""
    bound: dict[str, Bound] = dict.fromkeys(template.holes, "probe")
    bound.update({hole.name: ast.Eq() for hole in scan(template.text) if hole.kind == "op"})
    return template.fill(bound)


@dataclass(frozen=True)
class Delta:
    """A named edit set on one target.

    Attributes:
        name: ``feature.what``, unique.
        target: ``module:Qual.name`` of the upstream function.
        why: Why it is needed, in a sentence or two.
        upstream: The upstream change or code that it refers to.
        remove_when: What must be true upstream so that it can go.
        variants: One for each upstream shape.
        after: Deltas that come before this one where both edit at one point.
        unless_missing: Why there is nothing to patch where upstream has no such module, class or function: the
            status is ``not-applicable`` then. Without it, a missing target is a failure.
        not_with: Upstream functions that only an older shape has, each with the reason why there is nothing to patch
            beside it: the status is ``not-applicable`` where one is there. That one is gone says nothing.
    """

    name: str
    target: str
    why: str
    upstream: str
    remove_when: str
    variants: tuple[Variant, ...]
    after: tuple[str, ...] = ()
    unless_missing: str = ""
    not_with: Mapping[str, str] = field(default_factory=dict)
    declared: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_target(repr(self.name), self.target)
        need_all("variants", self.variants, Variant)
        if not self.variants:
            raise bad(f"delta {self.name!r} has no variants")
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            raise bad(f"delta {self.name!r} has two variants of one name")
        for name, why in self.not_with.items():
            if not TARGET.fullmatch(name) or not why.strip():
                raise bad(f"`not_with` of {self.name!r} is `module:Qual.name` and a reason: {name!r}, {why!r}")
        for label in ("why", "upstream", "remove_when"):
            if not getattr(self, label).strip():
                raise bad(f"delta {self.name!r} does not say `{label}`")
        if not self.declared:
            object.__setattr__(self, "declared", declared_at())

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


def check_target(whose: str, target: str) -> None:
    if not TARGET.fullmatch(target):
        raise bad(f"the target of {whose} is not written `module:Qual.name`: {target!r}")
    private = next(filter(is_private, target.partition(":")[2].split(".")[1:]), None)
    if private is not None:
        raise bad(f"the target of {whose} is {private}, which Python keeps private to its class: edit what calls it")


def is_private(name: str) -> bool:
    """Whether a name in a class means one that begins with the class's."""
    return name.startswith("__") and not name.endswith("__")


def declared_at() -> str:
    """``deltas/balance.py:41``: the line of the declaration that is being made."""
    frame = sys._getframe(1)  # noqa: SLF001 - a tenth of the time of `inspect.stack`
    while frame.f_back and frame.f_globals.get("__name__", "").rpartition(".")[0] == __package__:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{_shown(path)}:{frame.f_lineno}"


def _shown(path: Path) -> str:
    """A path as a person can open it; of a delta of ours as it is in the repository, wherever that is installed."""
    if path.parent.name == "deltas":
        return f"deltas/{path.name}"
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return str(path)


def bad(what: str, *rows: tuple[str, str]) -> PatchError:
    """The error (BP002) for a wrong declaration, with the line that it stands on."""
    return refuse("BP002", what, *rows, ("declared", declared_at()), next="mend the declaration; nothing was patched")


def need_all(what: str, values: object, kind: Any) -> None:
    """Refuse what is no tuple of one kind: a forgotten comma makes a text of a tuple, and a text has an ``in``."""
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        names = getattr(kind, "__name__", None) or " or ".join(one.__name__ for one in get_args(kind))
        raise bad(f"`{what}` is no tuple of {names}: {values!r}; one alone is written (…,)")


def declared_here(compiled: Callable[[], _T]) -> _T:
    """What a pattern compiles to; a bad one is refused with the line of the declaration."""
    try:
        return compiled()
    except PatchError as error:
        raise PatchError(*(failure.with_fields(("declared", declared_at())) for failure in error.failures)) from None
