"""Models on disk, in Hugging Face form."""

import logging
import shutil
from pathlib import Path

from workers.group import WorkerGroup

logger = logging.getLogger(__name__)


class Exporter:
    """Writes the actor under a run's output directory; a directory appears under its name only when it is complete.

    Args:
        output_dir: of the run.
        tokenizer: saved beside each model.
    """

    def __init__(self, output_dir: Path, tokenizer: object) -> None:
        self.output_dir, self.tokenizer = output_dir, tokenizer

    def save_step(self, actor: WorkerGroup, step: int) -> Path:
        """Export to `checkpoints/step_N`."""
        return self._save(actor, self.output_dir / "checkpoints" / f"step_{step}")

    def save_final(self, actor: WorkerGroup) -> Path:
        """Export to `model`."""
        return self._save(actor, self.output_dir / "model")

    def _save(self, actor: WorkerGroup, path: Path) -> Path:
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        actor.wait(actor.start("save", str(partial)))
        self.tokenizer.save_pretrained(partial)  # type: ignore[attr-defined]
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        logger.info("model saved in %s", path)
        return path
