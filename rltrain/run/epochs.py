"""The length of a run that is given in passes through the training prompts."""

import math
from dataclasses import replace

from rltrain.settings.schema import Config


def with_epochs_as_steps(config: Config, prompts: int) -> Config:
    """Return the config with `trainer.total_steps` computed from `trainer.total_epochs`, if that is given.

    A last step that the prompts do not fill is counted as a whole step.

    Args:
        config: the whole config.
        prompts: number of training prompts.
    """
    trainer = config.trainer
    if trainer.total_epochs is None:
        return config
    steps = math.ceil(trainer.total_epochs * prompts / trainer.prompts_per_step)
    return replace(config, trainer=replace(trainer, total_steps=steps))
