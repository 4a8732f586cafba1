"""Environments, with which the policy talks over several turns, and the tool calls in a model's text.

This folder uses the standard library only.
"""
