"""Models that take images: which types are supported, and how they are built."""

from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.builtin_models import BUILTIN_VISION, is_builtin
from rltrain.data.hub import local_directory
from rltrain.data.model_json import read_json
from rltrain.data.model_weights import IMAGE_MODELS

# For other model types with images, the reason why training does not support their images.
_REASONS = {
    "gemma3": "the tokens of an image attend to each other in both directions, and packed attention is causal",
    "qwen2_vl": "the tokens of an image have positions with three coordinates",
    "qwen2_5_vl": "the tokens of an image have positions with three coordinates",
    "qwen3_vl": "the tokens of an image have positions with three coordinates",
}


def takes_images(path: str | Path) -> bool:
    """Return whether a model takes images and can be trained on prompts with images.

    `path` is the model's directory, or the name of a built-in model.
    """
    return type_of(path) in IMAGE_MODELS


def why_no_images(path: str | Path) -> str:
    """Return the reason why training does not support the images of a model; "" if the model takes only text."""
    kind = type_of(path)
    if kind in IMAGE_MODELS or is_builtin(str(path)) or not _config(path).get("vision_config"):
        return ""
    return _REASONS.get(kind, f"only the model types {' and '.join(IMAGE_MODELS)} are tested, and this is {kind}")


def type_of(path: str | Path) -> str:
    """Return the type of a model, such as "llava"; "" for the built-in model that takes no images."""
    if is_builtin(str(path)):
        return IMAGE_MODELS[0] if path == BUILTIN_VISION else ""
    return str(_config(path).get("model_type"))


def _config(path: str | Path) -> dict[str, Any]:
    return read_json(local_directory(path) / "config.json")


def load_processor(path: str | Path, key: str = "model.path") -> Any:
    """Load the processor of a model directory, which prepares images and inserts their tokens into prompts.

    Raises:
        ConfigError: the processor does not load.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(str(local_directory(path)), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Broken files and missing packages cause exceptions of many types.
        reason = one_line(" ".join(str(error).split()), 160)
        raise ConfigError(
            f"{key}={path}: the processor of images does not load ({type(error).__name__}: {reason}); save it again "
            "with processor.save_pretrained"
        ) from error
