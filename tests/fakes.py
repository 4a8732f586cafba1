"""Code that the fakes of engines, reward workers and checkpoints share."""

import asyncio


async def turns(count: int = 10) -> None:
    """Let all other tasks run for `count` iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


class Immortal:
    """Fake engines that never die and need no weights.

    A subclass defines `submit`, `pending` and the coroutine `poll`.
    """

    async def load(self, ranks, version, *, check):
        """Accept the weights, and do nothing."""

    async def hold_weights(self):
        """Do nothing, because no answer of the fake waits for weights."""

    async def sleep(self):
        """Do nothing, because the fake holds no device memory."""

    def take_lost(self):
        return set()


class Waiting(Immortal):
    """Fake engines that keep requests until a subclass's `poll` takes them."""

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
    """Fake checkpoints that save nothing."""

    last = None

    async def finish(self):
        pass

    def require_best(self, names):
        pass


class FakeCheckpoints:
    """Fake checkpoints whose saves are complete at once."""

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
