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


class NoCheckpoints:
    """Saves nothing."""

    last = None

    def advance(self):
        return True

    def require_best(self, names):
        pass


class FakeCheckpoints:
    """Saves that are done at once."""

    def __init__(self, log):
        self.log, self.last, self.saved = log, None, []
        self.advance = lambda: True
        self.finish = lambda: log.append("saves finished")
        self.abandon, self.newest, self.restored = lambda: None, lambda: None, lambda _: None
        self.require_best = lambda names: log.append("best")

    def start(self, step, incarnation, groups, state, *, history, metrics):
        self.log.append(f"save {' and '.join(groups)} {step}")
        self.last = step
        self.saved.append((state, history, metrics))
