"""rltrain: train language models by reinforcement learning. The statement `import rltrain` loads no other module."""
