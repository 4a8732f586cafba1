"""Conversion of the user's settings into one typed Config: names, types and rules of all keys."""
