"""The doctor: finds out from the files of a run what went wrong, with one rule for each kind of failure."""
