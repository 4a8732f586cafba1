"""Worker processes: starting, observing and ending them. This package knows nothing of models."""
