"""Worker processes: groups of processes, liveness checks and termination. This package knows nothing of models."""
