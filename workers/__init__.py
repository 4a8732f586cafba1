"""Processes that generate responses, score responses and train models.

Importing the package `workers` imports no other module.
"""
