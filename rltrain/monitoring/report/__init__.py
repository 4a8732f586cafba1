"""The report of a run: one HTML page with its curves, its settings and its samples, which opens without a network."""
