"""Advantage estimators.

Every advantage estimator has the signature (token_level_rewards, response_mask, columns..., *, knobs) -> (advantages,
returns). The package `advantages` imports every module in its folder, so the functions of a new file in the folder are
registered without further code.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
