"""What the user typed, made into one typed Config: names, types and rules of all keys."""
