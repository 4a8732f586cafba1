"""Prompt files and model directories: what they hold, checked before anything is started."""
