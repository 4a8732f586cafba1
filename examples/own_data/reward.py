"""Two reward functions: rltrain passes `response` and `finish_reason`, and `largest` is a column of the data."""


def right(response, largest, finish_reason):
    """Return 1 if the answer is finished and its last character is the largest digit, otherwise 0."""
    return float(finish_reason == "stop" and response[-1:] == str(largest))


def length(response):
    """Return the number of characters. A small negative weight makes the shorter of two right answers score higher."""
    return len(response)
