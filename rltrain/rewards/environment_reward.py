"""Reward function that returns the reward from the environment of a conversation."""


def environment_reward(prompt: str, response: str, *, environment_reward: float | None = None) -> float | None:
    """Return the sum of the rewards that the environment gave for single turns and for the whole conversation.

    Args:
        prompt: unused.
        response: unused.
        environment_reward: sum of the environment's rewards; None if the environment gave no reward, or if the run has
            no environment.

    Returns:
        The argument `environment_reward`, unchanged.
    """
    return environment_reward
