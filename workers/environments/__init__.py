"""Processes that run environments, tools and agents, and the pool that distributes trajectories over them."""
