"""Processes that generate responses, score them and train models. Importing this package imports no other module."""
