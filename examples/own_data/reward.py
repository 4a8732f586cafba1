"""Rewards of one's own: `prompt` and `response` are text, every other parameter is a column of the data by its name."""


def right(response, largest, finish_reason):
    """1 where the last character is the largest digit and the answer was finished, else 0."""
    return float(finish_reason == "stop" and response[-1:] == str(largest))


def length(response):
    """Characters of the answer: with a small negative weight, of two right answers the shorter one is better."""
    return len(response)
