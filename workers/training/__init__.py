"""The roles of the training ranks, and the code that splits batch calls over ranks and collects the results."""
