"""Rollout engines. Each engine is a package in this folder, and the package's `DESCRIPTION` describes the engine."""
