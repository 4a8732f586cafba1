"""The report of a run: one HTML page with curves, settings and samples, which can be opened without a network."""
