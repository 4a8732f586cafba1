"""Rollout engines, which generate answers to prompts, and the pool of engine replicas."""
