"""Sweeps, which start one run for each combination of config values with Hydra's launchers and sweepers.

Hydra reads the values to combine, which the user writes as `KEY=A,B`, as `KEY=range(1,4)` or in the syntax of an
installed sweeper. Hydra starts the jobs of a sweep either one after another or with the launcher that
`hydra/launcher=NAME` selects. Each job is a separate process that runs `python -m rltrain.main` with one value per key.
Hydra must not compose rltrain's config, because Hydra's rules for keys differ from rltrain's rules. Hydra receives each
config key as a single word; for example, `trainer.seed` becomes `set__trainer__seed`.

Hydra does not receive the settings of keys with free text, such as `data.system_prompt`, because Hydra's grammar would
change the text. Each job gets these settings exactly as the user typed them, so they are the same in all jobs.

Before the first job starts, the config of every job is checked, so that a wrong value does not end a job hours later.
A sweeper plugin that chooses values from the results of earlier jobs is an exception: its jobs check their own configs.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrain.base.errors import ConfigError
from rltrain.monitoring.json_lines import rows_of
from rltrain.monitoring.sinks import EVALUATIONS, METRICS
from rltrain.run.checks import check_without_models
from rltrain.settings.compose import compose
from rltrain.settings.config_groups import config_dir
from rltrain.settings.overrides import sets_text
from rltrain.settings.typed import require

JOB_FILE = "sweep_job.json"
# Without `trainer.keep_best`, jobs are compared by the first metric in OBJECTIVES that a job has measured.
OBJECTIVES = ("eval/sampled_accuracy", "eval/sampled_reward")
_DOT = "__"  # In the keys that Hydra receives, two underscores replace each dot of a config key.
_START = f"set{_DOT}"  # Prefix by which Hydra tells a config key of rltrain from the name of a config group.
_OUTPUT_WORD = f"++{_START}trainer{_DOT}output_dir="


def sweep(overrides: Sequence[str], files: Sequence[str], console: Console) -> int:
    """Start one run for each combination of values, wait for all runs, and print a table of the results.

    Args:
        overrides: settings on the command line, of the form KEY=VALUE. Settings that begin with `hydra` are passed to
            Hydra itself. Settings of keys with free text are passed to every run unchanged.
        files: the user's config files, which every run reads.
        console: rich console on which the table is printed.

    Returns:
        0 if all runs of the sweep ended with exit status 0, else 1.

    Raises:
        ConfigError: Hydra cannot read the sweep, a launcher or sweeper is not installed, or the config of a job is
            invalid. In each of these cases, no job has started and no folder has been created.
    """
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    texts = [word for word in overrides if sets_text(word)]
    own = [_one_word_key(word) for word in overrides if not _is_hydras(word) and not sets_text(word)]
    arguments = [text for text in own if not text.startswith(_OUTPUT_WORD)]
    arguments += [f"hydra.sweep.dir={text.removeprefix(_OUTPUT_WORD)}" for text in own if text not in arguments]
    arguments += [text for text in overrides if _is_hydras(text)]
    job = Job([str(Path(file).expanduser().absolute()) for file in files], texts)
    path = create_config_search_path(str(config_dir()))
    try:
        composed = Hydra.create_main_hydra2("rltrain", path).compose_config("sweep", arguments, RunMode.MULTIRUN).hydra
        folder = composed.sweep.dir
        # `check_jobs` composes rltrain's config, which needs Hydra without a current application.
        GlobalHydra.instance().clear()
        check_jobs(job, composed, Path(folder))
        # `hydra.sweep.dir` is passed to Hydra with its time stamp filled in, so that all jobs use the same folder.
        arguments.append(_with_path("hydra.sweep.dir", folder))
        hydra = Hydra.create_main_hydra2("rltrain", path)
        hydra.multirun("sweep", job, arguments, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).replace(_START, "").replace(_DOT, ".").split())
        raise ConfigError(f"--multirun: {text}; write several values as KEY=A,B") from None
    finally:
        GlobalHydra.instance().clear()
    return show_results(Path(folder), console)


def _is_hydras(text: str) -> bool:
    return text.lstrip("+~").startswith(("hydra.", "hydra/"))


def _one_word_key(text: str) -> str:
    """Convert a setting KEY=VALUE to `++set__KEY=VALUE`, with `__` for each dot in KEY, so that Hydra accepts it."""
    key, equals, value = text.partition("=")
    require(bool(equals), f"'{text}': a sweep takes settings of the form KEY=VALUE")
    return f"++{_START}{key.lstrip('+').replace('.', _DOT)}={value}"


class Job:
    """Function object that Hydra's launcher calls for each combination of values, to run a job and return its result.

    A `Job` must be picklable, because some launchers of Hydra run jobs in other processes.

    Args:
        files: absolute paths of the config files that every run reads.
        texts: settings of keys with free text, which every run gets as the user typed them.
    """

    def __init__(self, files: Sequence[str], texts: Sequence[str] = ()) -> None:
        self.files = list(files)
        self.texts = list(texts)

    def settings(self, words: Iterable[str]) -> list[str]:
        """Return the settings of one job in the form in which they are typed after `python -m rltrain.main`.

        Args:
            words: the settings that Hydra gives to the job, one value per key.
        """
        return [*(_with_dots(word) for word in words), *self.texts]

    def __call__(self, _: Any) -> float:
        """Run one job of the sweep in a separate process.

        Returns:
            The last value of the metric that `trainer.keep_best` names. If `trainer.keep_best` is not set, a job
            returns the last accuracy that an evaluation measured on sampled answers. If no evaluation measured an
            accuracy, the job returns the last mean reward that an evaluation measured on sampled answers. A job returns
            NaN if its run failed, or if its run has measured none of the metrics that the job could return. If a Hydra
            sweeper searches for the best config values, the sweeper optimises the value that the job returns.
        """
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir).absolute()
        overrides = self.settings(hydra.overrides.task)
        files = [word for file in self.files for word in ("--config", file)]
        output = _with_path("trainer.output_dir", str(folder))
        status = _run([sys.executable, "-m", "rltrain.main", *files, *overrides, output])
        found = _objective(folder) if status == 0 else math.nan
        result = {
            "overrides": overrides,
            "status": status,
            "objective": None if math.isnan(found) else found,
            "output_dir": str(folder),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB_FILE).write_text(json.dumps(result), "utf-8")
        return found


def check_jobs(job: Job, hydra: Any, folder: Path) -> None:
    """Check the config of every job of a sweep, as far as this is possible without reading a model.

    Args:
        job: the function object that runs the jobs.
        hydra: Hydra's own config of the sweep.
        folder: output folder of the sweep.

    Raises:
        ConfigError: the config of a job is invalid. The message names the job's values.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if hydra.sweeper._target_ != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
        return  # Other sweepers may choose the values of a job from the results of earlier jobs.
    words = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    (combinations,) = BasicSweeper.split_arguments(words, max_batch_size=None)
    varied = {word.get_key_element() for word in words if word.is_sweep_override()}
    for number, combination in enumerate(combinations):
        try:
            config, _ = compose(
                [*job.settings(combination), _with_path("trainer.output_dir", str(folder / str(number)))], job.files
            )
            check_without_models(config)
        except ConfigError as error:
            values = " ".join(_with_dots(word) for word in combination if word.partition("=")[0] in varied)
            raise ConfigError(
                f"job {number} of the sweep{f' ({values})' if values else ''}: {error}; no job was started"
            ) from None


