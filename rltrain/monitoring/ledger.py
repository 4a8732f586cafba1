"""The ledger: a file that records for each prompt group of a run whether it was trained on or dropped.

Each line of the ledger is a JSON object for one training step, with the keys `step`, `used`, `reused`, `dropped` and
`failed`:

- `step`: number of the training step.
- `used`: uids of the prompt groups that were trained on for the first time in the training step.
- `reused`: uids of the prompt groups from earlier steps that the training step trained on again (`trainer.reuse`).
- `dropped`: uids of the prompt groups that were discarded without being trained on.
- `failed`: one pair (uid of the prompt group, index of the answer in the group) for each answer whose reward failed.

The uid of each prompt group occurs exactly once across all `used` and `dropped` lists of the ledger. Each uid in a
`reused` list also occurs in the `used` list of an earlier line of the ledger. Within the `reused` list of one line, no
uid occurs twice.
"""

from collections.abc import Sequence
from typing import Any

from rltrain.batch.data_proto import DataProto

LEDGER = "ledger.jsonl"


def ledger_line(step: int, batch: DataProto, dropped: Sequence[int], reused: Sequence[int] = ()) -> dict[str, Any]:
    """Return the ledger line of a step: the used, reused and dropped prompt groups, and answers whose reward failed."""
    uids = batch.batch["uid"].tolist()
    failed = [[uids[row], row - uids.index(uids[row])] for row in batch.batch["failed"].nonzero()[:, 0].tolist()]
    return {
        "step": step,
        "used": [uid for uid in dict.fromkeys(uids) if uid not in reused],
        "reused": list(reused),
        "dropped": list(dropped),
        "failed": failed,
    }
