"""Parts of a run other than training itself: checks, plan, resume, checkpoints, recovery, folder lock and signals."""
