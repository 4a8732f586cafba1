"""The batch of a training step: its columns, its transfer between processes, and the assignment of rows to ranks."""
