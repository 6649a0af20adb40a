"""What can go wrong, each with a stable id, and how a person is told.

A :class:`Failure` is one finding: an id, a sentence, labelled fields, and what to do next. A
:class:`PatchError` carries every failure of one operation, so that a person sees all of them at
once. The ids are part of the public interface: they are never reused for something else.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace


class Outcome(enum.IntEnum):
    """How a command ends: the exit status of ``python -m balance_patcher``."""

    HOLDS = 0
    BROKEN = 1
    USAGE = 2
    UNKNOWN = 3

    @classmethod
    def worst(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """The one outcome of several lanes: wrong usage, then broken, then unknown, then holds."""
        rank = [cls.HOLDS, cls.UNKNOWN, cls.BROKEN, cls.USAGE]
        return max(outcomes, key=rank.index, default=cls.HOLDS)


_B, _U, _X = Outcome.BROKEN, Outcome.USAGE, Outcome.UNKNOWN

#: Every id with its title and the outcome that it stands for.
CATALOGUE: dict[str, tuple[str, Outcome]] = {
    # declarations and usage
    "BP001": ("bad pattern", _U),
    "BP002": ("bad declaration", _U),
    "BP003": ("unknown feature or target", _U),
    "BP004": ("bad lane", _U),
    "BP005": ("bad configuration file", _U),
    "BP006": ("bad switch", _U),
    "BP007": ("wrong usage", _U),
    # placing a delta
    "BP101": ("anchor not found", _B),
    "BP102": ("anchor matched more often than declared", _B),
    "BP103": ("more than one variant matched", _B),
    "BP104": ("target function not found", _B),
    "BP105": ("target class not found", _B),
    "BP106": ("target defined more than once", _B),
    "BP107": ("target is decorated", _B),
    "BP108": ("target is async", _B),
    "BP109": ("target is a generator", _B),
    "BP110": ("target module not found", _B),
    "BP111": ("an edit changes nothing", _B),
    "BP112": ("anchor has another operator", _B),
    "BP113": ("anchor does something else", _B),
    "BP114": ("anchor has a second effect", _B),
    "BP115": ("anchor has an else branch", _B),
    "BP116": ("anchor stands outside the target", _B),
    "BP117": ("anchor stands in another place", _B),
    "BP118": ("no order declared at one point", _B),
    "BP119": ("two edits of one node", _B),
    "BP120": ("call shape does not bind", _B),
    "BP121": ("absorbed upstream", _B),
    "BP122": ("no early return of its own", _B),
    "BP123": ("orders contradict each other", _B),
    "BP125": ("only a part of a change is there", _B),
    "BP126": ("nothing to install", _B),
    "BP127": ("nothing to patch", _B),
    "BP130": ("method would be dead", _B),
    # invariants
    "BP201": ("hook not called on every path", _B),
    "BP202": ("hook called more than once on a path", _B),
    "BP203": ("loop has another shape", _B),
    "BP204": ("order of two steps is broken", _B),
    "BP205": ("two places disagree", _B),
    "BP206": ("condition has a side effect", _B),
    "BP207": ("attribute is not set", _B),
    "BP208": ("method is asked in another place", _B),
    # names and compilation
    "BP301": ("name already in use", _B),
    "BP302": ("name does not exist", _B),
    "BP303": ("attribute does not exist", _B),
    "BP304": ("target already captures __class__", _B),
    "BP305": ("rewritten module does not compile", _B),
    # splicing text
    "BP401": ("anchor stands on its header's line", _B),
    "BP402": ("anchor is joined by a semicolon", _B),
    "BP403": ("anchor is an elif", _B),
    "BP404": ("rewritten text fails its proof", _B),
    # could not check
    "BP501": ("package index cannot be reached", _X),
    "BP502": ("version not found", _X),
    "BP503": ("not a vLLM source", _X),
    "BP504": ("archive is damaged", _X),
    "BP505": ("file is too large", _X),
    "BP506": ("git ref not found", _X),
    "BP507": ("not a git repository", _X),
    "BP508": ("source cannot be parsed", _X),
    "BP509": ("pin cannot be proven", _X),
    "BP510": ("lane is not the pinned one", _X),
    "BP511": ("pinned lane is missing", _X),
    "BP512": ("vLLM is not installed", _X),
    "BP513": ("package is missing", _X),
    "BP514": ("file cannot be read", _X),
    "BP515": ("file cannot be written", _X),
    "BP516": ("engine core did not get that far", _X),
    "BP517": ("vLLM is not built for the CPU", _X),
    "BP518": ("an engine of the demo failed", _X),
    "BP519": ("Python is too old", _X),
    "BP599": ("unexpected error", _X),
    # proof against the running code
    "BP601": ("text on disk is not the code in memory", _B),
    "BP602": ("target is wrapped", _B),
    "BP603": ("target was replaced", _B),
    "BP604": ("running code cannot be proven", _X),
    # binding it
    "BP605": ("class cannot be rebased", _B),
    "BP606": ("binding was overwritten", _B),
    "BP607": ("somebody else's attribute would be lost", _B),
    "BP608": ("declared but not installed", _B),
    "BP609": ("what runs is not what is declared", _B),
    "BP610": ("bound with another project's module", _B),
    "BP611": ("engine core or worker did not ask", _B),
    "BP612": ("foreign function cannot be composed with", _B),
    # enabling it in an engine
    "BP701": ("configuration excludes the feature", _B),
    "BP702": ("feature would not be effective", _B),
    "BP703": ("neither yes nor no", _B),
    "BP704": ("ranks differ", _B),
    "BP705": ("rank is silent", _B),
    "BP706": ("another rank cannot", _B),
    "BP707": ("new ranks cannot be asked", _B),
    "BP708": ("a needed feature is missing", _B),
    "BP709": ("two features exclude each other", _B),
    # asking what runs
    "BP740": ("server cannot be reached", _X),
    "BP741": ("server answers something else", _X),
    "BP742": ("metrics cannot be read", _X),
    "BP743": ("not a vLLM server", _X),
    "BP744": ("server has no balance metrics", _X),
    "BP745": ("bad address", _U),
    "BP750": ("no such process", _X),
    "BP751": ("process has no answerer", _X),
    "BP752": ("process is stopped", _X),
    "BP753": ("process does not answer", _X),
    "BP754": ("process has ended", _X),
    "BP755": ("process may not be asked", _X),
    "BP756": ("process is in another network namespace", _X),
    "BP757": ("answer cannot be read", _X),
    "BP758": ("processes cannot be asked on this system", _X),
    # proposing an anchor
    "BP801": ("no such place", _U),
    "BP802": ("line is not in the target", _U),
    "BP803": ("no statement to anchor at", _U),
    "BP804": ("lane has nothing like it", _B),
    "BP805": ("statement cannot be told from others", _B),
    "BP806": ("file exists", _U),
    "BP807": ("name is taken", _U),
    "BP808": ("example does not hold", _B),
    # what became of a declaration along upstream's history: the kinds of tools/drift
    "BP900": ("anchor moved", _B),
    "BP901": ("anchor changed", _B),
    "BP902": ("anchor is ambiguous", _B),
    "BP903": ("anchor is gone", _B),
    "BP904": ("target is gone", _B),
    "BP905": ("upstream has absorbed it", _B),
    "BP906": ("upstream has nothing to patch", _B),
    "BP907": ("invariant broke", _B),
    "BP908": ("callee changed", _B),
    "BP909": ("attribute is gone", _B),
    "BP910": ("rewrite is refused", _B),
    "BP911": ("another variant fits", _B),
    "BP912": ("delta applies again", _B),
    "BP913": ("place in the history cannot be read", _X),
    # reading a history
    "BP920": ("history is not there", _X),
    "BP921": ("refs are in the wrong order", _U),
    "BP922": ("bad range of releases", _U),
    # somebody's copy
    "BP930": ("no such copy", _U),
    "BP931": ("copy of an unknown function", _U),
    # simulating
    "BP950": ("bad line in a trace", _U),
    "BP951": ("bad line of measured steps", _U),
    "BP952": ("simulation failed", _X),
    # measuring
    "BP960": ("cannot be measured", _X),
    "BP961": ("an engine of the check failed", _X),
}


@dataclass(frozen=True)
class Failure:
    """One finding.

    Attributes:
        code: A key of :data:`CATALOGUE`.
        what: One sentence that follows the title.
        fields: Labelled lines, in order: target, anchor, nearest, declared …
        next: What to do now; always there.
        file: The upstream or delta file that the finding is about, if there is one.
        line: Its line, counted from 1.
    """

    code: str
    what: str
    next: str
    fields: tuple[tuple[str, str], ...] = ()
    file: str | None = None
    line: int | None = None

    def __post_init__(self) -> None:
        if self.code not in CATALOGUE:
            raise KeyError(f"{self.code} is not in the catalogue")

    @property
    def title(self) -> str:
        return CATALOGUE[self.code][0]

    @property
    def outcome(self) -> Outcome:
        return CATALOGUE[self.code][1]

    @property
    def headline(self) -> str:
        return f"{self.code} {self.title}: {self.what}"

    def with_fields(self, *fields: tuple[str, str]) -> Failure:
        """The same failure with more labelled lines, ahead of those it has."""
        return replace(self, fields=fields + self.fields)

    def __str__(self) -> str:
        rows = [*self.fields, ("next", self.next)]
        width = max(9, *(len(label) for label, _ in rows)) + 1
        lines = [self.headline]
        for label, value in rows:
            first, *rest = value.split("\n")
            lines.append(f"  {label:<{width}}{first}".rstrip())
            lines += [f"  {'':<{width}}{more}".rstrip() for more in rest]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The failure for JSON: id, title, sentence, fields, next step, file and line."""
        return {
            "code": self.code,
            "title": self.title,
            "what": self.what,
            "fields": dict(self.fields),
            "next": self.next,
            "file": self.file,
            "line": self.line,
        }


class PatchError(Exception):
    """One or more failures that stop what was asked for."""

    def __init__(self, *failures: Failure) -> None:
        if not failures:
            raise ValueError("a PatchError needs at least one failure")
        super().__init__("\n\n".join(str(failure) for failure in failures))
        self.failures = failures

    @property
    def outcome(self) -> Outcome:
        return Outcome.worst(failure.outcome for failure in self.failures)


def refuse(
    code: str,
    what: str,
    *fields: tuple[str, str],
    next: str,  # noqa: A002 - the word that a person reads
    file: str | None = None,
    line: int | None = None,
) -> PatchError:
    """A :class:`PatchError` with one failure, to be raised by the caller."""
    return PatchError(Failure(code, what, next, fields, file, line))


def did_you_mean(written: str, known: Iterable[str], otherwise: str) -> str:
    """What to do about a name that there is not: the one that is nearest, if one is near, ahead of all else."""
    near = difflib.get_close_matches(written, list(known), 1)
    return f"did you mean `{near[0]}`? {otherwise}" if near else otherwise
