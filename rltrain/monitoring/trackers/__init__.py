"""Trackers: sinks that send the metrics of a run to a library or a service, as `trainer.trackers` names them."""
