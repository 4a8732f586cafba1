"""Environments in which the policy acts over several turns, and parsers of tool calls in a model's text.

The modules of the package `rltrain.environments` import only the standard library.
"""
