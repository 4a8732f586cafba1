"""Trackers: sinks that send the metrics of a run to a library or a service.

The config key `trainer.trackers` names the trackers of a run.
"""
