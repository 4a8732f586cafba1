"""Prompts in, scored batches out: groups of answers, their scores, and what each token is worth."""