def _with_path(key: str, path: str) -> str:
    """Return the setting KEY=PATH. Quote the path if it has characters that may have a meaning in Hydra's grammar."""
    plain = re.fullmatch(r"[\w/.@:%+-]+", path, re.ASCII)
    return f"{key}={path if plain else QuotedString(path, Quote.single).with_quotes()}"


def _with_dots(text: str) -> str:
    key, _, value = text.partition("=")
    return f"{key.removeprefix(f'++{_START}').replace(_DOT, '.')}={value}"


def _run(command: list[str]) -> int:
    """Run the command of one job of a sweep, and return the command's exit status.

    If the user presses Ctrl-C, the command receives SIGINT too, and `_run` waits until the command has ended.
    """
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()  # The interrupted training command saves a checkpoint before it ends.
            raise


def _objective(folder: Path) -> float:
    """Return the run's last value of the metric by which the runs of a sweep are compared.

    Return NaN if the run has not measured the metric.
    """
    best = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))["trainer"]["keep_best"]
    rows = [row for name in (METRICS, EVALUATIONS) for row in rows_of((folder / name).read_bytes())[-1:]]
    last = {name: value for row in rows for name, value in row.items()}
    return next((float(last[name]) for name in ([best] if best else OBJECTIVES) if name in last), math.nan)


def show_results(folder: Path, console: Console) -> int:
    """Print a table with the result of each job of a sweep. Return 0 if all jobs ended with status 0, else 1."""
    jobs = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob(f"*/{JOB_FILE}"), key=_number)]
    same = set.intersection(*(set(job["overrides"]) for job in jobs)) if len(jobs) > 1 else set()
    table = Table("settings", "status", "result", "folder", box=None, header_style="bold", pad_edge=False)
    for job in jobs:
        settings = " ".join(text for text in job["overrides"] if text not in same)
        result = "" if job["objective"] is None else f"{job['objective']:.4g}"
        # `Text` prevents rich from reading brackets in settings and paths as markup.
        table.add_row(Text(settings), str(job["status"]), result, Text(job["output_dir"]))
    console.print(table)
    console.print(
        f"result: last value of the metric that trainer.keep_best names, or of {' or '.join(OBJECTIVES)} if "
        "trainer.keep_best is null",
        style="dim",
    )
    return int(any(job["status"] for job in jobs))


def _number(file: Path) -> tuple[bool, int, str]:
    name = file.parent.name
    return (not name.isdigit(), int(name) if name.isdigit() else 0, name)
