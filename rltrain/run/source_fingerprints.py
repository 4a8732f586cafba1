"""What a run reads under the names in its config, as one number each: other content there makes it another run."""

import zlib
from pathlib import Path

from rltrain.data.model_weights import BUILTIN_MODEL, weight_files
from rltrain.data.prompts import PromptSet
from rltrain.rewards.loading import absolute, source_name
from rltrain.settings.schema import Config

ENDS_BYTES = 1 << 20  # of each file of weights, at both ends: reading large ones whole would take minutes


def sources(config: Config, prompts: PromptSet) -> dict[str, int]:
    """Fingerprints of all that is read again whenever the run goes on, and decides what is learnt.

    Args:
        config: the whole config.
        prompts: to train on, as they were loaded.

    Returns:
        By key and name: the prompts; files of reward functions and of their aggregation; weights of reward models, and
        those of `model.path` where no checkpoint replaces them, as the base of LoRA adapters and as the reference.
    """
    found = {f"data.train={config.data.train}": prompts.fingerprint()}
    functions = [("reward.functions", function.path) for function in config.reward.functions]
    for key, path in [*functions, ("reward.aggregation", config.reward.aggregation)]:
        file = Path(absolute(path).rpartition(":")[0])
        if file.is_file():
            found[source_name(key, path)] = zlib.crc32(file.read_bytes())
    for model in config.reward.models:
        found[f"reward.models: {model.path}"] = _weights(model.path, f"{model.key}={model.path}")
    stays = config.model.lora is not None or config.algorithm.needs_reference
    if stays and config.model.path != BUILTIN_MODEL:
        key = f"model.path={config.model.path}"
        found[key] = _weights(config.model.path, key)
    return found


def _weights(folder: str, where: str) -> int:
    crc = 0
    for file in weight_files(Path(folder).expanduser(), where):
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            crc = zlib.crc32(f"{file.name} {size}".encode(), crc)
            for start in (0, max(0, size - ENDS_BYTES)):
                stream.seek(start)
                crc = zlib.crc32(stream.read(ENDS_BYTES), crc)
    return crc
