"""Errors whose message is for the user: what was expected, what was found, where, and what to do. `printable` makes
texts of others safe for a terminal."""

import re

# All but line break and tab: escape sequences, carriage returns, and marks that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Control characters as they are written in Python: a response or a row must not move the cursor or clear the
    screen of a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """The command line prints the message alone, without a traceback, and exits with code 2."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message says what to change."""


class EngineError(UserError):
    """An engine failed; the message names the server, the operation and the cause."""


class RankError(UserError):
    """A rank failed. Every rank raises it, and the message begins with the failed rank's reason."""


class RanksTimedOut(RankError):
    """Ranks did not finish in the time they had."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or loaded; the message names the file or directory and the reason."""


class GateError(UserError):
    """Trainer and engine disagree too much to train."""


class LockLost(UserError):
    """The lock of this run was removed or taken over: this run must not write any more."""
