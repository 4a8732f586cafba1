"""The batch of a training step: columns, transfer between processes, and assignment of rows to ranks."""
