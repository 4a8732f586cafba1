"""Engines that answer prompts, and the pool of replicas."""
