"""What a training step asks of the collector, for tests that have nothing to do in between."""

from rltrain.batch.data_proto import DataProto
from rltrain.trajectories.collector import Collector


async def collect(collector: Collector, version: int) -> DataProto:
    """Wait for the next answers and then for their scores, and end the step."""
    return (await collect_with_metrics(collector, version))[0]


async def collect_with_metrics(collector: Collector, version: int) -> tuple[DataProto, dict[str, float]]:
    """The same, with the metrics of all groups that were generated."""
    found = await collector.scored(await collector.answers(version))
    collector.take()
    return found
