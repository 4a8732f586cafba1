"""The file `trackers.json`, which stores the id that each tracker gave to a run.

With the id, a resumed run continues the tracker's existing run instead of starting a new one.
"""

import json
import os
import threading
from pathlib import Path

RUN_IDS = "trackers.json"
_LOCK = threading.Lock()  # several trackers, each in its own thread, may write the file at the same time


class RunIds:
    """Stores the id that a tracker's library gave to the run.

    Args:
        output_dir: output folder of the run; must exist.
        tracker: name of the tracker, which is the key in `trackers.json`.
    """

    def __init__(self, output_dir: Path, tracker: str) -> None:
        self.path, self.tracker = output_dir / RUN_IDS, tracker

    def read(self) -> str | None:
        """Return the id of the tracker's run; None if the tracker has not started a run for this output folder."""
        with _LOCK:
            return self._ids().get(self.tracker)

    def write(self, run_id: str) -> None:
        """Store the id of the tracker's run.

        If the process is killed during `write`, the file has either its old or its new content.
        """
        with _LOCK:
            ids = self._ids() | {self.tracker: run_id}
            partial = self.path.with_name(f"{RUN_IDS}.partial")
            partial.write_text(json.dumps(ids, indent=1) + "\n", "utf-8")
            os.replace(partial, self.path)

    def _ids(self) -> dict[str, str]:
        return dict(json.loads(self.path.read_text("utf-8"))) if self.path.exists() else {}
