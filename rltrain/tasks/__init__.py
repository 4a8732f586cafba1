"""Built-in tasks that a tiny model can learn in minutes on a laptop.

Importing the package `rltrain.tasks` does not import torch.
"""

from rltrain.tasks.base import Task
from rltrain.tasks.conversation import ConversationTask
from rltrain.tasks.digit import DIGIT, PictureTask
from rltrain.tasks.higher_lower import HIGHER_LOWER
from rltrain.tasks.lookup import LOOKUP
from rltrain.tasks.median import MEDIAN
from rltrain.tasks.sort import SORT

BUILTIN = (
    "builtin:"  # A source of prompts that begins with BUILTIN, as in `data.train=builtin:sort`, is a built-in task.
)
BuiltinTask = Task | ConversationTask | PictureTask
TASKS: dict[str, BuiltinTask] = {task.name: task for task in (MEDIAN, SORT, LOOKUP, HIGHER_LOWER, DIGIT)}

__all__ = ["BUILTIN", "TASKS", "BuiltinTask", "ConversationTask", "PictureTask", "Task"]
