"""Names of the built-in tiny models, which are values of the config key `model.path`."""

BUILTIN_MODEL = "builtin"  # The tiny model of most built-in tasks.
BUILTIN_VISION = "builtin-vision"  # The tiny model of the built-in tasks with pictures.


def is_builtin(path: str) -> bool:
    """Return whether a value of `model.path` names a built-in model."""
    return path in (BUILTIN_MODEL, BUILTIN_VISION)
