"""Records the command line of a run and the text of each token id, for the report of the run."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError, described
from rltrain.monitoring.report.config_differences import Command, write_command
from rltrain.monitoring.token_texts import TOKENS, write_token_texts
from rltrain.settings.command_line import Args
from rltrain.settings.compose import choices_of, compose
from rltrain.trajectories.token_rewards import with_all_knobs

logger = logging.getLogger(__name__)


def command_of(overrides: Sequence[str], files: Sequence[str] = ()) -> Command:
    """Return a run's command-line arguments, the presets that the arguments choose, and the presets' config values."""
    presets = choices_of(overrides, files)
    try:
        values = dataclasses.asdict(with_all_knobs(compose(presets)[0]))
    # `compose` raises ConfigError if a preset is valid only together with the run's other command-line arguments. If
    # `compose` raises ConfigError, no config values of the presets are returned.
    except ConfigError:
        values = {}
    return Command([*(f"--config={file}" for file in files), *overrides], presets, values)


def describe(output_dir: Path, args: Args, tokenizer: Any) -> None:
    """Write the command line of a run and the text of each token id to the run's output folder."""
    write_command(command_of(args.overrides, args.files), output_dir)
    try:
        write_token_texts(tokenizer, output_dir)
    # A user's own tokenizer may raise any exception. If the tokenizer raises an exception, the run continues without a
    # file of token texts.
    except Exception as error:
        logger.warning(
            "%s could not be written, so the report shows token ids instead of texts: %s", TOKENS, described(error)
        )
