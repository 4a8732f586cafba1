"""Processes that generate, score and train. Importing this package imports no other module."""
