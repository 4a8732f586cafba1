"""The doctor: a program that detects failures of a run from the run's files, with one rule per kind of failure."""
