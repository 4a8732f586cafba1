"""`python -m rltrain.export CHECKPOINT OUT_DIR`: the policy of a checkpoint in Hugging Face form."""

import sys
from collections.abc import Sequence

from rltrain.errors import CheckpointError, ConfigError, RLTrainError
from rltrain.typed import require

USAGE = (
    "usage: python -m rltrain.export CHECKPOINT OUT_DIR (the folder of a checkpoint, such as run/checkpoints/step_8)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Expected errors are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--help"], ["-h"]):
        print(USAGE)  # noqa: T201
        return 0
    try:
        require(len(words) == 2 and all(words), USAGE)
        count = export(*words)
    except RLTrainError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        print(f"error: {error.strerror or error}; choose another OUT_DIR", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{count} files in {words[1]}")  # noqa: T201
    return 0


def export(checkpoint: str, out: str) -> int:
    """Write the model; returns the number of files.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: there is none, or the output folder is not empty.
    """
    from rltrain.checkpoint import read
    from rltrain.storage import Folder, absolute
    from workers.checkpoint import MODEL, STATE
    from workers.lora import skeleton
    from workers.model_export import export_model
    from workers.state_files import StateFiles

    source, target = Folder(absolute(checkpoint)), Folder(absolute(out))
    require(not target.names(), f"{out}: is not empty; name a new folder")
    read(source)
    model = source.at(MODEL)
    small = {name: model.read(name) for name in model.files() if not _is_weights(name)}
    if not small:
        raise CheckpointError(f"{source}: holds no {MODEL} folder; give another checkpoint")
    return len(export_model(StateFiles(source.at(f"{STATE}/actor")), small, skeleton(model.root), target))


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


if __name__ == "__main__":
    sys.exit(main())
