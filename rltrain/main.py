"""The command `python -m rltrain.main`, which reads and checks the config, starts the workers, trains, and prints a
summary.

This module defines no classes, because a class `X` of this module would be pickled as `__main__.X`, which worker
processes cannot import.
"""

import asyncio
import bdb
import contextlib
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.cpu_threads import cpu_cores, openmp_settings
from rltrain.base.errors import ClusterLost, ConfigError, RLTrainError, Stopped, described, one_line
from rltrain.base.home_folder import ensure_home
from rltrain.base.secret_values import hide_in_logs, redacted
from rltrain.base.standard_streams import open_closed_streams, outlive_readers
from rltrain.base.storage import Folder, absolute
from rltrain.data.prompt_form import PromptOptions
from rltrain.data.prompt_images import ImagePlaceholders
from rltrain.data.prompts import PromptSet, load_prompts
from rltrain.data.supervised_answers import SupervisedOptions
from rltrain.monitoring.heartbeat import Heartbeat
from rltrain.monitoring.printing import print_lines
from rltrain.run.checks import (
    builtin_task,
    check_cache,
    check_cluster,
    check_images,
    check_models,
    check_prompt_count,
    check_stop_strings,
    check_without_models,
    output_folder,
    sandbox_warning,
    turns_folder,
)
from rltrain.run.epochs import with_epochs_as_steps
from rltrain.run.lock import RunLock
from rltrain.run.teacher_checks import check_teachers
from rltrain.settings.algorithm_rules import check_algorithm, needs_critic
from rltrain.settings.command_line import Args, parse_args, usage
from rltrain.settings.compose import compose, profile_defaults, to_yaml
from rltrain.settings.schema import Config
from rltrain.tasks import PictureTask
from workers.cluster.worker_process import quiet

# At the start of this file, modules that import torch are imported only for type annotations, because importing torch
# takes seconds.
if TYPE_CHECKING:
    from rltrain.monitoring.console import ConsoleDisplay
    from rltrain.monitoring.tracking import Tracker
    from rltrain.run.checkpoints import Checkpoint, Checkpoints
    from rltrain.run.memory.parts import Node
    from rltrain.run.memory.plan import MemoryPlan
    from rltrain.run.resume import Beginning
    from rltrain.run.signals import Signals
    from rltrain.trainer import Trainer
    from rltrain.trajectories.collector import Collector
    from rltrain.trajectories.teachers import Teachers
    from workers.environments.messages import Environments
    from workers.placement import Workers

