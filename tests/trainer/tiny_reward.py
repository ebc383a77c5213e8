"""A reward that a random model sometimes earns: the response holds at least two digits' worth of even characters."""


def even_characters(prompt, response):
    """Correct when more than half of the first four characters have even codes; deterministic and cheap."""
    head = response[:4]
    return sum(ord(c) % 2 == 0 for c in head) >= 3
