"""What the report of a run needs besides its results: how the run was started, and the texts of its tokens."""

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
    """Return the command of a run with these arguments, and the config of its presets."""
    presets = choices_of(overrides, files)
    try:
        values = dataclasses.asdict(with_all_knobs(compose(presets)[0]))
    except ConfigError:  # presets that go together only with other arguments
        values = {}
    return Command([*(f"--config={file}" for file in files), *overrides], presets, values)


def describe(output_dir: Path, args: Args, tokenizer: Any) -> None:
    """Write the command and the texts of tokens to the output folder of a run."""
    write_command(command_of(args.overrides, args.files), output_dir)
    try:
        write_token_texts(tokenizer, output_dir)
    except Exception as error:  # a tokenizer of a user's own may raise any exception, and the run needs no texts
        logger.warning("%s is not written, so the report shows the ids of tokens: %s", TOKENS, described(error))
