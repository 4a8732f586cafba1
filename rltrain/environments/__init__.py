"""Environments, with which the policy talks over several turns, and the tool calls of the policy.

This folder is a library without torch, ray, vllm and transformers.
"""
