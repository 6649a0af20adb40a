"""Somebody else's function on a target, and our edits in it: only if an operator asks for that by its name.

A function that was put in upstream's place is refused as a rule, by module, file and line: what it does is not
known here. ``BALANCE_PATCHER_COMPOSE`` names those that are to be kept and edited like upstream's. Then its text
is taken in place of upstream's: it has to be the code that runs, and every anchor, invariant, name and proof has
to hold in it as it would in upstream's own. A wrapper has no place for an anchor; what is only called through
can be called through it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType

from .byname import composed_with
from .delta import AddParameter, CallThrough
from .errors import Failure, PatchError, refuse
from .feature import Agree, AskedOnce, CalledOnce, Feature, Invariant, Ordered, Sets
from .proof import compile_text, in_module, place_of, reached, same_code
from .source import Lane, ModuleText, Overlaid, module_text
from .targets import Target


@dataclass(frozen=True)
class Moved:
    """A feature whose deltas stand on somebody else's functions, where it was declared for upstream's.

    Attributes:
        feature: With their functions as targets.
        lane: With the text of their modules.
        homes: For each such function the place where it stands, ``module:Qual.name`` of upstream.
        failures: Why some of those that were asked for cannot be had.
    """

    feature: Feature
    lane: Lane
    homes: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    def home(self, target: str) -> str:
        """Where a target of the moved feature is bound."""
        return self.homes.get(target, target)


def move(feature: Feature, lane: Lane, live: Callable[[str], object]) -> Moved:
    """Put a feature's deltas on the foreign functions that stand on its targets and that are asked for.

    Args:
        feature: The feature.
        lane: Where upstream's text comes from.
        live: What stands on a target in this process.

    Raises:
        PatchError: BP006.
    """
    names = composed_with()
    homes: dict[str, str] = {}
    texts: dict[str, ModuleText] = {}
    failures = []
    for target in feature.targets if names else ():
        try:
            found = live(target)
        except PatchError:
            continue  # it is told where the target is proven
        name = in_module(found) if isinstance(found, FunctionType) else target
        if name not in names - {target} or not isinstance(found, FunctionType) or _calls_through(feature, target):
            continue
        try:
            if name in homes:
                raise refuse(
                    "BP612", f"{place_of(found)} stands on {homes[name]} too, and our edits differ there",
                    next="switch one of the two off",
                )  # fmt: skip
            _refuse_another_call(feature, target, found)
            texts[name.partition(":")[0]] = _text(found)
        except PatchError as error:
            failures += [failure.with_fields(("target", target)) for failure in error.failures]
            continue
        homes[name] = target
    if not homes:
        return Moved(feature, lane, {}, tuple(failures))
    moves = {target: name for name, target in homes.items()}
    return Moved(_onto(feature, moves), Overlaid(lane, texts, homes), homes, tuple(failures))


def _onto(feature: Feature, moves: Mapping[str, str]) -> Feature:
    def moved(invariant: Invariant) -> Invariant:
        if isinstance(invariant, AskedOnce):
            target, caller = (moves.get(name, name) for name in (invariant.target, invariant.caller))
            return replace(invariant, target=target, caller=caller)
        if isinstance(invariant, (CalledOnce, Ordered, Sets, Agree)):
            return replace(invariant, target=moves.get(invariant.target, invariant.target))
        return invariant

    return replace(
        feature,
        deltas=tuple(replace(delta, target=moves.get(delta.target, delta.target)) for delta in feature.deltas),
        invariants=tuple(map(moved, feature.invariants)),
    )


def _calls_through(feature: Feature, target: str) -> bool:
    """Whether nothing of a target's text is edited: it is called, whatever it is."""
    edits = [e for d in feature.deltas if d.target == target for variant in d.variants for e in variant.edits]
    return all(isinstance(edit, CallThrough) for edit in edits)


def _refuse_another_call(feature: Feature, target: str, function: FunctionType) -> None:
    """It must be callable as the target is, with the parameters that the feature adds (else BP612)."""
    edits = [edit for d in feature.deltas if d.target == target for variant in d.variants for edit in variant.edits]
    added = {edit.name for edit in edits if isinstance(edit, AddParameter)}
    for shape in feature.call_shapes:
        call = ast.parse(f"f({shape.arguments})", mode="eval").body
        if shape.target != target or not isinstance(call, ast.Call):
            continue
        itself = [None] if "." in target.partition(":")[2] else []
        try:
            named = {k.arg: None for k in call.keywords if k.arg is not None}
            _with_added(function, added).bind(*itself, *(None for _ in call.args), **named)
        except TypeError as error:
            raise refuse(
                "BP612", f"{place_of(function)} cannot be called as {target}({shape.arguments}) is: {error}",
                next="let it take the parameters that upstream's has",
            ) from error  # fmt: skip


