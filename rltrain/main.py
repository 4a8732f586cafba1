"""`python -m rltrain.main`: overrides -> typed config -> checks -> plan -> workers -> `Trainer.fit` -> summary.

Only functions are defined here: a class would pickle as `__main__.X`.
"""

import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rltrain.algorithm_checks import check_algorithm, needs_critic
from rltrain.checks import builtin_task, check, check_cluster, output_folder, sandbox_warning
from rltrain.compose import compose, parse_args, to_yaml, usage
from rltrain.cores import cpu_cores
from rltrain.errors import ConfigError, RLTrainError, Stopped, one_line
from rltrain.run_lock import RunLock
from rltrain.schema import Config
from rltrain.secret_values import redacted
from rltrain.storage import Folder, absolute
from workers.host import quiet

LONGEST = 4000  # characters of an error that are shown: it may repeat what was typed, or a row of the data
FAILED, BAD_INPUT, STOPPED = 1, 2, 130  # exit statuses; the last is that of Ctrl-C, SIGTERM has 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Expected errors are one line on stderr."""
    console, verbose = Console(), False
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if args.action == "help":
            console.print(usage(), markup=False, highlight=False, soft_wrap=True)
            return 0
        config, _ = compose(args.overrides)
        if args.action == "config":
            check_algorithm(config)
            console.print(resolved_yaml(config), markup=False, highlight=False, soft_wrap=True, end="")
            return 0
        verbose = config.verbose
        if not verbose:
            quiet()
        check(config)
        with RunLock(config.trainer) as lock:
            return run(config, args.overrides, console, lock)
    except Stopped as error:
        return error.status
    except RLTrainError as error:
        return fail(str(error), BAD_INPUT if isinstance(error, ConfigError) else FAILED, verbose=verbose)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return fail(
            f"{error.strerror or error}{where}: free space, or choose another trainer.output_dir",
            FAILED,
            verbose=verbose,
        )
    except Exception as error:
        hint = "" if verbose else " (verbose=true shows the traceback)"
        return fail(f"unexpected {type(error).__name__}: {error}{hint}", FAILED, verbose=verbose)
    except KeyboardInterrupt:
        return STOPPED


def fail(message: str, status: int, *, verbose: bool) -> int:
    """Say what went wrong on one line of stderr, after its traceback if that is wanted; returns the status."""
    if verbose:
        print(redacted(traceback.format_exc()), file=sys.stderr)  # noqa: T201 (asked for)
    print(f"error: {one_line(redacted(' '.join(message.split())), LONGEST)}", file=sys.stderr)  # noqa: T201 (one line)
    return status


def run(config: Config, overrides: Sequence[str], console: Console, lock: RunLock) -> int:
    """Load the data, show the plan, start the workers, train, and say what came of it."""
    from rltrain.console import summary
    from rltrain.credit import with_all_knobs
    from rltrain.resume import beginning, require_usable

    tokenizer, stop_ids = tokenizer_of(config)
    prompts, val_prompts = load_data(config, tokenizer)
    start = beginning(with_all_knobs(config))
    if start.checkpoint is not None:
        require_usable(config, start.checkpoint, prompts)
    for line in start.said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if start.over:
        return 0
    local = config.placement.launcher == "ray" and config.placement.address == "local"
    if config.placement.launcher == "ray" and not local:
        join_cluster(config)
    began = time.perf_counter()
    plan(config, console, len(prompts), len(val_prompts))
    if warning := sandbox_warning(config):
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201 (one line; what a reward process says is dropped)
    output_dir, text = output_folder(config.trainer), resolved_yaml(config)
    lock.take()
    (output_dir / "config.yaml.partial").write_text(text)  # whole at any time: a run that is killed now can go on
    (output_dir / "config.yaml.partial").replace(output_dir / "config.yaml")
    try:
        if local:
            join_cluster(config)
        tracker, curve, status = train(
            with_all_knobs(config), console, output_dir, stop_ids, prompts, val_prompts, start.checkpoint
        )
    finally:
        if config.placement.launcher == "ray":
            from workers.placement import disconnect

            disconnect()
    summary(
        console, evaluations=tracker.evaluations, history=tracker.history, seconds=time.perf_counter() - began,
        output_dir=output_dir, curve=curve, overrides=overrides, finished=status == 0,
    )  # fmt: skip
    return status


def train(
    config: Config,
    console: Console,
    output_dir: Path,
    stop_ids: list[int],
    prompts: Any,
    val_prompts: Any,
    checkpoint: Any,
) -> tuple[Any, Path | None, int]:
    """Start the workers and train; Ctrl-C and SIGTERM save a checkpoint and end.

    Returns (tracker, learning curve, exit status).
    """
    from rltrain.checkpoint import Checkpoints
    from rltrain.collector import Collector
    from rltrain.console import ConsoleDisplay
    from rltrain.reward_models import reward_models
    from rltrain.signals import Signals
    from rltrain.sources import sources
    from rltrain.tracking import Tracker
    from rltrain.trainer import Trainer
    from workers.placement import start

    own = config.trainer
    with Signals() as signals, ConsoleDisplay(own.total_steps, own.sample_every, console) as display:
        tracker = Tracker(output_dir, display, [component.name for component in config.reward.components])
        checkpoints = Checkpoints(
            Folder(absolute(own.checkpoint_dir)), resolved_yaml(config), keep=own.keep_checkpoints, best=own.keep_best,
            sources=sources(config, prompts),
        )  # fmt: skip
        checkpoints.clean()
        path = model_directory(config, display)
        with display.waiting("starting the workers"):
            workers = start(config, path, stop_ids, needs_critic=needs_critic(config.algorithm))
        trainer = Trainer(
            config,
            collector=Collector(
                config, rollout=workers.rollout, rewards=workers.rewards, prompts=prompts,
                models=reward_models(config, workers.reward_models),
            ),
            actor=workers.actor, reference=workers.reference, critic=workers.critic,
            tracker=tracker, checkpoints=checkpoints, val_prompts=val_prompts, interrupted=signals.check,
            restart=workers.restart_training,
        )  # fmt: skip
        try:
            status = fit(trainer, checkpoint, signals, console)
            checkpoints.publish(output_dir / "model")
        finally:
            workers.close()
            curve = tracker.close()
    return tracker, curve, status


