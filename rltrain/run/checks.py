"""Checks of config values against each other, against registered names, and against the machine's files and devices.

All checks of the config run before any worker process starts. Cheap checks come first, and heavy imports are inside
functions, so that most mistakes are reported immediately.
"""

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.base.cache_folder import cache_root
from rltrain.base.cpu_threads import cpu_cores
from rltrain.base.errors import ConfigError, described
from rltrain.base.storage import Folder, absolute, local_path
from rltrain.data.builtin_models import is_builtin
from rltrain.data.image_models import takes_images, type_of, why_no_images
from rltrain.data.model_directory import (
    check_critic,
    check_directory,
    check_limits,
    check_reward_model,
    check_teacher,
    check_vocabulary,
    load_tokenizer,
    model_config,
)
from rltrain.data.model_weights import check_engine_files, check_weights
from rltrain.data.prompt_form import template_parts
from rltrain.data.prompt_images import IMAGE_COLUMNS
from rltrain.data.prompt_pools import most_in_flight
from rltrain.data.prompts import PromptSet
from rltrain.data.row_sources import check_source
from rltrain.monitoring.trackers.loading import check_trackers
from rltrain.rewards.loading import AGGREGATIONS, check_aggregation, is_environment_reward, load_function
from rltrain.rewards.sandbox import LEVELS, SandboxError, weakness
from rltrain.run.stored_runs import check_stored_run
from rltrain.settings.algorithm_rules import check_algorithm, needs_critic
from rltrain.settings.schema import Config, DataConfig, TrainerConfig
from rltrain.settings.typed import require
from rltrain.tasks import BUILTIN, TASKS, BuiltinTask

# Names of files and folders that a run writes. An output folder that contains a file or folder with a name in
# `RUN_FILES` belongs to a run.
RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "evaluations.jsonl",
    "ledger.jsonl",
    "alarms.jsonl",
    "processes.json",
    "rollouts",
    "evaluations",
    "failed",
    "stacks",
    "model",
    "checkpoints",
    "tensorboard",
    "trackers.json",
    "wandb",
)
# Example of a file name, used to detect an output folder whose path is so long that no file in it can be created.
_A_NAME_INSIDE = "x" * 200
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Environment variable that Ray sets for the entry point of `ray job submit`.


def check(config: Config, fetch: Callable[[Config], Config] = lambda config: config) -> Config:
    """Check that a run with the config is possible on this machine, and download the models of the config.

    Return the config, in which each model from the Hugging Face Hub is pinned to a commit.

    Args:
        config: the whole config.
        fetch: function that downloads the config's models from the Hugging Face Hub, and returns the config, in which
            each of these models is pinned to a commit. Downloads may take long, so everything that can be checked
            without the models is checked before the download.

    Raises:
        ConfigError: a run with this config is not possible. The message of the ConfigError is one line with the invalid
            value, the rule and a remedy.
    """
    check_without_models(config)
    config = fetch(config)
    check_models(config)
    return config


def check_without_models(config: Config) -> None:
    """Check everything in the config that can be checked without reading a model.

    Raises:
        ConfigError: a run with this config is not possible. The message of the ConfigError is one line with the invalid
            value, the rule and a remedy.
    """
    _check_output(config.trainer)
    check_trackers(config.trainer.trackers)
    config.rollout.description.check(config)
    _check_data(config.data)
    if is_builtin(config.model.path):
        builtin_task(config)
    else:
        local_path(config.model.path, f"model.path={config.model.path}")
    _check_rewards(config)
    sandbox_warning(config)
    check_algorithm(config)
    if not config.rollout.description.generates:
        check_stored_run(config)
    if config.placement.launcher == "ray" and config.placement.address == "local":
        _check_machine(config)


