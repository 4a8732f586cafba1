"""Converts a number of passes through the training prompts (epochs) to a number of training steps."""

import math
from dataclasses import replace

from rltrain.settings.schema import Config


def with_epochs_as_steps(config: Config, prompts: int) -> Config:
    """Return the config with `trainer.total_steps` computed from `trainer.total_epochs`.

    If `trainer.total_epochs` is None, the config is returned unchanged. The number of training steps is rounded up.
    With `trainer.reuse`, `trainer.total_steps` is computed for steps that each use only
    `trainer.prompts_per_step - trainer.reuse.groups` new prompts, because every step is assumed to train again on
    `trainer.reuse.groups` prompt groups from earlier steps.

    Args:
        config: the whole config.
        prompts: number of training prompts.

    Raises:
        ConfigError: the critic's warm-up is as long as the whole run, so the actor would never be trained.
    """
    trainer = config.trainer
    if trainer.total_epochs is None:
        return config
    steps = math.ceil(trainer.total_epochs * prompts / (trainer.prompts_per_step - trainer.reused_groups))
    config = replace(config, trainer=replace(trainer, total_steps=steps))
    config.require_actor_steps()
    return config
