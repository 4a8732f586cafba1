"""The roles of the training ranks, and the code that splits batches over the ranks and collects the ranks' results."""
