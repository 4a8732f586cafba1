"""What the stand-ins for engines, reward workers and checkpoints share."""


class Immortal:
    """Engines that never die and need no weights. A subclass has `submit`, `pending` and the coroutine `poll`."""

    async def load(self, ranks, version, *, check):
        """Take the weights."""

    async def hold_weights(self):
        """Nothing waits for weights."""

    async def sleep(self):
        """Keep the memory."""

    def take_lost(self):
        return set()


class Waiting(Immortal):
    """Keeps the requests until a subclass's `poll` takes them."""

    def __init__(self):
        self.waiting = []

    def submit(self, requests):
        self.waiting += requests

    async def abort(self):
        self.waiting = []

    @property
    def pending(self):
        return len(self.waiting)


class NoCheckpoints:
    """Saves nothing."""

    last = None

    async def finish(self):
        pass

    def require_best(self, names):
        pass


class FakeCheckpoints:
    """Saves that are complete at once."""

    def __init__(self, log):
        self.log, self.last, self.saved = log, None, []
        self.newest, self.restored = lambda: None, lambda _: None
        self.require_best = lambda names: log.append("best")

    async def finish(self):
        self.log.append("saves finished")

    async def abandon(self):
        pass

    async def start(self, step, incarnation, groups, state, *, history, metrics):
        self.log.append(f"save {' and '.join(groups)} {step}")
        self.last = step
        self.saved.append((state, history, metrics))
