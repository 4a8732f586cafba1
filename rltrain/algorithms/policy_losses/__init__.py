"""Policy losses.

Every policy loss has the signature (log_probs, old_log_probs, advantages, response_mask, ..., *, knobs) ->
(token_losses, metrics). The package `policy_losses` imports every module in its folder, so the functions of a new file
in the folder are registered without further code.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
