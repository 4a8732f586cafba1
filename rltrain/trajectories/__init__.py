"""Turns prompts into scored batches, which hold groups of answers with scores, token rewards and advantages."""
