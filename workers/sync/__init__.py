"""Transfer of weights from the actor's ranks to the rollout engines."""
