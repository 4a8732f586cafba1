"""Reward functions: `(prompt, response, columns of the data) -> score`. Nothing here imports torch."""
