"""The file `trackers.json`, which stores for each tracker the id of the tracker's run, such as the id of the W&B run.

A resumed training run uses the stored id to continue its existing run in the tracker, instead of starting a new run in
the tracker.
"""

import json
import os
import threading
from pathlib import Path

RUN_IDS = "trackers.json"
# Several trackers, each in a separate thread, may write the file `trackers.json` at the same time.
_LOCK = threading.Lock()


class RunIds:
    """Storage for the id of one tracker's run, such as the id of the W&B run.

    Args:
        output_dir: output folder of the run; must exist.
        tracker: name of the tracker, which is the key of the tracker's run id in the file `trackers.json`.
    """

    def __init__(self, output_dir: Path, tracker: str) -> None:
        self.path, self.tracker = output_dir / RUN_IDS, tracker

    def read(self) -> str | None:
        """Return the stored id of the tracker's run; None if no id is stored for the output folder."""
        with _LOCK:
            return self._ids().get(self.tracker)

    def write(self, run_id: str) -> None:
        """Store the id of the tracker's run.

        If the process is killed during `write`, the file `trackers.json` has either the old or the new content.
        """
        with _LOCK:
            ids = self._ids() | {self.tracker: run_id}
            partial = self.path.with_name(f"{RUN_IDS}.partial")
            partial.write_text(json.dumps(ids, indent=1) + "\n", "utf-8")
            os.replace(partial, self.path)

    def _ids(self) -> dict[str, str]:
        return dict(json.loads(self.path.read_text("utf-8"))) if self.path.exists() else {}
