"""A grader that takes its time."""

import time


def right(prompt, response):
    time.sleep(2)
    return response == prompt.answer
