"""Code that starts, observes and ends worker processes. This package contains no code that is specific to models."""
