"""The two kinds of trouble a user can meet: input we refuse, and things worth saying.

Example: ``raise UserError("unknown suite 'mtbnch'; did you mean 'mtbench'?")`` ends the command line with that
sentence on stderr and exit code 2, without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The message is one clear sentence that says what is wrong and how to mend it."""


class SpecbenchWarning(UserWarning):
    """Something a user must know but that does not stop the run; always names the fix."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name nobody registered, with the nearest known names.

    Args:
        kind: what was asked for, singular ("suite", "drafter").
        name: what the user wrote.
        known: the names that exist.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(known)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")