def check_models(config: Config) -> None:
    """Check that the model, the reward models and the teachers fit the other settings in the config."""
    if not is_builtin(config.model.path):
        check_directory(config.model.path)
    for model in config.reward.models:
        check_reward_model(model.path, model.key)
        check_vocabulary(model.path, load_tokenizer(model.path, model.key), f"{model.key}={model.path}")
    for teacher in config.algorithm.distillation.models:
        check_teacher(config, teacher.path, teacher.key)
    _check_image_model(config)
    check_limits(config, _model_config(config.model.path))
    if not is_builtin(config.model.path):
        _check_weights(config)
    _check_division(config)
    if config.model.lora is not None:
        from workers.models.lora import adapter_parameters

        adapter_parameters(config.model.path, config.model.lora)
    for key, value, off in (
        ("actor.router_replay", config.actor.router_replay, "null"),
        ("actor.load_balance_coef", config.actor.load_balance_coef, "0"),
    ):
        if value:
            from workers.models.router_replay import check_routers

            check_routers(config.model.path, key=key, off=off)


def _check_division(config: Config) -> None:
    """Check that the ranks can divide the matrices and experts of each model as configured."""
    if config.placement.tensor_ranks == config.placement.expert_ranks == 1:
        return
    from transformers import AutoModelForSequenceClassification

    from workers.models.division import check_division

    path, placement = config.model.path, config.placement
    check_division(path, f"model.path={path}", placement, experts=True)
    for teacher in config.algorithm.distillation.models:
        check_division(teacher.path, f"{teacher.key}={teacher.path}", placement)
    for model in config.reward.models:
        # Each rank of a reward model scores rows of its own, so the ranks do not divide its matrices.
        kind = AutoModelForSequenceClassification
        check_division(model.path, f"{model.key}={model.path}", placement, kind, tensor=False)


def _check_weights(config: Config) -> None:
    """Check that every role, such as actor or critic, can load the weights of `model.path` completely.

    If the algorithm needs a critic, first check that a critic can be built from the model in `model.path`.
    """
    where = f"model.path={config.model.path}"
    if needs_critic(config.algorithm):
        check_critic(config.model.path)
    check_weights(config.model.path, where)
    if config.rollout.description.reads_files:
        check_engine_files(config.model.path, where, config.rollout.description.title)


def check_cluster(config: Config, resources: Mapping[str, float]) -> None:
    """Check that a running cluster has a device for every rank.

    Args:
        config: the whole config.
        resources: result of `ray.cluster_resources()`. Ranks use the GPUs, or the CPUs if the cluster has no GPUs.

    Raises:
        ConfigError: the cluster has too few devices for the run's ranks. The message of the ConfigError gives the
            numbers of ranks and devices.
    """
    gpus = int(resources.get("GPU", 0))
    if gpus:
        _check_ranks(config, gpus, "GPUs", "the cluster")
    else:
        _check_ranks(config, int(resources.get("CPU", 0)), "CPUs", "the cluster")


def check_prompt_count(config: Config, prompts: int) -> None:
    """With `data.difficulty`, check that the number of prompts in flight cannot exceed the number of training prompts.

    Without `data.difficulty`, any number of prompts is enough, because a training step may use the same prompt twice,
    in two successive epochs.

    Args:
        config: the whole config.
        prompts: number of training prompts.

    Raises:
        ConfigError: with `data.difficulty`, more prompts may be in flight at once than there are training prompts.
    """
    if config.data.difficulty is None:
        return
    trainer, sampling = config.trainer, config.algorithm.dynamic_sampling
    most = most_in_flight(trainer.prompts_per_step, trainer.steps_ahead, sampling)
    reasons = f"trainer.prompts_per_step={trainer.prompts_per_step}"
    reasons += f", {trainer.steps_ahead} steps ahead" if trainer.steps_ahead else ""
    reasons += f", algorithm.dynamic_sampling={sampling}" if sampling > 1 else ""
    require(
        prompts >= most,
        f"data.difficulty with {prompts:,} training prompts: up to {most:,} prompt groups are in flight at once "
        f"({reasons}), and each group needs a different prompt; use more training prompts, lower these settings, or "
        "set data.difficulty=null",
    )


def sandbox_warning(config: Config) -> str:
    """Return a one-line warning about what model-written code could do on this machine.

    Return "" if programs can be isolated, if the config asks for a sandbox without isolation, or if no reward function
    runs model-written code.

    Raises:
        ConfigError: a reward function requires an isolated sandbox, but programs cannot be isolated on this machine.
    """
    for function in config.reward.functions:
        level = function.kwargs.get("sandbox", config.reward.sandbox)
        try:
            if level not in LEVELS or "sandbox" not in inspect.signature(load_function(function.path)).parameters:
                continue
            if warning := weakness(level):
                return f"reward function '{function.name}': {warning}"
        except SandboxError as error:
            raise ConfigError(
                f"reward.sandbox={level}: reward function '{function.name}': {error}; or use reward.sandbox=auto, "
                "which also runs programs without isolation"
            ) from None
        except (TypeError, ValueError):  # `check_columns` reports a function whose signature cannot be read.
            continue
    return ""


