"""Processes that generate, score and train. Importing this package imports nothing else."""
