"""Presets of `config/algorithm` with the settings that a preset leaves to the user."""

TEACHERS = ["algorithm.distillation.teachers=[reference]"]
GAME = ["rollout.environment=rltrain.environments.higher_lower:HigherLower"]
# Maps a preset to the settings without which the checks of the config refuse the preset.
NEEDED = {"distill": TEACHERS, "mopd": TEACHERS, "gigpo": GAME, "turn_ppo": GAME, "turn_rloo": GAME}


def preset(name: str, *overrides: str) -> list[str]:
    """Return the overrides that select a preset, with the settings that the preset needs."""
    return [f"algorithm={name}", *NEEDED.get(name, []), *overrides]
