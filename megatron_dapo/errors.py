"""Errors whose message is for the user: what was expected, what was found, where, and what to do."""


class UserError(Exception):
    """The command line prints the message alone, without a traceback, and exits with code 2."""
