"""Processes that run environments, tools and agents, and a pool that distributes trajectories over these processes."""
