"""What the stand-ins for engines and reward workers share."""


class Immortal:
    """Engines none of which dies, and that need no weights."""

    def load(self, actor, version, *, check):
        """Whatever they are."""

    def sleep(self):
        """They have nothing to give up."""

    def look(self):
        """Nobody dies."""

    def mend(self):
        """Nobody has died."""

    def take_lost(self):
        return set()


class Waiting(Immortal):
    """Keeps what it is asked for until a subclass's `poll` takes it."""

    def __init__(self):
        self.waiting = []

    def submit(self, requests):
        self.waiting += requests

    def abort(self):
        self.waiting = []

    @property
    def pending(self):
        return len(self.waiting)
