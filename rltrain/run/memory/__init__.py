"""The memory plan: how much memory each process of a run needs in each phase, and whether the machines have enough."""