def fit(trainer: Any, checkpoint: Any, signals: Any, console: Console) -> int:
    """Train from a checkpoint or the start; a signal makes another checkpoint and ends it. Returns the exit status."""
    if checkpoint is not None:
        trainer.restore(checkpoint)
    else:
        trainer.tracker.restore(0, {})  # of a run that ended before its first checkpoint
    signals.patient = True
    try:
        trainer.fit()
        return 0
    except Stopped as stopped:
        console.print(f"stopping: saving a checkpoint of step {trainer.step}", highlight=False)
        trainer.save()
        trainer.checkpoints.finish()
        return stopped.status
    except (RLTrainError, OSError):  # also a full disk
        with contextlib.suppress(RLTrainError):
            trainer.checkpoints.finish()  # what can be saved is
        raise


def resolved_yaml(config: Config) -> str:
    """The config as YAML, with the knobs of loss and estimator that keep their defaults."""
    from rltrain.credit import with_all_knobs

    return to_yaml(with_all_knobs(config))


def tokenizer_of(config: Config) -> tuple[Any, list[int]]:
    """The tokenizer, and the ids that end an answer; the built-in model's are known before it is made."""
    from rltrain.model_files import BUILTIN_MODEL, end_token_ids, load_tokenizer

    if config.model.path == BUILTIN_MODEL:
        from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer

        return char_tokenizer(), [EOS_ID]
    path = model_directory(config, None)
    tokenizer = load_tokenizer(path)
    return tokenizer, end_token_ids(path, tokenizer)


def model_directory(config: Config, display: Any) -> str:
    """The model to start from; the built-in one is made on the spot the first time."""
    from rltrain.model_files import BUILTIN_MODEL

    if config.model.path != BUILTIN_MODEL:
        return str(Path(config.model.path).expanduser().absolute())
    from rltrain.tasks.tiny_model import cached_start

    task = builtin_task(config)
    return str(cached_start(task, on_step=display.progress_of(f"making the weak start for '{task.name}', once")))


def load_data(config: Config, tokenizer: Any) -> tuple[Any, Any]:
    """Training and validation prompts, with the reward functions' columns checked against them."""
    from rltrain.data import load_prompts
    from rltrain.rewards.loading import check_columns, load_function

    data, limits = config.data, {"max_prompt_length": config.rollout.max_prompt_length, "seed": config.trainer.seed}
    prompts = load_prompts(data.train, tokenizer, split="train", overlong=data.overlong_prompts, **limits)
    val: Any = []
    if data.val is not None:
        val = load_prompts(
            data.val, tokenizer, split="val", overlong=data.overlong_prompts, limit=data.val_size, **limits
        )
    for function in config.reward.functions:
        for source in (prompts, val) if val else (prompts,):
            try:
                check_columns(load_function(function.path), function.name, source.columns, function.kwargs)
            except ConfigError as error:
                own = "; a function of your own: reward.functions=[FILE.py:FUNCTION]"
                is_default = function.path.startswith("rltrain.rewards.final_answer")
                raise ConfigError(f"{error}{own if is_default else ''}") from None
    return prompts, val


def plan(config: Config, console: Console, train_prompts: int, val_prompts: int) -> None:
    """Show what is going to happen."""
    import torch

    from rltrain.model_files import BUILTIN_MODEL, parameter_count
    from rltrain.plan import Facts, show_plan
    from rltrain.tasks.tiny_model import tiny_model

    builtin = config.model.path == BUILTIN_MODEL
    if builtin:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in tiny_model().parameters())
    else:
        parameters = parameter_count(Path(config.model.path).expanduser())
    adapters = None
    if config.model.lora is not None:
        from workers.lora import adapter_parameters

        adapters = adapter_parameters(config.model.path, config.model.lora)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = Facts(
        path=config.model.path, parameters=parameters, adapters=adapters, train_prompts=train_prompts,
        val_prompts=val_prompts,
        needs_critic=needs_critic(config.algorithm), devices=f"{gpus} GPUs" if gpus else f"{cpu_cores()} CPU cores",
        on_gpu=gpus > 0,
        reward_models={model.name: parameter_count(Path(model.path).expanduser()) for model in config.reward.models},
    )  # fmt: skip
    show_plan(console, config, facts)


def join_cluster(config: Config) -> None:
    """Start Ray here, or join a running cluster, which must have a device for every rank."""
    from workers.placement import connect

    resources = connect(config)
    if config.placement.address != "local":
        check_cluster(config, resources)


if __name__ == "__main__":
    sys.exit(main())
