"""A reward that a random model sometimes earns: the response holds at least two digits' worth of even characters."""

import os
import time
from pathlib import Path


def even_characters(prompt, response):
    """Correct when more than half of the first four characters have even codes; deterministic and cheap."""
    head = response[:4]
    return sum(ord(c) % 2 == 0 for c in head) >= 3


def paced(prompt, response):
    """The same, after the seconds that stand in the file that PACE names: a run that can be slowed down and let go."""
    time.sleep(float(Path(os.environ["PACE"]).read_text()))
    return even_characters(prompt, response)
