"""Long lists of cases. `make test` checks some of them, `make test ALL_CASES=1` all."""

import os

ALL_CASES = os.environ.get("ALL_CASES") == "1"


def some(cases, *names):
    """The cases with these names, which must exist; all of them with ALL_CASES=1. A dict stays a dict."""
    assert set(names) <= set(cases), set(names) - set(cases)
    if ALL_CASES:
        return cases
    return {name: cases[name] for name in names} if isinstance(cases, dict) else [*names]
