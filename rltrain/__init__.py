"""rltrain: train language models by reinforcement learning. Importing `rltrain` alone imports no other module."""
