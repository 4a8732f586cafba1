"""Processes: groups of them as one object, which of them live, and how they are ended. Knows nothing of models."""