def builtin_task(config: Config) -> BuiltinTask:
    """Return the built-in task that `data.train` names.

    `model.path=builtin` selects the tiny model of the built-in task.

    Raises:
        ConfigError: the value of `data.train` is not a built-in task, or the task has another tiny model.
    """
    source, path = config.data.train, config.model.path
    names = [BUILTIN + name for name in TASKS]
    known = [BUILTIN + task.name for task in TASKS.values() if task.model == path]
    require(
        source.startswith(BUILTIN),
        f"model.path={path} with data.train={source}: the tiny model knows only the built-in task"
        f"{'s' * (len(known) > 1)} {', '.join(known)}; give model.path=DIR or a name on the hub",
    )
    if source not in names:
        near = difflib.get_close_matches(source, names, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"data.train={source}: unknown built-in task; the nearest is '{near}', and all tasks are {', '.join(names)}"
        )
    task = TASKS[source.removeprefix(BUILTIN)]
    require(
        config.model.path == task.model,
        f"model.path={config.model.path} with data.train={source}: the task has another tiny model; use "
        f"model.path={task.model}",
    )
    return task


def _check_image_model(config: Config) -> None:
    """Check that the run can train `model.path` if the model takes images, even if the prompts show none.

    Raises:
        ConfigError: the rollout engine does not run the model, or the run needs a critic or adapters for it.
    """
    path = config.model.path
    if not takes_images(path):
        return
    kind, engine = type_of(path), config.rollout.description
    start = f"model.path={path}: models of the type {kind}"
    require(
        kind in engine.image_models,
        f"{start} cannot be used with rollout.engine={config.rollout.engine} ({engine.title}); use rollout=hf",
    )
    require(not needs_critic(config.algorithm), f"{start} cannot have a critic; use algorithm=grpo")
    require(config.model.lora is None or kind != "llava", f"{start} cannot be adapted; use model.lora=null")


def check_images(config: Config, prompts: PromptSet) -> None:
    """Check that the run can train on the images of its prompts.

    Raises:
        ConfigError: training does not support the images of the model, or the config has a setting that excludes
            images.
    """
    where, path = prompts.where, config.model.path
    reason = why_no_images(path)
    unseen = next((name for name in IMAGE_COLUMNS if name in prompts.columns), None)
    require(
        not reason or unseen is None,
        f"model.path={path}: {where} has the column {unseen}, but training does not support the images of this model: "
        f"{reason}; use a model of another type, or remove the column",
    )
    if not prompts.shows_images:
        return
    start = f"{where}: prompts with images cannot be used with"
    require(not config.rollout.has_environment, f"{start} rollout.environment; use text prompts")
    require(not config.algorithm.distillation.models, f"{start} algorithm.distillation; use text prompts")
    require(not config.reward.models, f"{start} reward.models; use reward.functions")
    ranks = config.placement.ranks_per_pack
    require(ranks == 1, f"{start} ranks that split tokens or layers ({ranks} ranks for a pack); divide only the data")


def check_cache(config: Config) -> None:
    """Check that the cache folder is writable if the run uses the built-in model and the model is not stored there yet.

    Raises:
        ConfigError: the cache folder of rltrain (`RLTRAIN_CACHE`) cannot be written to.
    """
    if is_builtin(config.model.path):
        from rltrain.tasks.tiny_model import start_path

        where, start = f"RLTRAIN_CACHE={cache_root()}", start_path(builtin_task(config))
        if not local_path(str(start), where).exists():
            _check_writable(start.parent, where)


def output_folder(trainer: TrainerConfig) -> Path:
    """Return the absolute path of the run's output folder, without `..`.

    The path `new/../old` is shortened to `old` even if the folder `new` does not exist yet, because `new/../old` and
    `old` are the same folder as soon as `new` exists.
    """
    return Path(os.path.abspath(Path(trainer.output_dir).expanduser()))


