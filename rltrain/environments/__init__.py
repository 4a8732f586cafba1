"""Environments, with which the policy interacts over several turns, and parsers of tool calls in a model's text.

The modules of this folder import only the standard library.
"""
