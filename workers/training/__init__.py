"""The roles of the training ranks, and how a call on a batch is split over ranks and collected."""