def turns_folder(trainer: TrainerConfig) -> Path:
    """Return the absolute path of the folder with the recorded turns of unfinished conversations."""
    return output_folder(trainer) / "turns"


def _check_output(trainer: TrainerConfig) -> None:
    require(bool(trainer.output_dir.strip()), "trainer.output_dir is empty; name a folder")
    where = f"trainer.output_dir={trainer.output_dir}"
    named, folder = local_path(trainer.output_dir, where), output_folder(trainer)
    require(
        named.is_absolute() or RAY_JOB not in os.environ,
        f"{where}: in a Ray job a relative path lies in Ray's own cache, which Ray deletes; give an absolute path",
    )
    require(
        "://" not in trainer.output_dir, f"{where}: is not a local folder; only trainer.checkpoint_dir may be remote"
    )
    _check_writable(folder, where)
    # If the config allows the run to resume, the output folder may hold a run, which `rltrain.run.resume` checks later.
    for name in RUN_FILES if trainer.resume == "never" else ():
        require(
            not (folder / name).exists(),
            f"{where}: holds another run ({name}); name a new folder, or continue that run with trainer.resume=auto",
        )
    where = f"trainer.checkpoint_dir={trainer.checkpoint_dir}"
    checkpoints = checked_folder(trainer.checkpoint_dir, where)
    if checkpoints.local:
        _check_writable(Path(checkpoints.root), where)
        below = os.path.relpath(os.path.realpath(checkpoints.root), os.path.realpath(folder)).split(os.sep)[0]
        require(
            below == "checkpoints" or below.removesuffix(".old").removesuffix(".partial") not in RUN_FILES,
            f"{where}: is inside a folder of the run's results ({below}), whose files the run replaces; name another "
            "folder",
        )
    if trainer.resume not in ("never", "auto"):
        checked_folder(trainer.resume, f"trainer.resume={trainer.resume}")


def checked_folder(url: str, where: str) -> Folder:
    """Return the folder at a local path or URL that the user gave.

    Args:
        url: local path or URL.
        where: start of the error message.

    Raises:
        ConfigError: the URL is malformed, its file system is unknown, or its file system cannot be used on this
            machine.
    """
    # fsspec would interpret the text before "::" as a file system, or ignore the text after "::".
    require(
        "::" not in url and not url.startswith("://"),
        f"{where}: contains '::', or has no protocol before '://'; give another path",
    )
    if "://" not in url:
        local_path(url, where)
    try:
        return Folder(absolute(url))
    except Exception as error:  # A file system driver may raise any exception.
        raise ConfigError(
            f"{where}: cannot be reached ({described(error, 200)}); give a local path, or a URL that fsspec knows"
        ) from None


def _check_writable(folder: Path, where: str) -> None:
    local_path(str(folder), where)
    local_path(str(folder / _A_NAME_INSIDE), where)
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    require(there.is_dir(), f"{where}: {there} is a file, not a folder; name another folder")
    require(os.access(there, os.W_OK | os.X_OK), f"{where}: {there} cannot be written to; name another folder")


