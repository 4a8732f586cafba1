"""Exports the policy in a checkpoint to the Hugging Face format: `python -m rltrain.export CHECKPOINT OUT_DIR`."""

import json
import sys
from collections.abc import Sequence

from rltrain.base.errors import CheckpointError
from rltrain.base.small_program import run_program
from rltrain.settings.typed import require

USAGE = (
    "usage: python -m rltrain.export CHECKPOINT OUT_DIR (the folder of a checkpoint, such as run/checkpoints/step_8)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rltrain.export` with the given command-line arguments, and return the exit status.

    Each error is printed as a single line to stderr.
    """
    return run_program(_export, USAGE, argv, remedy=lambda error: f"{error.strerror or error}; choose another OUT_DIR")


def _export(words: list[str]) -> None:
    require(len(words) == 2 and all(words), USAGE)
    print(f"{export(*words)} files in {words[1]}")  # noqa: T201


def export(checkpoint: str, out: str) -> int:
    """Write the policy in a checkpoint to the folder `out`, and return the number of files that were written.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the model in the checkpoint cannot be loaded.
        ConfigError: a folder cannot be accessed, the output folder is not empty, or the checkpoint has LoRA adapters
            whose base model has incomplete weights.
    """
    from rltrain.data.model_weights import check_weights, skeleton
    from rltrain.run.checkpoints import read
    from rltrain.run.checks import checked_folder
    from workers.models.policy_export import ADAPTER_CONFIG, export_model
    from workers.models.state_files import StateFiles
    from workers.training.rank_state import MODEL, STATE, reason

    source, target = (checked_folder(name, name) for name in (checkpoint, out))
    require(not target.names(), f"{out}: is not empty; name a new folder")
    read(source)
    model = source.at(MODEL)
    small = {name: model.read(name) for name in model.files() if not _is_weights(name)}
    if not small:
        raise CheckpointError(f"{source}: the checkpoint has no folder {MODEL}; give another checkpoint")
    if ADAPTER_CONFIG in small:
        base = json.loads(small[ADAPTER_CONFIG])["base_model_name_or_path"]
        check_weights(base, f"{base}, the base model of the adapters in {source}")
    state = StateFiles(source.at(f"{STATE}/actor"))
    try:
        whole = skeleton(model.root)
    except Exception as error:  # For invalid model files, the library transformers can raise any exception.
        raise CheckpointError(f"{model}: cannot be loaded ({reason(error)}); give another checkpoint") from None
    return len(export_model(state, small, whole, target))


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


if __name__ == "__main__":
    sys.exit(main())
