"""From prompts to scored batches: groups of answers, their scores, token rewards and advantages."""
