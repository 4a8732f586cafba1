"""Weights from the actor's ranks to the rollout engines."""
