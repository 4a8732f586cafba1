import inspect
import subprocess
import sys

import pytest

import rltrain.algorithms as algorithms
from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TOKEN_SELECTORS,
    check_knobs,
    columns_of,
    knobs_of,
    loss_functions,
    own_knobs,
    required_columns,
)
from rltrain.algorithms.registry import Registry


def example(values, response_mask, *, strength=0.5, steps=2, sharp=True):
    return values


def helper(values, *, weights=(), anything=None):
    return values


def test_a_registered_function_is_found_by_name_with_its_metadata():
    registry = Registry("thing")
    assert registry.register("b", colour="red")(example) is example
    registry.register("a")(example)
    assert registry.get("b") is example
    assert registry.names() == ("a", "b")
    assert dict(registry.metadata("b")) == {"colour": "red"}
    with pytest.raises(TypeError):
        registry.metadata("b")["colour"] = "blue"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"policy loss 'ppo' is not registered; use one of: .*gspo.*vanilla"):
        POLICY_LOSSES.get("ppo")
    with pytest.raises(KeyError, match="gspo"):
        POLICY_LOSSES.metadata("ppo")


def test_a_name_is_registered_once():
    registry = Registry("thing")
    registry.register("a")(example)
    with pytest.raises(ValueError, match="'a' is already registered"):
        registry.register("a")


def test_required_metadata_must_be_one_of_its_values():
    said = (
        r"statistics=None must be one of group, batch, none; write .register\('new', statistics='group'\), for example"
    )
    with pytest.raises(ValueError, match=said):
        ADVANTAGE_ESTIMATORS.register("new")
    with pytest.raises(ValueError, match="statistics='row'"):
        ADVANTAGE_ESTIMATORS.register("new", statistics="row")


def bare_knob(values, *, strength):
    return values


def optional_column(values, uid=None):
    return values


def keyword_sink(values, **kwargs):
    return values


def positional_sink(*values):
    return values


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (bare_knob, "knob strength of 'f' has no default"),
        (optional_column, "column uid of 'f' has a default"),
        (keyword_sink, r"takes \*\*kwargs"),
        (positional_sink, r"takes \*values"),
    ],
)
def test_H1_a_signature_that_could_hide_a_knob_is_refused(function, complaint):
    registry = Registry("thing")
    with pytest.raises(ValueError, match=complaint):
        registry.register("f")(function)
    assert registry.names() == ()


def test_columns_and_knobs_are_read_from_the_signature():
    assert columns_of(example) == ("values", "response_mask")
    assert knobs_of(example) == {"strength": 0.5, "steps": 2, "sharp": True}
    assert columns_of(ADVANTAGE_ESTIMATORS.get("gae")) == ("token_level_rewards", "response_mask", "values")
    assert knobs_of(POLICY_LOSSES.get("vanilla")) == {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
    }
    assert knobs_of(POLICY_LOSSES.get("gspo")) == {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    assert columns_of(KL_ESTIMATORS.get("k1+")) == ("log_probs", "ref_log_probs")


def test_knobs_that_fit_are_accepted():
    check_knobs("example", [example], {})
    check_knobs("example", [example], {"strength": 1, "steps": 3, "sharp": False})
    check_knobs("example", [example, helper], {"strength": 1, "weights": [1.0], "anything": "x"})
    check_knobs("example", [helper], {"weights": (1.0, 2.0), "anything": 3})


def test_each_function_of_a_loss_gets_the_knobs_that_it_takes():
    given = {"steps": 3, "weights": [1.0], "strength": 2.0}
    assert own_knobs(example, given) == {"steps": 3, "strength": 2.0}
    assert own_knobs(helper, given) == {"weights": [1.0]}
    assert own_knobs(helper, {}) == {}


def test_a_loss_with_the_column_selected_comes_with_its_selector():
    assert loss_functions("vanilla") == (POLICY_LOSSES.get("vanilla"),)
    assert loss_functions("clip_cov") == (POLICY_LOSSES.get("clip_cov"), TOKEN_SELECTORS.get("clip_cov"))
    assert {name for name in POLICY_LOSSES.names() if "selected" in columns_of(POLICY_LOSSES.get(name))} == set(
        TOKEN_SELECTORS.names()
    )
    with pytest.raises(KeyError, match="policy loss 'nothing'"):
        loss_functions("nothing")


def test_the_columns_of_an_algorithm_are_those_of_estimator_loss_and_selector():
    losses = {"log_probs", "old_log_probs", "advantages", "response_mask"}
    assert required_columns("gae", "vanilla") == losses | {"token_level_rewards", "values"}
    scored = losses | {"token_level_rewards", "uid", "valid"}
    assert required_columns("grpo", "clip_cov") == scored | {"selected", "random_draws"}
    assert required_columns("remax", "top_entropy") == scored - {"uid"} | {"baseline_rewards", "selected", "entropies"}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"strenght": 1.0},
            r"strenght=1.0: 'example' has no such knob; it takes strength, steps, sharp, weights, anything; ",
        ),
        ({"strength": "1"}, r"strength='1': 'example' expects a float"),
        ({"strength": True}, r"strength=True: 'example' expects a float"),
        ({"steps": 2.5}, r"steps=2.5: 'example' expects a int"),
        ({"sharp": "false"}, r"sharp='false': 'example' expects a bool here, like its default True"),
        ({"steps": True}, r"steps=True: 'example' expects a int here, like its default 2"),
        ({"weights": [None]}, r"weights=\[None\]: 'example' expects a list of numbers here"),
        ({"weights": 1.0}, r"weights=1.0: 'example' expects a list of numbers here, like its default \(\)"),
    ],
)
def test_H1_a_knob_that_cannot_act_is_refused(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_knobs("example", [example, helper], given)


def test_a_function_without_knobs_says_so():
    with pytest.raises(ValueError, match="it takes none"):
        check_knobs("rloo", [ADVANTAGE_ESTIMATORS.get("rloo")], {"norm_by_std": False})


def test_every_exported_name_exists_and_the_registries_are_filled():
    assert all(hasattr(algorithms, name) for name in algorithms.__all__)
    assert {"gae", "grpo", "rloo"} <= set(ADVANTAGE_ESTIMATORS.names())
    assert {"vanilla", "gspo"} <= set(POLICY_LOSSES.names())
    assert {"k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"} <= set(KL_ESTIMATORS.names())


def test_the_package_loads_alone_and_brings_no_framework():
    code = (
        "import sys, rltrain.algorithms\n"
        "found = {'ray', 'vllm', 'transformers', 'hydra', 'omegaconf', 'tensordict'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", sorted(name for name in algorithms.__all__ if name.islower()))
def test_every_parameter_of_a_public_function_can_be_passed_by_name(name):
    parameters = inspect.signature(getattr(algorithms, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY] == []
