"""Tracker that sends a run to Weights & Biases, through the library wandb.

`docs/reading-a-run.md` describes the environment variables of wandb.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rltrain.base.errors import ConfigError, described
from rltrain.monitoring.sinks import Metrics, TableRows, replay, table_of
from rltrain.monitoring.trackers.run_ids import RunIds

if TYPE_CHECKING:
    import wandb

PROJECT = "rltrain"
# The timeout of 20 seconds for finishing a W&B run is less than the 30 seconds that `BackgroundSink` waits, so that
# wandb can finish before `BackgroundSink` stops waiting. The library wandb applies its finish timeout in `Run.finish`
# and again at the exit of the run's process.
FINISH_TIMEOUT_S = 20.0
SERVICE = "wandb-core"  # The process `wandb-core` of the library wandb sends the data that was passed to `Run.log`.
_WITHOUT_SERVER = ("offline", "disabled", "dryrun")


class WandbTracker:
    """Sink that sends the results of a run to Weights & Biases, or to a local file in wandb's offline mode.

    The step number of a row in W&B is the number of the training step. When a run goes back to a checkpoint, the
    option `resume_from` of wandb makes W&B discard the rows after the checkpoint.

    Args:
        output_dir: output folder of the run; must exist. The library wandb writes its own files to the subfolder
            `wandb`.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir, self.ids = output_dir, RunIds(output_dir, "wandb")
        self.config: dict[str, Any] = {}
        self.run: wandb.Run | None = None

    @staticmethod
    def check() -> None:
        """Raise ConfigError if the library wandb cannot log in to the W&B server.

        On a terminal, wandb asks the user for the API key.
        """
        import wandb

        if wandb.setup().settings.mode in _WITHOUT_SERVER:
            return
        try:
            wandb.login(verify=False)
        except wandb.Error as error:
            raise ConfigError(
                f"trainer.trackers=[wandb]: {described(error)}; set WANDB_API_KEY, or WANDB_MODE=offline to write files"
            ) from None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Store the config of the run until `restore` passes the config to wandb."""
        self.config = dict(config)

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of a training step to the W&B row of the training step `step`."""
        assert self.run is not None, "`restore` must be called before `log_step`"
        self.run.log(dict(metrics), step=step)

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of an evaluation to the W&B row of the training step `step`."""
        self.log_step(step, metrics)

    def log_samples(self, step: int, rows: TableRows) -> None:
        """Add the samples to the W&B row of the training step `step`, as a table named `samples`."""
        import wandb

        assert self.run is not None, "`restore` must be called before `log_samples`"
        self.run.log({"samples": wandb.Table(**table_of(rows))}, step=step)

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Start a W&B run, or continue the W&B run that belongs to the output folder.

        A new W&B run receives all metrics in the arguments `steps` and `evaluations`.

        If a W&B run is continued, the rows of the W&B run after the training step `step` are discarded, unless the W&B
        server is too old to support `resume_from`.
        """
        self.close()
        known = self.ids.read()
        self.run = self._start(os.environ.get("WANDB_RUN_ID")) if known is None else self._again(known, step)
        self.ids.write(self.run.id)
        if known is None:
            replay(self, sorted([*steps, *evaluations], key=itemgetter("step")))

    def close(self) -> None:
        """Send all rows that are not sent yet, for at most `FINISH_TIMEOUT_S` seconds, and finish the W&B run."""
        if self.run is not None:
            self.run.finish()
            self.run = None

    def give_up(self) -> None:
        """Kill the process `wandb-core`, because the library wandb would wait for `wandb-core` at process exit."""
        import wandb

        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.name() == SERVICE:
                    process.kill()
        # `wandb.teardown` removes wandb's exit handler. It then fails, because `wandb-core` was killed. If the failure
        # is a SystemExit, it must not end the run with the exit status of `wandb-core`.
        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()

    def _start(self, run_id: str | None, **how: Any) -> "wandb.Run":
        import wandb

        given = os.environ
        return wandb.init(
            project=None if "WANDB_PROJECT" in given else PROJECT,
            name=None if "WANDB_NAME" in given else self.output_dir.name,
            dir=None if "WANDB_DIR" in given else str(self.output_dir),
            id=run_id,
            config=self.config,
            settings=wandb.Settings(
                # If wandb captured the console output, the capture would disturb the progress bar.
                console=given.get("WANDB_CONSOLE", "off"),
                # Even in quiet mode, wandb prints the URL of the W&B run.
                quiet=given.get("WANDB_QUIET", "true").lower() == "true",
                finish_timeout=FINISH_TIMEOUT_S,
            ),
            **how,
        )

    def _again(self, run_id: str, step: int) -> "wandb.Run":
        import wandb

        try:
            run = self._start(None, resume_from=f"{run_id}?_step={step}")
        except wandb.Error:  # A self-hosted W&B server may be too old to support `resume_from`.
            run = self._start(run_id, resume="allow")
        run.config.update(self.config, allow_val_change=True)
        return run
