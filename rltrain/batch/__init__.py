"""The batch that travels through a training step, how it crosses processes, and who computes which of its rows."""
