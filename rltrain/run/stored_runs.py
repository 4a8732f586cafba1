"""Checks of a run that trains on the stored answers of an earlier run (`rollout=stored`)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rltrain.base.errors import ConfigError, described
from rltrain.base.storage import absolute, local_path
from rltrain.data.stored_samples import stored_groups
from rltrain.settings.algorithm_config import AlgorithmConfig
from rltrain.settings.schema import Config
from rltrain.settings.typed import require

# Config keys that determine the distribution from which answers are sampled. The new run must have the sampling
# settings with which the stored answers were sampled, because the loss depends on the sampling distribution.
_DISTRIBUTION = ("temperature", "top_p", "top_k")


def check_stored_run(config: Config) -> None:
    """Check that an earlier run has stored all answers that the new run needs.

    `check_stored_run` does not compare the prompts of the two runs. During training, `StoredEngine` compares the
    stored prompt of each answer with the requested prompt.

    Raises:
        ConfigError: `rollout.run` does not name the output folder of an earlier run, or this folder lacks answers that
            the new run needs; the stored answers were sampled with settings that differ from the new run's settings;
            or the new run needs answers that no run stores, for example for an evaluation.
    """
    rollout = config.rollout
    if rollout.run is None:
        raise ConfigError("rollout=stored without rollout.run: name the output folder of a run, as rollout.run=RUN_DIR")
    where = f"rollout.run={rollout.run}"
    folder = local_path(rollout.run, where)
    require(
        folder != Path(absolute(config.trainer.output_dir)),
        f"{where}: is also trainer.output_dir, where this run writes its own answers; name another trainer.output_dir",
    )
    _require_sampled_groups_only(config.algorithm)
    require(
        config.trainer.reuse is None,
        f"rollout=stored with trainer.reuse.groups={config.trainer.reused_groups}: the number of stored groups that "
        "the run needs would depend on how many groups it trains on again; use trainer.reuse=null",
    )
    require(
        not config.data.evaluations,
        "rollout=stored with evaluation prompts: a run stores only answers to training prompts, and no engine "
        "generates answers to evaluation prompts; use data.val=null without data.val_sets",
    )
    groups = stored_groups(folder)
    require(
        bool(groups),
        f"{where}: holds no tables rollouts/*.parquet; give the output folder of a run (trainer.output_dir)",
    )
    earlier = _config_of(folder, where)
    _require_same_distribution(config, earlier["rollout"], where)
    _require_same_pools(config, earlier, where)
    steps, samples = config.trainer.total_steps, rollout.samples_per_prompt
    needed = range(steps * config.trainer.prompts_per_step) if config.trainer.total_epochs is None else groups
    missing = [uid for uid in needed if uid not in groups]
    require(
        not missing,
        f"{where}: has stored {len(groups)} prompt groups, and {len(needed)} are needed (trainer.total_steps={steps} x "
        f"trainer.prompts_per_step={config.trainer.prompts_per_step}); group {missing[0] if missing else 0} is not "
        "stored; lower trainer.total_steps, or name a run that dropped no groups",
    )
    fewest = min(groups[uid].size for uid in needed)
    require(
        samples <= fewest,
        f"rollout.samples_per_prompt={samples}: {where} has stored {fewest} answers to a prompt; use at most {fewest}",
    )


def _require_sampled_groups_only(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if the algorithm needs answers that no run stores, such as greedy answers."""
    # `rltrain.algorithms` is not imported at the start of the file, because importing `rltrain.algorithms` imports
    # torch.
    from rltrain.algorithms import required_columns

    require(
        not algorithm.dynamic_sampling,
        f"rollout=stored with algorithm.dynamic_sampling={algorithm.dynamic_sampling}: a run does not store the groups "
        "that dynamic sampling drops; use algorithm.dynamic_sampling=0",
    )
    require(
        "baseline_rewards" not in required_columns(algorithm.advantage_estimator, algorithm.loss_mode),
        f"rollout=stored with algorithm.advantage_estimator={algorithm.advantage_estimator}: the estimator needs a "
        "greedy answer to each prompt, and a run stores only sampled answers; use another estimator",
    )


def _config_of(folder: Path, where: str) -> Mapping[str, Any]:
    """Return the config of the run that stored the answers; the config always has a section `rollout`."""
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
        rollout = found["rollout"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: its config.yaml cannot be read ({described(error, 120)})") from None
    require(isinstance(rollout, Mapping), f"{where}: its config.yaml has no section rollout")
    return found  # type: ignore[no-any-return]


def _require_same_distribution(config: Config, earlier: Mapping[str, Any], where: str) -> None:
    for key in _DISTRIBUTION:
        now, then = getattr(config.rollout, key), earlier.get(key)
        require(
            now == then,
            f"rollout.{key}={now}: {where} sampled its answers with {then}, and the loss needs the same value; use "
            f"rollout.{key}={then}",
        )


def _require_same_pools(config: Config, earlier: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the new run would sample its prompts in another way than the earlier run.

    The stored groups contain only the prompts that the earlier run sampled.

    Two runs with the same `data.difficulty` sample the same prompts, as long as the reward functions of both runs judge
    the same answers to be correct.
    """
    data, own = earlier.get("data"), config.data.difficulty
    then = data.get("difficulty") if isinstance(data, Mapping) else None
    now = None if own is None else dataclasses.asdict(own)
    shown = [str(value).replace("'", "") if value else "null" for value in (now, then)]
    require(
        now == then,
        f"data.difficulty={shown[0]}: {where} sampled its prompts with data.difficulty={shown[1]}, so answers to some "
        f"prompts of this run may not be stored; use data.difficulty='{shown[1]}'",
    )
