"""A trainer whose workers are all in the test process, with the tokenizer of the built-in tasks."""

from typing import Any

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.data.prompts import PromptSet, load_prompts
from rltrain.main import environments_of, load_data, supervised_options, tokenizer_of
from rltrain.settings.algorithm_rules import needs_critic
from rltrain.settings.schema import Config
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from rltrain.trainer import Trainer
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.reward_models import reward_models
from rltrain.trajectories.teachers import Teachers
from tests.fakes import NoCheckpoints
from workers.placement import start


def train_prompts(config: Config, limit: int = 64) -> PromptSet:
    """Load the first `limit` training prompts of a config, with the supervised answers that the config asks for."""
    tokenizer = char_tokenizer()
    return load_prompts(
        config.data.train, tokenizer, split="train", seed=0, max_prompt_length=16, overlong="refuse", limit=limit,
        supervised=supervised_options(config, tokenizer),
    )  # fmt: skip


async def in_process_trainer(
    config: Config, model: str, tasks: BackgroundTasks, *, prompts: int = 64, **parts: Any
) -> Trainer:
    """Start the workers of a config in the test process, and return a trainer for them.

    Args:
        config: The whole config, with `placement=inprocess`.
        model: Model directory. With an environment, `config.model.path` must name the same directory.
        tasks: The background tasks that the workers and the collector use.
        prompts: Number of training prompts; with an environment, all prompts of the config are used.
        parts: Further arguments of `Trainer`. The default is no tracker, no checkpoints and no evaluation prompts.
    """
    stop_ids, environments = [EOS_ID], None
    if config.rollout.has_environment:
        tokenizer, stop_ids = tokenizer_of(config)
        used, _ = load_data(config, tokenizer)
        environments = environments_of(config, tokenizer, stop_ids, [used])
    else:
        used = train_prompts(config, prompts)
    workers = await start(
        config, model, stop_ids, tasks, needs_critic=needs_critic(config.algorithm), environments=environments
    )
    collector = Collector(
        config,
        rollout=workers.rollout,
        rewards=workers.rewards,
        prompts=used,
        tasks=tasks,
        models=reward_models(config, workers.reward_models),
    )
    collector.start()
    arguments: dict[str, Any] = {"tracker": None, "checkpoints": NoCheckpoints(), "val_prompts": {}} | parts
    return Trainer(
        config,
        collector=collector,
        actor=workers.actor,
        reference=workers.reference,
        critic=workers.critic,
        teachers=Teachers(config, workers.teachers, char_tokenizer(), tasks)
        if config.algorithm.distillation.teachers
        else None,
        tasks=tasks,
        **arguments,
    )
