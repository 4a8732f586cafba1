"""Configs of reward functions with the defaults that the settings give."""

from typing import Any

from rltrain.settings.reward_config import RewardFunctionConfig


def reward_function(name: str, path: str, **changes: Any) -> RewardFunctionConfig:
    """Return the config of the reward function at `path`, such as `file.py:score`, with some changed keys."""
    defaults = {"weight": 1.0, "gate": False, "outcome": True, "success": None, "kwargs": {}}
    return RewardFunctionConfig(**{"name": name, "path": path} | defaults | changes)
