"""The kinds of drift: for each one sentence, one next step, and an id that stays.

A kind says what became of the thing that a declaration rests on. Whether that hurts is said elsewhere: an anchor that
is ``gone`` needs no edit where another variant of its delta fits.
"""

from __future__ import annotations

import enum

from balance_patcher.errors import CATALOGUE


class Kind(enum.Enum):
    """One kind of drift. The value is the sentence that a person reads."""

    MOVED = "the anchor's statement is as it was, and stands in another place"
    CHANGED = "the anchor's statement was changed"
    AMBIGUOUS = "what the anchor speaks of stands there more than once"
    GONE = "nothing in the target comes near the anchor"
    TARGET_GONE = "the target itself is not where it was"
    ABSORBED = "upstream has what the delta does"
    NEEDLESS = "upstream has nothing that the delta could patch"
    INVARIANT_BROKEN = "what must hold besides the anchors does not"
    CALLEE_CHANGED = "a function that the target calls is another one"
    ATTRIBUTE_GONE = "an attribute or a name that the delta uses is not there"
    REFUSED = "the anchors are found, and what comes of them is refused"
    VARIANT = "another variant of the delta fits"
    MENDED = "the delta applies again"
    UNREADABLE = "it could not be looked at"

    @property
    def label(self) -> str:
        """How it is written: ``callee-changed``."""
        return _ROWS[self][0]

    @property
    def id(self) -> str:
        """The id in :data:`balance_patcher.errors.CATALOGUE`."""
        return _ROWS[self][1]

    @property
    def next(self) -> str:
        """What to do where an edit is needed."""
        return _ROWS[self][2]

    @classmethod
    def of(cls, label: str) -> Kind:
        return next(kind for kind in cls if kind.label == label)


_ROWS: dict[Kind, tuple[str, str, str]] = {
    Kind.MOVED: ("moved", "BP900", "compare the new place with the old one, and add a variant whose levels are those"),
    Kind.CHANGED: ("changed", "BP901", "compare the two statements, and add a variant for the new one"),
    Kind.AMBIGUOUS: ("ambiguous", "BP902", "make the anchor say which of the statements is meant"),
    Kind.GONE: ("gone", "BP903", "read upstream's change, and anchor at what does the job now"),
    Kind.TARGET_GONE: ("target-gone", "BP904", "find what upstream calls it now, and change the delta's target"),
    Kind.ABSORBED: ("absorbed-upstream", "BP905", "delete the delta once no older vLLM is supported"),
    Kind.NEEDLESS: ("not-applicable", "BP906", "nothing; read the reason that the delta gives"),
    Kind.INVARIANT_BROKEN: ("invariant-broken", "BP907", "read upstream's change before anything is applied there"),
    Kind.CALLEE_CHANGED: ("callee-changed", "BP908", "mend copies of the target; a rewritten one calls it as upstream"),
    Kind.ATTRIBUTE_GONE: ("attribute-gone", "BP909", "find what upstream calls it now, and change the delta"),
    Kind.REFUSED: ("refused", "BP910", "read the refusal, and change the delta"),
    Kind.VARIANT: ("variant", "BP911", "nothing; the declaration knows this shape"),
    Kind.MENDED: ("mended", "BP912", "nothing; it was upstream that changed"),
    Kind.UNREADABLE: ("unreadable", "BP913", "mend what keeps it from being read, and look again"),
}

assert all(number in CATALOGUE for _, number, _ in _ROWS.values())  # noqa: S101 - ids are kept in one place
