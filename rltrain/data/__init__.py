"""Loading and validation of prompt files and model directories, before any worker starts."""
