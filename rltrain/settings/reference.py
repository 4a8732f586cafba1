"""Generates documentation from the schema of the config keys: two pages in `docs/`, and the comments in the YAML files
of `config/`.

The generated pages are `docs/settings.md` and `docs/coming-from-other-trainers.md`. The following command regenerates
the two pages in `docs/` and the comments in `config/`, and prints the names of the changed files:

    python -m rltrain.settings.reference

A YAML file whose `defaults` name another file of its config group contains only the values that differ from that other
file. In a YAML file whose `defaults` name another file of its config group, all comments are kept, because they explain
why the file sets particular values. A YAML file whose `defaults` name no other file of its config group contains all
keys of its sections, and the comments of its keys are generated. The comment at the start of a YAML file, and comments
above lines that set no config key, are kept.
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf

from rltrain.settings.config_groups import choices, composed_files, config_dir, group_names
from rltrain.settings.key import Declared, declared_keys
from rltrain.settings.other_names import NAMES
from rltrain.settings.schema import Config

WIDTH = 120  # Maximum number of characters in a line of a YAML file.
TOP = ""  # The empty key path stands for the whole config.
# First line of each YAML file that belongs to one config group but sets keys of several sections.
WHOLE_CONFIG = "# @package _global_"
INTRODUCTION = """\
# Settings

This page lists every config key. `python -m rltrain.settings.reference` generates the page from `rltrain/settings`.

`GROUP=CHOICE` selects the file `config/GROUP/CHOICE.yaml`, and `KEY=VALUE` sets one key. The defaults on this page are
those of `config/train.yaml` and of the default choice of each group; other choices of a group may have other defaults.
A default may refer to another key: `${data.train}` is the value of `data.train`. The following command prints the value
of every key for the given arguments, and stops:

```bash
python -m rltrain.main algorithm=ppo trainer.total_steps=60 --cfg
```

The column "on resume" says whether a run may continue from a checkpoint with another value of the key.
[Checkpoints](checkpoints.md) describes how a run is resumed."""
NAMES_INTRODUCTION = """\
# Coming from other trainers

This table lists options of TRL's `GRPOConfig`, of verl's configuration and of OpenRLHF's command line, with rltrain's
key for the same setting. The table is generated from `rltrain/settings/other_names.py`. [Settings](settings.md)
describes rltrain's keys.

rltrain accepts reward functions with the signatures of TRL, verl and OpenRLHF without changes:

| | TRL | verl | OpenRLHF |
|---|---|---|---|
| signature | `def reward(prompts, completions, **kwargs)` | `def compute_score(data_source, solution_str, \
ground_truth, extra_info=None)` | `def reward_func(queries, prompts, labels, **kwargs)` |
| set with | `reward.functions=[FILE.py:reward]` | `reward.functions=[FILE.py:compute_score]` | \
`reward.functions=[FILE.py:reward_func]` |
| right answer | columns of the data, by name | column `ground_truth`, `reward_model` or `answer` | column `label`, \
`labels`, `answer` or `ground_truth` |

