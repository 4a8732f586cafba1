"""The doctor: a program that finds failures in the files of a run, with one rule for each kind of failure."""
