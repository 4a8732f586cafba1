"""Helpers that make all calls of a training step to the collector, for tests with nothing to do between the calls."""

from rltrain.batch.data_proto import DataProto
from rltrain.trajectories.collector import Collector


async def collect(collector: Collector, version: int) -> DataProto:
    """Wait for the next answers and their scores, end the step, and return the batch."""
    return (await collect_with_metrics(collector, version))[0]


async def collect_with_metrics(collector: Collector, version: int) -> tuple[DataProto, dict[str, float]]:
    """Collect a step's batch, and return the batch with the metrics of all generated groups."""
    found = await collector.scored(await collector.answers(version))
    collector.take()
    return found
