"""The memory plan: what each process of a run keeps in memory in each phase, and whether the machines have room."""
