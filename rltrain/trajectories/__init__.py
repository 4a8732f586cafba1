"""Turns prompts into scored batches: groups of answers, scores, token rewards and advantages."""
