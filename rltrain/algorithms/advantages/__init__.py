"""Advantage estimators: (token_level_rewards, response_mask, columns..., *, knobs) -> (advantages, returns).

Every module of this folder is imported, so that a new file is registered by being here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
