"""Presets of `config/algorithm` with the settings that a preset leaves to the user."""

TEACHERS = ["algorithm.distillation.teachers=[reference]"]
NEEDED = {"distill": TEACHERS, "mopd": TEACHERS}  # The checks of the config refuse a preset without these settings.


def preset(name: str, *overrides: str) -> list[str]:
    """Return the overrides that select a preset, with the settings that the preset needs."""
    return [f"algorithm={name}", *NEEDED.get(name, []), *overrides]
