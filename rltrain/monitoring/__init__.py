"""Monitoring of a run: metrics, alarms, result files and console output."""
