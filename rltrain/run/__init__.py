"""What a run needs around training: checks, plan, resume, checkpoints, recovery, folder lock and signals."""