def check_stop_strings(stops: Sequence[str], tokenizer: Any) -> None:
    """Raise ConfigError if a stop string contains a special token, because answer texts contain no special tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for stop in stops:
        name = next((name for name in sorted(added | set(tokenizer.all_special_tokens)) if name and name in stop), None)
        require(
            name is None,
            f"rollout.stop has {stop!r}: answer texts contain no special tokens such as {name}, so this stop string "
            "would never match; remove the stop string, because the model's end tokens end an answer anyway (list "
            "further end tokens as eos_token_id in generation_config.json)",
        )


def _check_data(data: DataConfig) -> None:
    for key, source in (("train", data.train), *data.evaluations.values()):
        check_source(source, f"data.{key}={source}")
    if data.prompt is not None and set("{}") & set(data.prompt):
        template_parts(data.prompt)
    if data.sft_response is not None and set("{}") & set(data.sft_response):
        template_parts(data.sft_response, key="data.sft_response", what="answer")


def _model_config(path: str) -> Mapping[str, Any]:
    """Return the Hugging Face config of the model.

    The Hugging Face config of the built-in model is known even before the model is trained.
    """
    if not is_builtin(path):
        return model_config(path)
    import torch

    from rltrain.tasks.tiny_model import MODELS

    with torch.device("meta"):  # On the meta device, creating a model draws no random numbers.
        return dict(MODELS[path]().config.get_text_config().to_dict())


def _check_rewards(config: Config) -> None:
    for function in config.reward.functions:
        load_function(function.path)
    for model in config.reward.models:
        local_path(model.path, f"{model.key}={model.path}")
    for teacher in config.algorithm.distillation.models:
        local_path(teacher.path, f"{teacher.key}={teacher.path}")
    if config.reward.aggregation not in AGGREGATIONS:
        check_aggregation(config.reward.aggregation)
    source = config.data.train
    for function in config.reward.functions:
        require(
            not is_environment_reward(function.path) or config.rollout.has_environment,
            f"reward.functions: '{function.name}' is the reward that an environment gives, and the run has no "
            "environment; set rollout.environment or rollout.agent, or choose another reward function",
        )
        of_tasks = [name for name, task in TASKS.items() if task.reward == function.path]
        require(
            not of_tasks or not source.startswith(BUILTIN) or source.removeprefix(BUILTIN) in of_tasks,
            f"data.train={source} with the reward of task {' and '.join(of_tasks)}: every answer would be wrong; use "
            f"data={source.removeprefix(BUILTIN)}, which also sets the matching reward",
        )


def _check_machine(config: Config) -> None:
    cores = cpu_cores()
    if _largest_demand(config) > cores or _gpu_nodes():
        gpus = _gpu_count()
        _check_ranks(config, gpus or cores, "GPUs" if gpus else "CPU cores", "this machine")


def _gpu_nodes() -> bool:
    """Return whether a device file of a GPU driver exists.

    Looking for device files such as `/dev/nvidiactl` is fast, while querying torch for GPUs would take seconds.
    """
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _largest_demand(config: Config) -> int:
    return max(count for _, count in _demands(config))


def _demands(config: Config) -> list[tuple[str, int]]:
    """Return the numbers of devices that the config requires, each as a pair (description, number of devices).

    Each description gives the config keys and values that determine the number of devices.

    With `placement.share_ranks`, the roles take turns on the same devices, so the numbers of devices of the roles are
    not added up.
    """
    placement, rollout = config.placement, config.rollout
    shards = rollout.shards
    engines = f"placement.rollout_replicas={placement.rollout_replicas}"
    if shards > 1:
        engines += f" x {rollout.description.shards_key}={shards}"
    ranks = f"placement.actor_ranks={placement.actor_ranks}"
    if placement.share_ranks:
        return [(ranks, placement.actor_ranks), (engines, placement.rollout_replicas * rollout.devices)]
    roles = len(config.roles(needs_critic=needs_critic(config.algorithm)))
    total = placement.actor_ranks * roles + placement.rollout_replicas * rollout.devices
    return [(f"{ranks} for each of {roles} training roles + {engines} = {total}", total)]


def _check_ranks(config: Config, available: int, devices: str, where: str) -> None:
    shards, shards_key = config.rollout.shards, config.rollout.description.shards_key
    require(
        devices != "GPUs" or shards == 1 or not config.placement.share_ranks,
        f"{shards_key}={shards}: with placement.share_ranks=true an engine gets only a part of one GPU; use "
        f"placement.share_ranks=false, or {shards_key}=1",
    )
    transport, placement = config.rollout.weight_transport, config.placement
    require(
        devices == "GPUs" or transport != "nccl",
        f"rollout.weight_transport=nccl: {where} has no GPUs; use rollout.weight_transport=auto",
    )
    require(
        devices != "GPUs"
        or transport != "device_handles"
        or (placement.share_ranks and placement.rollout_replicas <= placement.actor_ranks),
        "rollout.weight_transport=device_handles: each engine must share its GPU with a training rank; use "
        "placement=colocated with at most as many engines as ranks, or rollout.weight_transport=auto",
    )
    for what, count in _demands(config):
        require(
            count <= available,
            f"{what}: more than the {available} {devices} of {where}; use fewer ranks or a larger cluster",
        )
