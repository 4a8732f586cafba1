"""Processes that run reward functions. Importing this package imports nothing else, and never torch."""