def _with_added(function: FunctionType, added: set[str]) -> inspect.Signature:
    """A function's signature with the parameters that the feature gives it: behind those that have a place."""
    own = inspect.signature(function, follow_wrapped=False)
    parameters = list(own.parameters.values())
    placed = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters[placed:placed] = [
        inspect.Parameter(name, kind, default=None) for name in sorted(added - own.parameters.keys())
    ]
    return own.replace(parameters=parameters)


def _text(function: FunctionType) -> ModuleText:
    """The text of a function's module, from its file.

    Raises:
        PatchError: BP612, if there is none, or if the function's text alone does not say what it is.
    """
    name = in_module(function)
    if "<locals>" in name:
        raise refuse(
            "BP612", f"{place_of(function)} is made inside another function, and has no place for our edits",
            next="if it is a wrapper, apply it after balance_patcher: ours is reached through it then",
        )  # fmt: skip
    if hasattr(function, "__wrapped__"):
        raise refuse(
            "BP612", f"{place_of(function)} is a wrapper, and has no place for our edits",
            next="apply it after balance_patcher: ours is reached through it then; or switch one of the two off",
        )  # fmt: skip
    file = function.__code__.co_filename
    data = _read(file)
    if data is None:
        raise refuse(
            "BP612", f"the text of {place_of(function)} cannot be read",
            next="install it as source, or switch one of the two off",
        )  # fmt: skip
    return module_text(name.partition(":")[0], file, file, data)


def _read(file: str) -> bytes | None:
    """The bytes of a file, or of what ``linecache`` shows under a name that is none."""
    try:
        return Path(file).read_bytes()
    except OSError:
        shown = "".join(linecache.getlines(file))
        return shown.encode() if shown else None


# -- what is only called through --------------------------------------------------------------


def callable_there(feature: Feature, target: Target, home: str, live: object) -> FunctionType | None:
    """The foreign function on a target that is only called through, if it is asked for; ``None`` if it is not.

    Args:
        feature: The feature whose deltas stand there.
        target: Upstream's function.
        home: Its name.
        live: What stands there.

    Raises:
        PatchError: BP612, if its code is not that of its file, or if it is not called as upstream's is.
    """
    if not isinstance(live, FunctionType) or not _calls_through(feature, home):
        return None
    around = list(_foreign(target, live))
    foreign = [outer for outer in around if isinstance(outer, FunctionType)]
    # An object that is called in between does work of its own, and has no name that anybody could have asked for.
    # With nobody around, it is upstream's own, and proven as such.
    named = {in_module(function) for function in foreign}
    if not named or len(foreign) < len(around) or not named <= composed_with():
        return None
    for function in foreign:
        if not _is_its_text(function):
            raise refuse(
                "BP612", f"{place_of(function)} was not compiled from the text of its file", ("target", home),
                next="restart the process if the file was changed, or switch one of the two off",
            )  # fmt: skip
    try:
        arguments = target.node.args
        positional = [None for _ in (*arguments.posonlyargs, *arguments.args)]
        inspect.signature(live, follow_wrapped=False).bind(*positional, **{a.arg: None for a in arguments.kwonlyargs})
    except TypeError as error:
        raise refuse(
            "BP612", f"{place_of(live)} cannot be called as {target.qualname} is: {error}", ("target", home),
            next="let it take the parameters that upstream's has",
        ) from error  # fmt: skip
    return live


def _foreign(target: Target, live: FunctionType) -> Iterator[object]:
    """What stands around upstream's function; or what stands in its place, alone."""
    for function, around in reached(live):
        if in_module(function) == target.name:
            yield from around
            return
    yield live


def _is_its_text(function: FunctionType) -> bool:
    code = function.__code__
    data = _read(code.co_filename)
    if data is None:
        return False
    try:
        text = module_text("", code.co_filename, code.co_filename, data)
        compiled = compile_text(text.text, code.co_filename)
    except (PatchError, SyntaxError, ValueError):
        return False
    return any(found.co_firstlineno == code.co_firstlineno and same_code(found, code) for found in _codes(compiled))


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


# -- a function outside of a class, as a method -----------------------------------------------


def as_method(text: str, filename: str, function: ast.AST) -> CodeType:
    """Compile a module's function so that ``super()`` in it means the class that it is bound to.

    It stands in no class, so the compiler would know of none: it is compiled inside a function whose parameter
    is called as the cell is.
    """
    tree = ast.parse(text)
    future = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    line = getattr(function, "lineno", 0)
    own = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.lineno == line)
    outer = ast.parse("def upstream(__class__):\n    pass")
    outer.body[0].body = [own]  # type: ignore[attr-defined]
    outer.body = [*future, *outer.body]
    module = compile(outer, filename, "exec", dont_inherit=True)
    enclosing = next(code for code in module.co_consts if isinstance(code, CodeType))
    code = next(code for code in enclosing.co_consts if isinstance(code, CodeType) and code.co_name == own.name)
    qualname = {"co_qualname": own.name} if hasattr(code, "co_qualname") else {}
    return code.replace(**qualname)  # type: ignore[arg-type]
