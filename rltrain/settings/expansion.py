"""Expands short forms of values in the config into complete mappings.

For example, an entry of `reward.functions` may be only the path of a function, instead of a mapping with all keys.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rltrain.base.errors import ConfigError
from rltrain.base.storage import absolute
from rltrain.rewards.loading import is_penalty, success_score
from rltrain.settings.distillation_config import DEMONSTRATION_TEMPLATE, REFERENCE
from rltrain.settings.sampling_config import DIFFICULTY_DEFAULTS
from rltrain.settings.schema import ALL_LINEAR
from rltrain.settings.typed import require

AUTO = "auto"
# Upper bound of the importance weights if `algorithm.correction.level=auto` selects `token`. The preset `algorithm=tis`
# sets the upper bound of the importance weights to 2.
STALE_UPPER = 2.0
# Estimators whose critic is trained before the policy (VC-PPO and VAPO). With `critic.warmup_steps=auto` and an
# estimator in PRETRAINED, the first WARMUP_STEPS training steps train only the critic. The papers on VC-PPO and VAPO
# warm up the critic for 50 steps, in runs of thousands of steps.
PRETRAINED = ("decoupled_gae", "length_adaptive_gae")
WARMUP_STEPS = 5


def expand(values: dict[str, Any]) -> None:
    """Replace all short forms in the nested values of a config by complete values.

    Raises:
        ConfigError: the short form of a config value is invalid. The message of the ConfigError is one line.
    """
    placement = values.get("placement")
    if isinstance(placement, dict):
        _set_max_replicas(placement)
    reward = values.get("reward")
    if isinstance(reward, dict):
        reward["functions"] = _reward_functions(reward.get("functions"))
        reward["models"] = _reward_models(reward.get("models"))
    model = values.get("model")
    if isinstance(model, dict):
        model["lora"] = _lora(model.get("lora"))
    rollout = values.get("rollout")
    if isinstance(rollout, dict) and isinstance(rollout.get("stop"), str):
        rollout["stop"] = [rollout["stop"]]
    if isinstance(rollout, dict) and isinstance(rollout.get("tools"), str):
        rollout["tools"] = [rollout["tools"]]
    if isinstance(rollout, dict) and isinstance(rollout.get("tools"), list):
        rollout["tools"] = [_tool(tool) for tool in rollout["tools"]]
    if isinstance(rollout, dict) and isinstance(rollout.get("run"), str):
        rollout["run"] = absolute(rollout["run"])
    data = values.get("data")
    if isinstance(data, dict):
        data["difficulty"] = _difficulty(data.get("difficulty"))
    algorithm, trainer = values.get("algorithm"), values.get("trainer")
    if isinstance(trainer, dict):
        trainer["reuse"] = _reuse(trainer.get("reuse"), trainer.get("max_staleness"))
    if isinstance(algorithm, dict) and isinstance(algorithm.get("distillation"), dict):
        algorithm["distillation"]["teachers"] = _teachers(algorithm["distillation"].get("teachers"))
    if isinstance(algorithm, dict) and isinstance(trainer, dict):
        algorithm["correction"] = _correction(algorithm, trainer.get("max_staleness"), _quantization(rollout))
    if isinstance(algorithm, dict) and isinstance(rollout, dict):
        _set_overlong_buffer(algorithm.get("reward_shaping"), rollout.get("max_response_length"))
    critic = values.get("critic")
    if isinstance(algorithm, dict) and isinstance(trainer, dict) and isinstance(critic, dict):
        _set_critic_warmup(critic, algorithm.get("advantage_estimator"), trainer.get("total_steps"))


def _set_max_replicas(placement: dict[str, Any]) -> None:
    """Convert the short form `rollout_replicas: 2-4` to the keys `rollout_replicas` and `max_rollout_replicas`."""
    given = placement.get("rollout_replicas")
    found = re.fullmatch(r"(\d+)-(\d+)", given) if isinstance(given, str) else None
    if found:
        other = placement.get("max_rollout_replicas")
        require(
            other is None or other == int(found[2]),
            f"placement.rollout_replicas={given} with placement.max_rollout_replicas={other}: both set the maximum "
            "number of engines; give only one of them",
        )
        placement["rollout_replicas"], placement["max_rollout_replicas"] = map(int, found.groups())


def _tool(tool: Any) -> Any:
    """Convert an entry of `rollout.tools` to a mapping with all keys.

    If the entry of `rollout.tools` is a string, the string is the path of a function.
    """
    given = {"path": tool} if isinstance(tool, str) else tool
    return {"path": None, "mcp": None} | given if isinstance(given, dict) else given


def _reward_functions(functions: Any) -> list[Any]:
    """Convert each entry of `reward.functions` to a mapping with all keys.

    If an entry of `reward.functions` is a string, the string is the path of the reward function. By default, a reward
    function has the name of the Python function, and weight 1. By default, `outcome` (whether the score says if the
    task was solved) is true, except for rltrain's own penalties. By default, `success` (the lowest score of a correct
    answer) is 1 for built-in functions that compare an answer with the right answer, and null for all other functions.
    """
    require(
        isinstance(functions, list),
        f"reward.functions={functions}: must be a list, as in reward.functions=[my_reward.py:score]",
    )
    return [_reward_function(function) for function in functions]


def _reward_function(function: Any) -> Any:
    given = {"path": function} if isinstance(function, str) else function
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise ConfigError(
            f"reward.functions: {function!r} names no function; write package.module:function or file.py:function, or "
            "{path:file.py:function,weight:0.5}"
        )
    path = given["path"]
    default = {
        "name": re.split(r"[:.]", path)[-1],
        "weight": 1.0,
        "gate": False,
        "outcome": not is_penalty(path),
        "success": success_score(path),
    }
    return default | {"kwargs": {}} | given


def _reward_models(models: Any) -> list[Any]:
    """Convert each entry of `reward.models` to a mapping with all keys.

    If an entry of `reward.models` is a string, the string is the reward model's directory, or its name on the Hugging
    Face hub. By default, a reward model has weight 1 and is named after the last part of its path, without the
    revision.
    """
    require(
        isinstance(models, list), f"reward.models={models}: must be a list, as in reward.models=[path/to/directory]"
    )
    return [_reward_model(model) for model in models]


def _reward_model(model: Any) -> Any:
    given = {"path": model} if isinstance(model, str) else model
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise ConfigError(f"reward.models: {model!r} names no model; write DIR or {{path:DIR,weight:0.5}}")
    name = Path(given["path"]).name.partition("@")[0] or "reward_model"
    return {
        "name": name,
        "weight": 1.0,
        "gate": False,
        "outcome": True,
        "success": None,
        "prompt_template": None,
    } | given


def _teachers(teachers: Any) -> list[Any]:
    """Convert each entry of `algorithm.distillation.teachers` to a mapping with all keys.

    If an entry of `algorithm.distillation.teachers` is a string, the string is the teacher's `path`. By default, a
    teacher is named after the last part of its path, without the revision. By default, a teacher whose path is a URL is
    named after the host and port of the URL. If the teacher is the reference model, the default prompt template is the
    template of SDFT.
    """
    require(
        isinstance(teachers, list),
        f"algorithm.distillation.teachers={teachers}: must be a list, as in algorithm.distillation.teachers=[DIR]",
    )
    return [_teacher(teacher) for teacher in teachers]


def _teacher(teacher: Any) -> Any:
    given = {"path": teacher} if isinstance(teacher, str) else teacher
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise ConfigError(
            f"algorithm.distillation.teachers: {teacher!r} names no teacher; write DIR or {{name:math,path:DIR}}"
        )
    path = given["path"]
    name = urlsplit(path).netloc if "://" in path else Path(path).name.partition("@")[0]
    template = DEMONSTRATION_TEMPLATE if path == REFERENCE else None
    return {"name": name, "prompt_template": template, "model": None, "api_key_env": None} | given


def _lora(lora: Any) -> Any:
    """Convert `model.lora` to a mapping with all keys.

    By default, every linear layer except the last gets an adapter, and alpha is twice the rank, so that the scale alpha
    / rank is 2.
    """
    if lora is None:
        return None
    if not isinstance(lora, dict) or "rank" not in lora:
        raise ConfigError(f"model.lora={lora}: must be null, or a mapping with a rank, as in model.lora={{rank:16}}")
    rank, targets = lora["rank"], lora.get("targets", ALL_LINEAR)
    # If the LoRA rank is not a number, a later check reports an error.
    twice = 2 * rank if isinstance(rank, int | float) else rank
    return {"alpha": twice} | lora | {"targets": [targets] if isinstance(targets, str) else targets}


def _difficulty(difficulty: Any) -> Any:
    """Convert `data.difficulty` to a mapping with all keys."""
    if difficulty is None:
        return None
    if not isinstance(difficulty, dict):
        raise ConfigError(
            f"data.difficulty={difficulty}: must be null, or a mapping, as in data.difficulty={{}} or "
            "data.difficulty={hard_fraction:0.1}"
        )
    return DIFFICULTY_DEFAULTS | difficulty


def _reuse(reuse: Any, max_staleness: Any) -> Any:
    """Convert `trainer.reuse` to a mapping with all keys.

    By default, `trainer.reuse.steps` equals the staleness bound `trainer.max_staleness`. The engines may run at most
    `trainer.max_staleness - trainer.reuse.steps` training steps ahead of training. With the default value of
    `trainer.reuse.steps`, the engines never run ahead of training.
    """
    if reuse is None:
        return None
    if not isinstance(reuse, dict) or "groups" not in reuse:
        raise ConfigError(
            f"trainer.reuse={reuse}: must be null, or a mapping with a number of groups, as in "
            "trainer.reuse={groups:4}"
        )
    # If max_staleness is 0 or not a number, a later check reports an error.
    default = max_staleness if isinstance(max_staleness, int) and max_staleness > 0 else 1
    return {"steps": default} | reuse


def _set_overlong_buffer(shaping: Any, max_response_length: Any) -> None:
    """Replace `overlong_buffer: auto` by a fifth of the maximum answer length.

    DAPO's overlong buffer is a fifth of DAPO's maximum answer length: 4,096 of 20,480 tokens.
    """
    if isinstance(shaping, dict) and shaping.get("overlong_buffer") == AUTO and isinstance(max_response_length, int):
        shaping["overlong_buffer"] = max_response_length // 5


def _set_critic_warmup(critic: dict[str, Any], estimator: Any, total_steps: Any) -> None:
    """Replace `warmup_steps: auto` by a number of training steps.

    For an estimator in `PRETRAINED`, the number of warm-up steps is `WARMUP_STEPS`, but at most half of the run's
    training steps. For an estimator outside `PRETRAINED`, the number of warm-up steps is 0.
    """
    if critic.get("warmup_steps") != AUTO:
        return
    most = total_steps // 2 if isinstance(total_steps, int) else WARMUP_STEPS
    critic["warmup_steps"] = max(0, min(WARMUP_STEPS, most)) if estimator in PRETRAINED else 0


def _quantization(rollout: Any) -> Any:
    """Return the value of `rollout.vllm.quantization`, or None if the engine is not vLLM."""
    vllm = rollout.get("vllm") if isinstance(rollout, dict) and rollout.get("engine") == "vllm" else None
    return vllm.get("quantization") if isinstance(vllm, dict) else None


def _correction(algorithm: dict[str, Any], max_staleness: Any, quantization: Any) -> Any:
    """Replace `level: auto` in `algorithm.correction` with `token` or null.

    The correction level usually becomes `token` in two cases. If `trainer.max_staleness` is above 0, the weights that
    generated an answer can be older than the actor's weights before the update. With `rollout.vllm.quantization`, an
    answer is generated with quantized weights.

    In all other cases, the correction level becomes null. It also becomes null if the old log-probs in the loss's ratio
    are the engine's log-probs, if `algorithm.rejection` rejects tokens or answers, or if the loss has no policy-loss
    term because the policy learns only from a distillation term. If the correction level becomes `token`, the
    importance weights get the upper bound `STALE_UPPER`, unless the config sets a bound.
    """
    correction = algorithm.get("correction")
    if not isinstance(correction, dict) or correction.get("level") != AUTO:
        return correction
    differs = quantization is not None or (isinstance(max_staleness, int) and max_staleness > 0)
    rejects = algorithm["rejection"]["kl_estimator"] is not None
    distillation = algorithm["distillation"]
    no_policy_term = distillation["mode"] == "loss" and distillation["outcome_coef"] == 0
    if not differs or rejects or no_policy_term or algorithm["old_log_probs"] != "actor":
        return correction | {"level": None}
    unbounded = correction["lower"] is None and correction["upper"] is None
    return correction | {"level": "token"} | ({"upper": STALE_UPPER} if unbounded else {})
