"""Tracker that sends a run to trackio, through trackio's own library.

`docs/reading-a-run.md` describes the environment variables of trackio.
"""

import contextlib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.monitoring.sinks import Metrics, TableRows, replay, table_of
from rltrain.monitoring.trackers.run_ids import RunIds

if TYPE_CHECKING:
    import trackio

PROJECT = "rltrain"


class TrackioTracker:
    """Sink that writes a run to trackio's database, or to a server that an environment variable of trackio names.

    The library trackio cannot remove logged rows. When a run goes back to a checkpoint and repeats steps, trackio has
    two rows for each repeated step, and the row that was logged later is the valid row.

    Args:
        output_dir: output folder of the run; must exist.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir, self.ids = output_dir, RunIds(output_dir, "trackio")
        self.config: dict[str, Any] = {}
        self.run: trackio.Run | None = None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Store the config of the run until `restore` passes the config to trackio."""
        self.config = dict(config)

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Log a row with the metrics of a training step to the trackio run."""
        assert self.run is not None, "`restore` must be called before `log_step`"
        self.run.log(dict(metrics), step=step)

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Log a row with the metrics of an evaluation to the trackio run."""
        self.log_step(step, metrics)

    def log_samples(self, step: int, rows: TableRows) -> None:
        """Log a row that contains the samples as a trackio table named `samples`."""
        import trackio

        assert self.run is not None, "`restore` must be called before `log_samples`"
        self.run.log({"samples": trackio.Table(**table_of(rows))}, step=step)

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Start a trackio run, or continue the trackio run that belongs to the output folder.

        A new trackio run receives all metrics in the arguments `steps` and `evaluations`.
        """
        import trackio

        if self.run is not None:
            return
        known = self.ids.read()
        name = known or _free_name(self.output_dir.name)
        how = "never" if known is None else "allow"
        self.run = trackio.init(project=PROJECT, name=name, config=self.config, resume=how, embed=False)
        self.ids.write(name)
        if known is None:
            replay(self, sorted([*steps, *evaluations], key=itemgetter("step")))

    def close(self) -> None:
        """Write all logged rows that trackio has not written yet, and finish the trackio run."""
        if self.run is not None:
            self.run.finish()
            self.run = None


def _free_name(name: str) -> str:
    """Return `name`, with a number appended if trackio's local database already has a run with that name.

    A new trackio run needs an unused name, because trackio would resume an existing run that has the same name.
    """
    import trackio

    taken: set[str] = set()
    with contextlib.suppress(ValueError):  # Trackio raises ValueError if the trackio project does not exist yet.
        taken = {run.name for run in trackio.Api().runs(PROJECT)}
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return next(one for one in (name, *numbered) if one not in taken)
