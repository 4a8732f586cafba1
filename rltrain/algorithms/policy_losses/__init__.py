"""Policy losses: (log_probs, old_log_probs, advantages, response_mask, ..., *, knobs) -> (token_losses, metrics).

Every module of this folder is imported, so that a new file is registered by being here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
