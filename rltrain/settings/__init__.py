"""Converts the user's settings into one typed `Config`, which defines the names, types and rules of all config keys."""
