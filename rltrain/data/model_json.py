"""Reads the JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.settings.typed import require


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model, or {} if the file does not exist.

    Raises:
        ConfigError: the file exists but does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not readable JSON ({error}); save the model again") from None
    require(isinstance(content, dict), f"{file}: not a JSON object; save the model again")
    return content
