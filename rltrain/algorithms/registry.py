"""Registries that map names to algorithms, and code that finds the columns and knobs in an algorithm's signature.

Every registered function follows a contract with these rules:

- Positional parameters are columns of the batch, and all are required. Keyword-only parameters are knobs, and all have
  a default.
- Padded tensors have the shape (B, T). `response_mask` is bool or 0/1. Slots where `response_mask` is 0 are ignored,
  even if a slot holds NaN.
- A function computes in float64 if its inputs are float64, and in float32 if its inputs have a narrower dtype.
- A policy loss returns `(token_losses, metrics)` and does not aggregate the token losses. Only the function
  `aggregate_loss` divides a loss by a count.
- For a policy loss that reads the column `selected`, a token selector is registered in TOKEN_SELECTORS under the name
  of the policy loss. The token selector computes the column `selected`, a bool tensor (B, T), from the columns of a
  whole mini-batch. A policy loss and its token selector have no knob name in common.
- A policy loss states its special properties when it is registered. `uses_ratio=False` means that the loss's gradient
  does not depend on `old_log_probs`. `aggregations` lists the modes of `aggregate_loss` that the loss supports, if the
  loss does not support all modes.
- An advantage estimator that is registered with `scores_from_zero=True` is defined only for scores that are at least 0.

**Metrics are sums.** Every metric is a detached 0-dim tensor that holds a sum over the trained tokens of one call of a
policy loss. Metric sums add up exactly over micro-batches and ranks. The code that reports a metric divides the
metric's sum once by `num_tokens`, the number of trained tokens of the whole mini-batch. The function `aggregate_loss`
has an argument `num_tokens` with the same meaning. Before the division by `num_tokens`, a metric such as
`clip_fraction` is a number of tokens.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_SINKS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Registry:
    """Registry of the functions of one kind, indexed by name.

    Every function must be registered with the metadata keys in `required`, which maps each key to its allowed values.
    """

    def __init__(self, kind: str, *, required: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.kind = kind
        self._required = dict(required or {})
        self._entries: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}

    def register(self, name: str, **metadata: Any) -> Callable[[Algorithm], Algorithm]:
        """Return a decorator that registers a function under `name` with `metadata`.

        Raises:
            ValueError: if `name` is taken, or if required metadata is missing or has an unknown value. The decorator
                raises ValueError if the signature of the decorated function breaks the contract for registered
                functions.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is already registered: names must be unique; choose another name")
        for key, values in self._required.items():
            if metadata.get(key) not in values:
                raise ValueError(
                    f"{self.kind} '{name}': {key}={metadata.get(key)!r} must be one of {', '.join(values)}; write "
                    f".register({name!r}, {key}={values[0]!r}), for example"
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
        """Return the metadata with which `name` was registered."""
        return self._entry(name)[1]

    def names(self) -> tuple[str, ...]:
        """Return all registered names, sorted."""
        return tuple(sorted(self._entries))

    def _entry(self, name: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        if name not in self._entries:
            raise KeyError(f"{self.kind} '{name}' is not registered; use one of: {', '.join(self.names())}")
        return self._entries[name]


def columns_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the batch columns that `function` reads: its positional parameters, in order."""
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind != _KEYWORD)


def knobs_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a dict that maps the name of each knob (keyword-only parameter) of `function` to the knob's default."""
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind == _KEYWORD}


def loss_functions(loss_mode: str) -> tuple[Callable[..., Any], ...]:
    """Return the policy loss `loss_mode` and, if the policy loss has a token selector, the token selector.

    If the config sets a knob for the policy loss, one of the returned functions must have a parameter of that name.
    """
    loss = POLICY_LOSSES.get(loss_mode)
    return (loss, TOKEN_SELECTORS.get(loss_mode)) if "selected" in columns_of(loss) else (loss,)


def required_columns(advantage_estimator: str, loss_mode: str) -> frozenset[str]:
    """Return the names of all batch columns that an estimator, a loss and the loss's token selector read."""
    functions = (ADVANTAGE_ESTIMATORS.get(advantage_estimator), *loss_functions(loss_mode))
    return frozenset(name for function in functions for name in columns_of(function))


def own_knobs(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `given` that are knobs (keyword-only parameters) of the function `fn`."""
    return {name: value for name, value in given.items() if name in knobs_of(fn)}


def check_knobs(fn_name: str, fns: Iterable[Callable[..., Any]], given: Mapping[str, Any]) -> None:
    """Raise ValueError if a knob in `given` is not a knob of any function in `fns`, or has a value of a wrong type."""
    knobs = {name: default for fn in fns for name, default in knobs_of(fn).items()}
    for name, value in given.items():
        if name not in knobs:
            takes = f"it takes {', '.join(knobs)}" if knobs else "it takes none"
            raise ValueError(f"{name}={value!r}: '{fn_name}' has no such knob; {takes}; remove or rename it")
        if not _same_type(value, knobs[name]):
            kind = "list of numbers" if isinstance(knobs[name], tuple) else type(knobs[name]).__name__
            raise ValueError(f"{name}={value!r}: '{fn_name}' expects a {kind} here, like its default {knobs[name]!r}")


def _same_type(value: Any, default: Any) -> bool:
    """Return whether a knob's value has the type of the knob's default.

    An int is accepted as the value of a float knob. A bool is not accepted as the value of an int or float knob. Any
    value is accepted for a knob whose default is None.
    """
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    # For a knob whose default is a tuple of numbers, a list is accepted, because YAML has lists but no tuples.
    if isinstance(default, tuple):
        return isinstance(value, (list, tuple)) and all(_same_type(item, 0.0) for item in value)
    return type(value) is type(default) or default is None


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        is_knob, has_default = parameter.kind == _KEYWORD, parameter.default is not inspect.Parameter.empty
        if parameter.kind in _SINKS:
            raise ValueError(f"'{name}' takes {parameter}, which would accept misspelt knobs; name each parameter")
        if is_knob and not has_default:
            raise ValueError(f"knob {parameter.name} of '{name}' has no default: every knob needs one; add a default")
        if not is_knob and has_default:
            raise ValueError(
                f"column {parameter.name} of '{name}' has a default: columns are required; "
                "drop the default, or put the parameter after * if it is a knob"
            )


ADVANTAGE_ESTIMATORS = Registry("advantage estimator", required={"statistics": ("group", "batch", "none")})
POLICY_LOSSES = Registry("policy loss")
KL_ESTIMATORS = Registry("KL estimator")
TOKEN_SELECTORS = Registry("token selector")
