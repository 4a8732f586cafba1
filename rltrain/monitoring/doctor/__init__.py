"""The doctor: rules that find out from the files of a run what went wrong, with one function per kind of failure."""
