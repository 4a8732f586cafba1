"""Fingerprints of the data, functions and weights that a config names.

A fingerprint is a number that a hash function computes from the content of a file or data set. A run can be resumed
only if its data, reward functions and models still have the fingerprints that the run started with.
"""

import zlib
from pathlib import Path

from rltrain.data.builtin_models import is_builtin
from rltrain.data.hub import local_directory
from rltrain.data.model_weights import weight_files
from rltrain.data.prompts import PromptSet
from rltrain.rewards.loading import absolute, source_name
from rltrain.settings.schema import Config

# Number of bytes that are hashed at the start of a weight file, and number of bytes that are hashed at its end. Hashing
# large files completely would take minutes.
ENDS_BYTES = 1 << 20


def sources(config: Config, prompts: PromptSet) -> dict[str, int]:
    """Compute the fingerprints of the data, functions and weights that a resumed run reads again.

    Only data, functions and weights that affect what the model learns get a fingerprint.

    Args:
        config: the whole config.
        prompts: training prompts, as they were loaded from the data set.

    Returns:
        A dict that maps names to fingerprints. Each name consists of a config key and a path. The dict contains the
        fingerprints of the training prompts, of the files of the reward functions and of the reward aggregation, and
        of the weights of the reward models and of the teachers on the training ranks. If the weights of `model.path`
        are the base of LoRA adapters or a frozen reference model, the dict also contains a fingerprint of these
        weights, because checkpoints contain neither base weights nor a frozen reference model.
    """
    found = {f"data.train={config.data.train}": prompts.fingerprint()}
    functions = [("reward.functions", function.path) for function in config.reward.functions]
    for key, path in [*functions, ("reward.aggregation", config.reward.aggregation)]:
        file = Path(absolute(path).rpartition(":")[0])
        if file.is_file():
            found[source_name(key, path)] = zlib.crc32(file.read_bytes())
    for model in config.reward.models:
        found[f"reward.models: {model.path}"] = _weights(model.path, f"{model.key}={model.path}")
    algorithm = config.algorithm
    for teacher in algorithm.distillation.models:
        found[f"{teacher.key}={teacher.path}"] = _weights(teacher.path, f"{teacher.key}={teacher.path}")
    stays = config.model.lora is not None or (algorithm.needs_reference and not algorithm.refreshes_reference)
    if stays and not is_builtin(config.model.path):
        key = f"model.path={config.model.path}"
        found[key] = _weights(config.model.path, key)
    return found


def _weights(folder: str, where: str) -> int:
    crc = 0
    for file in weight_files(local_directory(folder), where):
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            crc = zlib.crc32(f"{file.name} {size}".encode(), crc)
            for start in (0, max(0, size - ENDS_BYTES)):
                stream.seek(start)
                crc = zlib.crc32(stream.read(ENDS_BYTES), crc)
    return crc
