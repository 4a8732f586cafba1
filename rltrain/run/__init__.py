"""A run before and after training: checks, the plan, resuming, checkpoints, recovery, the lock, signals."""
