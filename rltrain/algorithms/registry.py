"""Names for algorithms, and what a signature says: its columns and its knobs.

What a registered function promises:

* positional parameters are columns of the batch, all required; keyword-only parameters are knobs, all with a default;
* padded tensors are (B, T); `response_mask` is bool or 0/1, and slots where it is 0 are ignored whatever they hold;
* float64 stays float64, every narrower type is computed in float32;
* a policy loss returns `(token_losses, metrics)` without aggregating: `aggregate_loss` is the only place that divides;
* a policy loss with the column `selected` has a token selector of the same name in TOKEN_SELECTORS, which returns that
  column, (B, T) bool, from the columns of a whole mini-batch. Loss and selector have no knob name in common;
* a policy loss says when it is registered what is special about it: `uses_ratio=False` where its gradient does not
  depend on `old_log_probs`; `aggregations`, the modes of `aggregate_loss` that it is defined for, where not all are.

**Metrics are sums.** Every metric is a detached 0-dim tensor: a sum over the trained tokens of this call. Sums add up
exactly over micro-batches and ranks; whoever reports them divides once by the trained tokens of the whole mini-batch,
the count that `aggregate_loss` takes as `num_tokens`. So `clip_fraction` is a number of tokens until then.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_SINKS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Registry:
    """Functions of one kind by name. `required` says which metadata each must carry, and the values it may have."""

    def __init__(self, kind: str, *, required: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.kind = kind
        self._required = dict(required or {})
        self._entries: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}

    def register(self, name: str, **metadata: Any) -> Callable[[Algorithm], Algorithm]:
        """Return a decorator that files a function under `name`, and refuses a signature that breaks the contract."""
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is already registered: names are unique; choose another")
        for key, values in self._required.items():
            if metadata.get(key) not in values:
                raise ValueError(
                    f"{self.kind} '{name}': {key}={metadata.get(key)!r} must be one of {', '.join(values)}; "
                    f"write .register({name!r}, {key}={values[0]!r}), say"
                )

        def decorate(function: Algorithm) -> Algorithm:
            _check_signature(name, function)
            self._entries[name] = (function, MappingProxyType(dict(metadata)))
            return function

        return decorate

    def get(self, name: str) -> Callable[..., Any]:
        """Return the function registered as `name`."""
        return self._entry(name)[0]

    def metadata(self, name: str) -> Mapping[str, Any]:
        """Return what `name` was registered with."""
        return self._entry(name)[1]

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._entries))

    def _entry(self, name: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        if name not in self._entries:
            raise KeyError(f"{self.kind} '{name}' is not registered; use one of: {', '.join(self.names())}")
        return self._entries[name]


def columns_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the batch columns that `function` reads: its positional parameters, in order."""
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind != _KEYWORD)


def knobs_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Knobs of `function` with their defaults: its keyword-only parameters."""
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind == _KEYWORD}


def loss_functions(loss_mode: str) -> tuple[Callable[..., Any], ...]:
    """The policy loss, and its token selector if it has one: the functions that share the knobs of the loss."""
    loss = POLICY_LOSSES.get(loss_mode)
    return (loss, TOKEN_SELECTORS.get(loss_mode)) if "selected" in columns_of(loss) else (loss,)


def required_columns(advantage_estimator: str, loss_mode: str) -> frozenset[str]:
    """Names of all batch columns that an estimator, a loss and the loss's token selector read."""
    functions = (ADVANTAGE_ESTIMATORS.get(advantage_estimator), *loss_functions(loss_mode))
    return frozenset(name for function in functions for name in columns_of(function))


def own_knobs(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `given` knobs that `fn` takes."""
    return {name: value for name, value in given.items() if name in knobs_of(fn)}


def check_knobs(fn_name: str, fns: Iterable[Callable[..., Any]], given: Mapping[str, Any]) -> None:
    """Raise ValueError for a knob in `given` that none of `fns` takes, or a value of another type than its default."""
    knobs = {name: default for fn in fns for name, default in knobs_of(fn).items()}
    for name, value in given.items():
        if name not in knobs:
            takes = f"it takes {', '.join(knobs)}" if knobs else "it takes none"
            raise ValueError(f"{name}={value!r}: '{fn_name}' has no such knob; {takes}; remove or rename it")
        if not _same_type(value, knobs[name]):
            kind = "list of numbers" if isinstance(knobs[name], tuple) else type(knobs[name]).__name__
            raise ValueError(f"{name}={value!r}: '{fn_name}' wants a {kind} here, like its default {knobs[name]!r}")


def _same_type(value: Any, default: Any) -> bool:
    """Whether a knob's value has its default's type; an int will do for a float, a bool is not a number."""
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, tuple):  # of numbers; YAML has lists only
        return isinstance(value, (list, tuple)) and all(_same_type(item, 0.0) for item in value)
    return type(value) is type(default) or default is None


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        is_knob, has_default = parameter.kind == _KEYWORD, parameter.default is not inspect.Parameter.empty
        if parameter.kind in _SINKS:
            raise ValueError(f"'{name}' takes {parameter}: a sink would swallow misspelt knobs; name each parameter")
        if is_knob and not has_default:
            raise ValueError(f"knob {parameter.name} of '{name}' has no default: every knob has one; give it a value")
        if not is_knob and has_default:
            raise ValueError(
                f"column {parameter.name} of '{name}' has a default: columns are required; "
                "drop the default, or put the parameter after * if it is a knob"
            )


ADVANTAGE_ESTIMATORS = Registry("advantage estimator", required={"statistics": ("group", "batch", "none")})
POLICY_LOSSES = Registry("policy loss")
KL_ESTIMATORS = Registry("KL estimator")
TOKEN_SELECTORS = Registry("token selector")
