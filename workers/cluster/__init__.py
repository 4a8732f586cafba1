"""Code that starts, observes and ends worker processes. This package contains no model-specific code."""
