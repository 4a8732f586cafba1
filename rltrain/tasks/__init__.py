"""Built-in tasks that a tiny model can learn in a minute on a laptop.

Importing the package `rltrain.tasks` does not import torch.
"""

from rltrain.tasks.base import Task
from rltrain.tasks.median import MEDIAN
from rltrain.tasks.sort import SORT

TASKS: dict[str, Task] = {task.name: task for task in (MEDIAN, SORT)}

__all__ = ["TASKS", "Task"]
