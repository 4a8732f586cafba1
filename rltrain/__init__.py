"""rltrain: train language models by reinforcement learning. Importing this package imports nothing else."""
