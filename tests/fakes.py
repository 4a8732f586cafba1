"""What the stand-ins for engines and reward workers share."""


class Waiting:
    """Keeps what it is asked for until a subclass's `poll` takes it."""

    def __init__(self):
        self.waiting = []

    def submit(self, requests):
        self.waiting += requests

    @property
    def pending(self):
        return len(self.waiting)


class NoCheckpoints:
    """Saves nothing."""

    last = None

    def advance(self):
        return True
