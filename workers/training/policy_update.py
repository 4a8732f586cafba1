"""Update of the actor on one batch: the driver computes statistics of the mini-batches, and then the ranks train."""

from collections.abc import Sequence

from rltrain.batch.data_proto import DataProto
from rltrain.settings.schema import Config
from workers.training.actor import ActorWorker
from workers.training.minibatch_statistics import weight_statistics, with_selected
from workers.training.shared_columns import update_columns
from workers.training.worker_group import WorkerGroup


async def update_policy(
    actor: WorkerGroup[ActorWorker],
    batch: DataProto,
    minibatches: Sequence[list[int]],
    config: Config,
    *,
    max_tokens: int,
    entropy_coef: float,
    supervised: DataProto | None = None,
) -> dict[str, float]:
    """Update the actor on all mini-batches, in the order of `minibatches`, and return the metrics of the update.

    Args:
        actor: worker group of the actor, with one worker on each training rank.
        batch: the batch of sampled answers, with advantages.
        minibatches: row indices of each mini-batch.
        config: the run's whole config.
        max_tokens: maximum number of tokens of a micro-batch on one rank.
        entropy_coef: coefficient of the entropy bonus in this training step.
        supervised: batch of supervised answers, or None if the run has no supervised loss. In each mini-batch, the
            actor trains on the sampled answers and on the supervised answers to the same prompts.
    """
    algorithm = config.algorithm
    batch = with_selected(batch, minibatches, config.minibatches_per_epoch, algorithm)
    statistics = [weight_statistics(batch, rows, algorithm.correction) for rows in minibatches]
    columns, facts = update_columns(algorithm), (entropy_coef, statistics)
    if supervised is None:
        return await actor.update(ActorWorker.update, batch, columns, minibatches, max_tokens, *facts)
    return await actor.update_with_supervised(
        ActorWorker.update_with_supervised,
        batch,
        columns,
        minibatches,
        supervised,
        max_tokens,
        entropy_coef,
        statistics,
    )
