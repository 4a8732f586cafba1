"""What is measured and shown of a run: metrics, alarms, files and the terminal."""