# A printed error message has at most 4000 characters, because a message may quote long user input or data.
LONGEST = 4000
# STOPPED is the exit status after Ctrl-C. The exit status is 143 after SIGTERM and 129 after SIGHUP.
FAILED, BAD_INPUT, STOPPED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rltrain.main` with the given command-line arguments, and return the exit status.

    An expected error is printed as one line on stderr.
    """
    open_closed_streams()
    hide_in_logs()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In some locales, the encoding of stdout cannot represent every character.
        sys.stdout.reconfigure(errors="backslashreplace")
    console, verbose = Console(), False
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if args.action == "help":
            return show(f"{usage()}\n")
        _require_working_directory()
        if args.action == "sweep":
            from rltrain.run.sweep import sweep

            return sweep(args.overrides, args.files, console)
        config, _ = compose(args.overrides, args.files)
        set_threads(config)
        if args.action == "config":
            check_algorithm(config)
            return show(resolved_yaml(config))
        outlive_readers()
        verbose = config.verbose
        if not verbose:
            quiet()
        with Heartbeat(console) as heartbeat:
            config, nodes = _checked(config, args, heartbeat)
            with RunLock(config.trainer) as lock:
                return run(config, args, nodes, heartbeat, lock)
    except Stopped as error:
        return error.status
    except bdb.BdbQuit:
        return STOPPED
    except RLTrainError as error:
        return fail(str(error), BAD_INPUT if isinstance(error, ConfigError) else FAILED, verbose=verbose)
    except OSError as error:
        return fail(_system_error(error), FAILED, verbose=verbose)
    except Exception as error:
        hint = "" if verbose else " (verbose=true shows the traceback)"
        return fail(f"unexpected {described(error, LONGEST)}{hint}", FAILED, verbose=verbose)
    except KeyboardInterrupt:
        return STOPPED


def _checked(config: Config, args: Args, heartbeat: Heartbeat) -> "tuple[Config, list[Node]]":
    """Check the config and the nodes, and download the models and data sets of the config.

    The nodes are checked before the models, because importing the libraries that read models takes seconds.

    Returns:
        The config with each model and data set pinned, and the machines on which the run takes place.
    """
    with heartbeat.during("checking the config"):
        check_without_models(config)
    # `check_without_models` must run before `ensure_home`: if the user has no home folder, it refuses '~' in a path.
    # `ensure_home` sets HOME to a temporary folder.
    ensure_home()
    nodes = nodes_for(config, args, heartbeat)
    with heartbeat.during("checking the models"):
        config = _with_models(config, heartbeat)
        check_models(config)
        config = _with_datasets(config, heartbeat)
        check_cache(config)
    return config, nodes


def _with_models(config: Config, heartbeat: Heartbeat) -> Config:
    from rltrain.run.hub_models import fetch_models

    return fetch_models(config, heartbeat)


def _with_datasets(config: Config, heartbeat: Heartbeat) -> Config:
    from rltrain.run.pinned_datasets import fetch_datasets

    return fetch_datasets(config, heartbeat)


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory no longer exists; change to an existing directory") from None


def set_threads(config: Config) -> None:
    """Set the environment variables of the driver process; call this function before torch is imported.

    With `placement=inprocess`, the driver process itself trains the model, so it gets the number of OpenMP threads and
    the variables in `placement.env_vars`. With Ray, the worker processes get the number of OpenMP threads and the
    variables in `placement.env_vars`, and the driver process gets neither of them.
    """
    settings = openmp_settings(config.placement.threads_per_worker)
    if config.placement.launcher == "ray":
        del settings["OMP_NUM_THREADS"]
    else:
        settings |= config.placement.env_vars
    os.environ.update(settings)


def show(text: str) -> int:
    """Print a text to stdout, and return the exit status of the program.

    If the reader of stdout, such as `head`, closes the pipe early, the exit status is still 0.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # `outlive_readers` makes stdout discard output that cannot be written, so that the interpreter does not raise
        # BrokenPipeError when it flushes stdout at exit.
        outlive_readers()
    return 0


def _system_error(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, None)
    remedy = "free space, or choose another trainer.output_dir" if full else "correct this error, or name another path"
    return f"{error.strerror or error}{where}: {remedy}"


def fail(message: str, status: int, *, verbose: bool) -> int:
    """Print an error message as a single line to stderr.

    If `verbose` is true, the traceback is printed before the error message. The return value is `status`, the exit
    status of the program.
    """
    outlive_readers()
    if verbose:
        print(redacted(_traceback()), file=sys.stderr)  # noqa: T201 (the user asked for the traceback)
    print(f"error: {one_line(' '.join(message.split()), LONGEST)}", file=sys.stderr)  # noqa: T201
    return status


def locked_folder(config: Config, args: Args, lock: RunLock, tokenizer: Any) -> Path:
    """Lock the output folder of the run, write the files that describe the run, and return the path of the folder."""
    from rltrain.run.command import describe

    output_dir, text = output_folder(config.trainer), resolved_yaml(config)
    lock.take()
    # The file config.yaml is replaced atomically, so that config.yaml is complete even if the run is killed while the
    # run writes config.yaml.
    (output_dir / "config.yaml.partial").write_text(text, "utf-8")
    (output_dir / "config.yaml.partial").replace(output_dir / "config.yaml")
    describe(output_dir, args, tokenizer)
    return output_dir


def _traceback() -> str:
    try:
        return traceback.format_exc()
    # `format_exc` raises an exception if a user's function has an invalid source file name, because `format_exc` opens
    # the source file.
    except Exception as error:
        return f"The traceback cannot be shown ({described(error)})"


def run(config: Config, args: Args, nodes: "list[Node]", heartbeat: Heartbeat, lock: RunLock) -> int:
    """Load the data, print the plan of the run, train, print a summary, and return the exit status.

    If the command line asks only for the plan of the run or for a check of the nodes, no workers are started and no
    files of the run are written.
    """
    from rltrain.monitoring.console import summary
    from rltrain.run.environments import unread_rewards
    from rltrain.run.memory.plan import require_room
    from rltrain.trajectories.token_rewards import with_all_knobs

    console = heartbeat.console
    tokenizer, stop_ids, prompts, evaluations, environments = load(config, heartbeat)
    config = with_epochs_as_steps(config, len(prompts))
    with heartbeat.during("looking for a checkpoint"):
        start = start_of(config, console, prompts, evaluations)
    if start.over:
        return 0
    if args.action == "check":
        return 0
    began = time.perf_counter()
    with heartbeat.during("planning the memory"):
        memory = memory_of(config, nodes)
        plan(config, args, console, prompts, evaluations, memory)
    for warning in filter(None, (sandbox_warning(config), unread_rewards(config))):
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201 (reward processes cannot print: output dropped)
    if args.action == "plan":
        return show_memory(config, memory, console)
    require_room(config, memory)
    output_dir = locked_folder(config, args, lock, tokenizer)
    with ray_connection(config, heartbeat):
        tracker, curve, status = train(
            with_all_knobs(config),
            heartbeat,
            output_dir,
            stop_ids,
            prompts,
            evaluations,
            start.checkpoint,
            environments=environments,
            text_of=partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )
    summary(
        console,
        evaluations=tracker.evaluations,
        steps=len(tracker.history),
        seconds=time.perf_counter() - began,
        output_dir=output_dir,
        curve=curve,
        overrides=[*(f"--config={file}" for file in args.files), *args.overrides],
        finished=status == 0,
        other_algorithm=takes_other_algorithms(config, args) and not prompts.shows_images,
        evaluated=evaluated_prompts(config, prompts),
    )
    return status


def takes_other_algorithms(config: Config, args: Args) -> bool:
    """Return whether another algorithm can train with the run's other settings.

    Other algorithms need rewards. They cannot be combined with a config file that sets the functions of an algorithm.
    """
    try:
        compose(["algorithm=ppo"], args.files)
    except ConfigError:
        return False
    return bool(config.reward.components)


def evaluated_prompts(config: Config, prompts: PromptSet) -> str:
    """Return how the output names the prompts of `data.val`: as held-out prompts, or as training data."""
    from rltrain.monitoring.console import HELD_OUT, TRAINING_DATA
    from rltrain.run.plan import is_training_data

    source = config.data.val
    trained = source is not None and is_training_data(config, source, own_splits=prompts.own_splits)
    return TRAINING_DATA if trained else HELD_OUT


def load(
    config: Config, heartbeat: Heartbeat
) -> "tuple[Any, list[int], PromptSet, dict[str, PromptSet], Environments | None]":
    """Load and check the data, the teachers and the environments of the run.

    Return the tokenizer, the ids of the tokens that end an answer, the training prompts, a dict that maps the name of
    each evaluation set to the prompts of the set, and the environments.
    """
    with heartbeat.during("loading the data"):
        tokenizer, stop_ids = tokenizer_of(config)
        prompts, evaluations = load_data(config, tokenizer)
    with heartbeat.during("checking the teachers"):
        check_teachers(config, tokenizer, prompts)
    with heartbeat.during("loading the environments"):
        environments = environments_of(config, tokenizer, stop_ids, [prompts, *evaluations.values()])
    return tokenizer, stop_ids, prompts, evaluations, environments


def start_of(config: Config, console: Console, prompts: PromptSet, evaluations: Mapping[str, PromptSet]) -> "Beginning":
    """Return where the run starts, and print notes about the data and about the checkpoint of a resumed run."""
    from rltrain.run.resume import beginning, require_usable
    from rltrain.trajectories.token_rewards import with_all_knobs

    start = beginning(with_all_knobs(config))
    repaired = [] if start.checkpoint is None else require_usable(config, start.checkpoint, prompts)
    notes = (note for source in (prompts, *evaluations.values()) for note in source.notes)
    for line in (*notes, *start.said, *repaired):
        print_lines(console, line)
    return start


def train(
    config: Config,
    heartbeat: Heartbeat,
    output_dir: Path,
    stop_ids: list[int],
    prompts: PromptSet,
    evaluations: Mapping[str, PromptSet],
    checkpoint: "Checkpoint | None",
    *,
    environments: "Environments | None",
    text_of: Callable[[list[int]], str],
) -> tuple["Tracker", Path | None, int]:
    """Start the workers, and run the training loop.

    On Ctrl-C, SIGTERM or SIGHUP, `train` saves a checkpoint and ends the run.

    The argument `text_of` is a function that converts token ids to text, including special tokens, for printed samples.

    Return the tracker, the path of the learning-curve image (None if the run has no image), and the exit status.
    """
    from rltrain.monitoring.console import ConsoleDisplay
    from rltrain.monitoring.tracking import Tracker
    from rltrain.run.signals import Signals

    own = config.trainer
    display = ConsoleDisplay(
        own.total_steps,
        own.sample_every,
        heartbeat,
        components=config.reward.names,
        evaluated=evaluated_prompts(config, prompts),
        text_of=text_of,
    )
    with Signals() as signals, display:
        tracker = Tracker(
            output_dir,
            display,
            config.reward.names,
            trackers=own.trackers,
            sample_every=own.sample_every,
            config=asdict(config),
        )
        checkpoints = checkpoints_of(config, prompts)
        checkpoints.clean()
        try:
            status = asyncio.run(
                _train(
                    config,
                    display,
                    signals,
                    stop_ids,
                    prompts,
                    evaluations,
                    checkpoint,
                    tracker,
                    checkpoints,
                    environments,
                )
            )
            with heartbeat.during("writing the model"):
                checkpoints.publish(output_dir / "model")
        finally:
            with heartbeat.during("writing the report"):
                curve = tracker.close()
    return tracker, curve, status


async def _train(
    config: Config,
    display: "ConsoleDisplay",
    signals: "Signals",
    stop_ids: list[int],
    prompts: PromptSet,
    evaluations: Mapping[str, PromptSet],
    checkpoint: "Checkpoint | None",
    tracker: "Tracker",
    checkpoints: "Checkpoints",
    environments: "Environments | None",
) -> int:
    """Start the workers, train, stop the workers, and return the exit status."""
    from rltrain.monitoring.timeline import timeline
    from rltrain.trainer import Trainer
    from workers.placement import start

    with timeline(tracker.output_dir, wanted=config.trainer.trace) as events:
        async with BackgroundTasks() as tasks:
            path = start_model(config, display)
            with display.waiting("starting the workers"):
                workers = await start(
                    config,
                    path,
                    stop_ids,
                    tasks,
                    needs_critic=needs_critic(config.algorithm),
                    environments=environments,
                )
            async with workers:
                collector = collector_of(config, workers, prompts, tasks)
                collector.start()
                trainer = Trainer(
                    config,
                    collector=collector,
                    actor=workers.actor,
                    reference=workers.reference,
                    critic=workers.critic,
                    teachers=teachers_of(config, workers, tasks),
                    tracker=tracker,
                    checkpoints=checkpoints,
                    val_prompts=evaluations,
                    tasks=tasks,
                    restart=workers.restart_training,
                    timeline=events,
                )
                signals.stop_with(tasks)
                workers.daemons.patient = True
                events.workers = workers.recorded
                with display.training(lambda: trainer.timer.phase, workers.waited_for):
                    status = await fit(trainer, checkpoint, display.console)
                    await events.update()
                return status


def environments_of(
    config: Config, tokenizer: Any, stop_ids: list[int], prompts: Sequence[PromptSet]
) -> "Environments | None":
    """Load and check the environments and tools of the run. Return None if the run has neither environments nor tools.

    Raise ConfigError if an environment or a tool cannot be loaded, if an environment or a tool cannot be described to
    the model, or if the data lacks a column that the environment needs.
    """
    if not config.rollout.has_environment:
        return None
    from rltrain.run.environments import environments_for

    journal, deterministic = turns_folder(config.trainer), config.trainer.deterministic
    return environments_for(config.rollout, tokenizer, stop_ids, prompts, journal, deterministic=deterministic)


def collector_of(config: Config, workers: "Workers", prompts: PromptSet, tasks: BackgroundTasks) -> "Collector":
    """Create the collector, which requests answers from the rollout engines and scores from the reward workers."""
    from rltrain.trajectories.collector import Collector
    from rltrain.trajectories.reward_models import reward_models
    from workers.environments.turn_journal import TurnJournal

    return Collector(
        config,
        rollout=workers.rollout,
        rewards=workers.rewards,
        prompts=prompts,
        tasks=tasks,
        models=reward_models(config, workers.reward_models),
        journal=TurnJournal(turns_folder(config.trainer)) if config.rollout.has_environment else None,
    )


def teachers_of(config: Config, workers: "Workers", tasks: BackgroundTasks) -> "Teachers | None":
    """Create the teachers of the run. Return None if the config names no teachers."""
    if not config.algorithm.distillation.teachers:
        return None
    from rltrain.trajectories.teachers import Teachers

    return Teachers(config, workers.teachers, tokenizer_of(config)[0], tasks)


def checkpoints_of(config: Config, prompts: PromptSet) -> "Checkpoints":
    """Create the object that saves the run's checkpoints.

    Besides the training state, each checkpoint stores fingerprints of the data, reward functions and models of the run.
    """
    from rltrain.run.checkpoints import Checkpoints
    from rltrain.run.source_fingerprints import sources

    return Checkpoints(
        Folder(absolute(config.trainer.checkpoint_dir)),
        resolved_yaml(config),
        keep=config.trainer.keep_checkpoints,
        best=config.trainer.keep_best,
        sources=sources(config, prompts),
    )


async def fit(trainer: "Trainer", checkpoint: "Checkpoint | None", console: Console) -> int:
    """Train from a checkpoint or from step 0 to the last step, and return the exit status.

    On a stop signal, or if the user quits a debugger in the user's own code, `fit` saves a checkpoint of the current
    step and ends the run.

    If a Ray daemon dies, `fit` saves a checkpoint, provided that the training ranks still respond, and then raises
    ClusterLost.
    """
    if checkpoint is not None:
        await trainer.restore(checkpoint)
    else:
        # If an earlier run in the same output folder ended before its first checkpoint, its metrics are removed. Its
        # recorded turns are removed too, because the earlier run may have had another model.
        trainer.tracker.restore(0, {})
        trainer.collector.drop_turns_after(-1)
    try:
        await trainer.fit()
        return 0
    except (Stopped, bdb.BdbQuit) as stopped:  # BdbQuit is raised if the user quits a debugger.
        console.print(f"stopping: saving a checkpoint of step {trainer.step}", highlight=False)
        await trainer.save()
        await trainer.checkpoints.finish()
        return stopped.status if isinstance(stopped, Stopped) else STOPPED
    except ClusterLost as lost:
        raise ClusterLost(f"{lost}; {await saved_at_least(trainer, lost)}") from lost
    except (RLTrainError, OSError):  # OSError is raised if the disk is full when a checkpoint is saved.
        with contextlib.suppress(RLTrainError):
            # `finish` waits until a checkpoint that is already being saved is complete.
            await trainer.checkpoints.finish()
        raise


async def saved_at_least(trainer: "Trainer", lost: ClusterLost) -> str:
    """Save a checkpoint after a Ray daemon died, if the training ranks still respond.

    Return a text that names the step of the last undamaged checkpoint.
    """
    with contextlib.suppress(RLTrainError, OSError):
        if lost.can_save:
            await trainer.save()
        await trainer.checkpoints.finish()
    checkpoint = trainer.last_good()
    return (
        "the run has no checkpoint"
        if checkpoint is None
        else f"the last checkpoint of the run is of step {checkpoint.step}"
    )


def resolved_yaml(config: Config) -> str:
    """Return the config as YAML text.

    The YAML text includes the parameters of the loss and of the advantage estimator, even parameters that keep their
    default values.
    """
    from rltrain.trajectories.token_rewards import with_all_knobs

    return to_yaml(with_all_knobs(config))


def tokenizer_of(config: Config) -> tuple[Any, list[int]]:
    """Return the tokenizer and the ids of the tokens that end an answer.

    For the built-in model, the tokenizer and the end tokens are known even before the model has been created.
    """
    from rltrain.data.builtin_models import is_builtin
    from rltrain.data.image_models import load_processor, takes_images
    from rltrain.data.model_directory import check_vocabulary, load_tokenizer

    if is_builtin(config.model.path):
        return builtin_task(config).tokenizer(), end_ids_of(config, None)
    tokenizer = load_tokenizer(config.model.path)
    if takes_images(config.model.path) and not tokenizer.chat_template:
        # transformers gives the template of the file chat_template.json only to the processor.
        tokenizer.chat_template = getattr(load_processor(config.model.path), "chat_template", None)
    check_vocabulary(config.model.path, tokenizer, f"model.path={config.model.path}")
    return tokenizer, end_ids_of(config, tokenizer)


def placeholders_of(config: Config) -> ImagePlaceholders | None:
    """Return the object that replaces the placeholders of images in prompts, or None if the model takes no images."""
    from rltrain.data.builtin_models import is_builtin
    from rltrain.data.image_models import load_processor, takes_images

    if not takes_images(config.model.path):
        return None
    task = builtin_task(config) if is_builtin(config.model.path) else None
    return ImagePlaceholders(task.processor() if isinstance(task, PictureTask) else load_processor(config.model.path))


def end_ids_of(config: Config, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end an answer. For the built-in model, the argument `tokenizer` is not used."""
    from rltrain.data.builtin_models import is_builtin
    from rltrain.data.model_directory import end_token_ids

    if is_builtin(config.model.path):
        from rltrain.tasks.tokenizer import EOS_ID

        return [EOS_ID]
    return end_token_ids(config.model.path, tokenizer)


def supervised_options(config: Config, tokenizer: Any) -> SupervisedOptions | None:
    """Return the settings of the supervised answers in the training data, or None if the run has no supervised loss."""
    response = config.data.sft_response
    if config.algorithm.sft_coef == 0 or response is None:
        return None
    return SupervisedOptions(
        response=response,
        max_length=config.rollout.max_response_length,
        end_ids=end_ids_of(config, tokenizer),
        stop=config.rollout.stop,
        overlong=config.data.overlong_prompts,
    )


def start_model(config: Config, display: "ConsoleDisplay") -> str:
    """Return the path of the model with which training starts.

    `start_model` returns the absolute path of the model's directory, or the model's repository name on the Hugging Face
    hub with a commit. The result of `start_model` does not depend on the working directory.

    If `model.path` names the built-in model and the model is not in the cache yet, `start_model` creates the model and
    reports the progress to `display`.
    """
    from rltrain.data.builtin_models import is_builtin
    from rltrain.data.hub import portable

    if is_builtin(config.model.path):
        from rltrain.tasks.tiny_model import cached_start

        task = builtin_task(config)
        with display.counting(f"making the weak starting model for '{task.name}' (only once)") as on_step:
            return str(cached_start(task, on_step=on_step))
    return portable(config.model.path)


def load_data(config: Config, tokenizer: Any) -> tuple[PromptSet, dict[str, PromptSet]]:
    """Load the training prompts and the evaluation prompts.

    The evaluation prompts are returned as a dict that maps the name of each evaluation set to the prompts of the set.

    Raise ConfigError if a data set lacks a column that a reward function reads, or if there are too few training
    prompts.
    """
    from rltrain.data.builtin_models import is_builtin
    from rltrain.data.model_directory import check_prompt_ids
    from rltrain.rewards.loading import check_columns, load_function

    check_stop_strings(config.rollout.stop, tokenizer)
    data = config.data
    options: dict[str, Any] = {
        "max_prompt_length": config.rollout.max_prompt_length,
        "seed": config.trainer.seed,
        "overlong": data.overlong_prompts,
        "special_tokens": data.special_tokens,
        "lossy_tokenizer": data.lossy_tokenizer,
        "options": PromptOptions(
            prompt=data.prompt, system_prompt=data.system_prompt, chat=data.chat, images=data.images
        ),
        "placeholders": placeholders_of(config),
    }
    supervised = supervised_options(config, tokenizer)
    prompts = load_prompts(data.train, tokenizer, split="train", supervised=supervised, **options)
    check_prompt_count(config, len(prompts))
    evaluations = {
        name: load_prompts(source, tokenizer, split="val", key=key, limit=data.val_size, **options)
        for name, (key, source) in data.evaluations.items()
    }
    for one in (prompts, *evaluations.values()):
        check_images(config, one)
    if not is_builtin(config.model.path):
        for one in (prompts, *evaluations.values()):
            check_prompt_ids(config.model.path, one.largest_id(), one.where)
    for source in (prompts, *evaluations.values()):
        nulls = source.null_columns() if config.reward.functions else set()
        for function in config.reward.functions:
            try:
                called = load_function(function.path)
                check_columns(called, function.name, source.columns, function.kwargs, nulls=nulls, where=source.where)
            except ConfigError as error:
                own = "; to use a function of your own, set reward.functions=[FILE.py:FUNCTION]"
                is_default = function.path.startswith("rltrain.rewards.final_answer")
                raise ConfigError(f"{error}{own if is_default else ''}") from None
    return prompts, evaluations


def memory_of(config: Config, nodes: "Sequence[Node]") -> "MemoryPlan":
    """Return the memory plan of a run on the given machines."""
    from rltrain.run.memory.facts import model_facts
    from rltrain.run.memory.plan import memory_plan

    return memory_plan(config, model_facts(config, on_gpu=any(node.gpus for node in nodes)), nodes)


def show_memory(config: Config, memory: "MemoryPlan", console: Console) -> int:
    """Print the table of the memory plan, and return exit status 0 if the run fits into memory.

    Raise ConfigError if the run does not fit into memory.
    """
    from rltrain.run.memory.plan import require_room
    from rltrain.run.memory.table import table

    for line in ("", *table(memory)):
        print_lines(console, line)
    require_room(config, memory)
    return 0


def plan(
    config: Config,
    args: Args,
    console: Console,
    prompts: PromptSet,
    evaluations: Mapping[str, PromptSet],
    memory: "MemoryPlan",
) -> None:
    """Print the plan of the run: the model, the data, the devices and the main settings."""
    import torch

    from rltrain.algorithms import POLICY_LOSSES
    from rltrain.data.model_weights import parameter_count
    from rltrain.rewards.loading import load_function
    from rltrain.rewards.signatures import trainer_of
    from rltrain.run.memory.table import summary as memory_summary
    from rltrain.run.plan import Facts, show_plan
    from rltrain.trajectories.token_rewards import with_all_knobs

    loss = POLICY_LOSSES.metadata(config.algorithm.loss_mode)
    adapters = None
    if config.model.lora is not None:
        from workers.models.lora import adapter_parameters

        adapters = adapter_parameters(config.model.path, config.model.lora)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = Facts(
        path=config.model.path,
        parameters=parameter_count(config.model.path),
        adapters=adapters,
        train_prompts=len(prompts),
        supervised="" if prompts.supervised is None else prompts.supervised.described(len(prompts)),
        val_prompts={name: len(one) for name, one in evaluations.items()},
        data=prompts.described,
        val_data={name: one.described for name, one in evaluations.items()},
        own_splits=prompts.own_splits,
        needs_critic=needs_critic(config.algorithm),
        devices=f"{gpus} GPUs" if gpus else f"{cpu_cores()} CPU cores",
        memory=memory_summary(memory),
        teachers={model.name: parameter_count(model.path) for model in config.algorithm.distillation.models},
        signatures={
            function.name: trainer
            for function in config.reward.functions
            if (trainer := trainer_of(load_function(function.path)))
        },
        uses_ratio=loss.get("uses_ratio", True),
        aggregations=loss.get("aggregations", ()),
        alpha=with_all_knobs(config).algorithm.advantage.get("alpha"),
        defaults=profile_defaults(args.overrides, args.files) if config.profile == "instruct" else {},
    )
    show_plan(console, config, facts)


@contextlib.contextmanager
def ray_connection(config: Config, heartbeat: Heartbeat) -> Iterator[None]:
    """Start Ray on this machine if the run needs it, and disconnect from Ray at the end of the `with` block.

    If the run is on a cluster, `nodes_for` has already connected this process to the cluster.
    """
    on_ray = config.placement.launcher == "ray"
    try:
        if on_ray and not config.placement.on_cluster:
            with heartbeat.during("starting Ray"):
                join_cluster(config)
        yield
    finally:
        if on_ray:
            from workers.cluster.ray_connection import disconnect

            disconnect()


def join_cluster(config: Config) -> None:
    """Start Ray on this machine, or join a running Ray cluster, which must have a device for every training rank."""
    from workers.cluster.ray_connection import connect

    resources = connect(config)
    if config.placement.address != "local":
        check_cluster(config, resources)


def nodes_for(config: Config, args: Args, heartbeat: Heartbeat) -> "list[Node]":
    """Return the machines on which the run takes place.

    On a cluster or with `--check`, `nodes_for` first checks that each machine can take part in the run. With `--check`,
    the results of all checks of the machines are printed. With `--plan`, the config can describe a cluster that does
    not exist.

    Raise ConfigError if a machine cannot take part in the run, or if the cluster has too few devices.
    """
    from rltrain.run.memory.facts import machine, nodes_of, planned_nodes
    from rltrain.run.preflight import ask_nodes, findings, report, require_passed

    if args.action == "plan" and config.placement.nodes is not None:
        nodes = planned_nodes(config.placement)
        if config.placement.gpus_per_node:
            check_cluster(config, {"GPU": len(nodes) * config.placement.gpus_per_node})
        return nodes
    if config.placement.on_cluster:
        with heartbeat.during(f"connecting to the Ray cluster {config.placement.address}"):
            join_cluster(config)
    elif args.action != "check":
        return [machine()]
    with heartbeat.during("checking the nodes"):
        answers = ask_nodes(config)
    found = findings(config, *answers)
    for line in report(found) if args.action == "check" else ():
        print_lines(heartbeat.console, line)
    require_passed(found)
    return nodes_of(answers[0])


if __name__ == "__main__":
    sys.exit(main())
