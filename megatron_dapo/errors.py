"""Errors whose message is for the user: what was expected, what was found, where, and what to do."""


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
