"""The doctor: rules that recognise from the files of a run what went wrong in it, one function for each cause."""
