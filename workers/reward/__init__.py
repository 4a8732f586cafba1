"""Processes that run reward functions. Importing this package imports no other module, and in particular not torch."""