[Rewards](rewards.md#functions-written-for-other-trainers) describes how rltrain calls reward
functions that were written for other trainers.

Trainers differ in the meaning of a step and in the unit of batch sizes. In rltrain, a *step* is one round of
generation, scoring and training, and may contain several optimizer steps. `trainer.prompts_per_step` and
`trainer.prompts_per_minibatch` count prompts, and each prompt has `rollout.samples_per_prompt` answers."""
COLUMNS = ("key", "default", "values", "meaning", "on resume")
ENTRY_COLUMNS = ("key", "if left out", *COLUMNS[2:])
PLAIN_TYPES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true` or `false`",
    dict: "mapping",
}
_LINE_OF_KEY = re.compile(r"(?P<indent> *)(?P<dash>- )?(?P<name>\w+):(?P<rest>( .*)?)")


def page() -> str:
    """Return the text of `docs/settings.md`."""
    every, defaults = tuple(declared_keys(Config)), _defaults()
    lines = [INTRODUCTION]
    for one in every:
        if one.section is not None:
            lines += ["", *_section(one, every, defaults)]
    return "\n".join([*lines, "", "## Other keys", "", *_table(TOP, every, defaults)]) + "\n"


def names_page() -> str:
    """Return the text of `docs/coming-from-other-trainers.md`."""
    columns = ("rltrain", "TRL", "verl", "OpenRLHF", "note")
    rows = [(*map(_in_backticks, (one.key, one.trl, one.verl, one.openrlhf)), one.hint) for one in NAMES]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([NAMES_INTRODUCTION, "", lines[0], f"|{'---|' * len(columns)}", *lines[1:]]) + "\n"


def _in_backticks(names: str) -> str:
    """Put each of several names that are separated by spaces into backticks, and commas between the names."""
    return ", ".join(f"`{name}`" for name in names.split())


def _section(section: Declared, every: tuple[Declared, ...], defaults: Mapping[str, Any]) -> list[str]:
    """Return the lines of `docs/settings.md` about one section: its heading, its meaning, the choices of its config
    group, and the table of its keys.
    """
    path, title = section.path, f"`{section.path}`"
    if get_origin(section.hint) is list:
        path, title = f"{path}[]", f"An entry of {title}"
    group = path.split(".")[0]
    lines = ["#" * (2 if path == group else 3) + f" {title}", "", section.key.meaning]
    if path in group_names():
        lines += ["", f"Choices of `{group}=CHOICE`: {', '.join(f'`{choice}`' for choice in choices(group))}."]
    return [*lines, "", *_table(path, every, defaults)]


def _table(path: str, every: tuple[Declared, ...], defaults: Mapping[str, Any]) -> list[str]:
    rows = [one for one in every if _parent(one.path) == path and (_is_set_whole(one) or one.section is None)]
    columns = ENTRY_COLUMNS if any(one.key.if_left_out for one in rows) else COLUMNS
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *(_cells(one, defaults) for one in rows))]
    return [lines[0], f"|{'---|' * len(columns)}", *lines[1:]]


def _cells(one: Declared, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    default = one.key.if_left_out or f"`{_shown(_value_at(one.path, defaults))}`"
    name = one.path if not one.key.if_left_out else one.path.rpartition(".")[2]
    return (
        f"`{name}`",
        default,
        values_of(one),
        one.key.meaning,
        "may change" if one.changeable else "must stay the same",
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_set_whole(one: Declared) -> bool:
    """Return whether the value of a key is a list, or is a whole section, as in `model.lora={rank:8}`.

    If a section's dataclass has the attribute `given_whole`, users set the whole section as the value of one key.
    """
    return get_origin(one.hint) is list or bool(getattr(one.section, "given_whole", False))


def values_of(one: Declared) -> str:
    """Return the description of a key's valid values, such as `whole number >= 1, or null`."""
    unit = f", in {one.key.unit}" if one.key.unit else ""
    return one.key.values + unit if one.key.values else f"{_type(one.hint, one.key.bounds)}{unit}"


def _type(hint: Any, bounds: str = "") -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (kind,) = (arg for arg in args if arg is not NoneType)
        return f"{_type(kind, bounds)}, or `null`"
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin is list:
        return "list of names" if args == (str,) else "list of entries"
    plain = PLAIN_TYPES.get(origin or hint, "mapping")
    return f"{plain} {bounds}" if bounds else plain


def _defaults() -> Mapping[str, Any]:
    """Return the default config as nested values, composed of `config/train.yaml` and the default choice of each config
    group.

    References such as `${data.train}` in the default config are not resolved.
    """
    values = OmegaConf.to_container(composed_files(config_dir(), ()), resolve=False)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _value_at(path: str, values: Mapping[str, Any]) -> Any:
    head, _, rest = path.partition(".")
    return _value_at(rest, values[head]) if rest else values[head]


def _shown(value: Any) -> str:
    """Return a value as a user would write it on the command line."""
    if isinstance(value, list):
        return f"[{','.join(item['path'] if isinstance(item, dict) else str(item) for item in value)}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def commented(text: str, prefix: str = "") -> str:
    """Return the text of a YAML file, with the comments of its keys replaced by generated comments.

    Args:
        text: the current text of the file, with or without comments.
        prefix: text, such as `trainer.`, that is put before the key names in the file to get full paths.
    """
    if _builds_on_another_choice(text):
        return text
    meanings = {one.path: _comment(one) for one in declared_keys(Config)}
    head, body = _without_head(text.splitlines())
    lines, waiting = [*head, ""], list[str]()
    for line, path in _paths(body, prefix):
        if not line.strip() or line.strip().startswith("#"):
            waiting.append(line)
        elif path in meanings:
            lines += [above for above in waiting if not above.strip()] + _with_comment(line, meanings[path])
            waiting = []
        else:
            lines += [*waiting, line]
            waiting = []
    result = "\n".join([*lines, *waiting]) + "\n"
    assert yaml.safe_load(result) == yaml.safe_load(text), "generated comments must not change the values in a file"
    return result


def _builds_on_another_choice(text: str) -> bool:
    defaults = yaml.safe_load(text).get("defaults", [])
    return any(isinstance(choice, str) and choice != "_self_" for choice in defaults)


def _comment(one: Declared) -> str:
    return f"{one.key.meaning} Unit: {one.key.unit}." if one.key.unit else one.key.meaning


def _without_head(lines: list[str]) -> tuple[list[str], list[str]]:
    """Split the lines of a file into the leading comment and the remaining lines, and drop empty lines in between."""
    end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    start = next((n for n, line in enumerate(lines) if n >= end and line.strip()), len(lines))
    return lines[:end], lines[start:]


def _paths(lines: list[str], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each line of a YAML file, together with the full path of the line's key. For a line without a key, the
    yielded path is "".
    """
    # For each key in which the current line is nested, the list `around` holds a pair (number of characters before the
    # key in the key's line, full path of the key).
    around: list[tuple[int, str]] = [(-1, prefix.rstrip("."))]
    for line in lines:
        found = _LINE_OF_KEY.fullmatch(line)
        if found is None:
            yield line, ""
            continue
        column = len(found["indent"])
        while around[-1][0] >= column:
            around.pop()
        if found["dash"]:
            around.append((column, f"{around[-1][1]}[]"))
            column += len(found["dash"])
        path = f"{around[-1][1]}.{found['name']}".lstrip(".")
        around.append((column, path))
        yield line, path


def _with_comment(line: str, comment: str) -> list[str]:
    """Return the line of a config key with the text `comment` as a comment at the end of the line.

    If the line with the comment would be longer than `WIDTH`, the comment is put on separate lines above the key.
    """
    bare = re.sub(r"\s+#.*", "", line)
    short = f"{bare}  # {comment}"
    if len(short) <= WIDTH:
        return [short]
    start = " " * (len(line) - len(line.lstrip())) + "# "
    return [*textwrap.wrap(comment, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False), bare]


def outdated() -> dict[Path, str]:
    """Return a dict that maps the path of each outdated file to the file's new text.

    A generated file is outdated if the file does not match the schema.
    """
    folder = config_dir()
    docs = folder.parent / "docs"
    new = {docs / "settings.md": page(), docs / "coming-from-other-trainers.md": names_page()}
    for file in sorted(folder.rglob("*.yaml")):
        text = file.read_text("utf-8")
        is_global = file.parent == folder or text.startswith(WHOLE_CONFIG)
        new[file] = commented(text, "" if is_global else f"{file.parent.name}.")
    return {file: text for file, text in new.items() if not file.exists() or file.read_text("utf-8") != text}


def main() -> None:
    """Rewrite the generated files that do not match the schema, and print the names of the rewritten files."""
    for file, text in outdated().items():
        file.write_text(text, "utf-8")
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
