"""Built-in tasks, small enough to learn on a laptop in a minute. Importing this loads no torch."""

from rltrain.tasks.base import Task
from rltrain.tasks.median import MEDIAN
from rltrain.tasks.sort import SORT

TASKS: dict[str, Task] = {task.name: task for task in (MEDIAN, SORT)}

__all__ = ["TASKS", "Task"]
