"""Policy losses.

Every policy loss has the signature (log_probs, old_log_probs, advantages, response_mask, ..., *, knobs) ->
(token_losses, metrics). This package imports each of its modules, so a new file in this folder is registered without
further code.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
