"""The memory plan as text: a table of processes and phases, the parts of each peak, and the available memory."""

import textwrap
from collections.abc import Iterator, Sequence

from rltrain.run.memory.parts import PHASES, Part, Phases, ProcessMemory, peak, said, total
from rltrain.run.memory.plan import MemoryPlan, MemoryUse

_GIB = 2**30
_WIDTH = 80  # Width of the table in characters, which is also the usual width of a terminal.
_NAME, _COLUMN = 20, 10


def summary(plan: MemoryPlan) -> str:
    """Return the memory plan in one line: the peak of each kind of process, and the available memory."""
    texts = []
    for process in plan.processes[:-2]:  # The last two `processes` are the reward workers and the driver.
        phases = process.device or process.host
        each = "" if process.count == 1 else "each "
        texts.append(f"{_count(process)} {each}{said(total(phases[peak(phases)]))}")
    return "; ".join([*texts, *(f"{place.name}: {said(place.size)}{_of(place)}" for place in plan.places)])


def table(plan: MemoryPlan) -> list[str]:
    """Return the lines of the memory table that `--plan` prints."""
    lines = [f"{'GB per process':<{_NAME}}" + "".join(f"{phase:>{_COLUMN}}" for phase in PHASES)]
    for process in plan.processes:
        lines += _row(_count(process), process.device or process.host)
        if process.device:
            lines += _row("  host memory", process.host)
    for process in plan.processes[:-2]:
        phases = process.device or process.host
        lines += ["", *_wrapped(f"{process.name}, peak in the phase {peak(phases)}: {_parts(phases[peak(phases)])}")]
    lines.append("")
    for place in plan.places:
        verdict = "unknown" if place.capacity is None else "fits" if place.fits else "DOES NOT FIT"
        lines += _wrapped(f"{place.name}: needs {said(place.size)}{_of(place)}: {verdict}")
    if plan.cache_rows is not None:
        lines += _wrapped(
            f"KV cache of an engine: room for {plan.cache_rows:,.0f} answers of the maximum length at a time"
        )
    return lines


def _row(name: str, phases: Phases) -> list[str]:
    """Return a process's line of the memory table. A name that is too long for its column has a line of its own."""
    sizes = "".join(f"{total(phases[phase]) / _GIB:>{_COLUMN}.2f}" for phase in PHASES)
    return [f"{name:<{_NAME}}{sizes}"] if len(name) < _NAME else [name, f"{'':<{_NAME}}{sizes}"]


def _count(process: ProcessMemory) -> str:
    return process.name if process.count == 1 else f"{process.count} x {process.name}"


def _of(place: MemoryUse) -> str:
    return "" if place.capacity is None else f" of {said(place.capacity)}"


def _parts(parts: Sequence[Part]) -> str:
    shown = sorted((part for part in parts if part.size), key=lambda part: -part.size)
    return ", ".join(f"{part.what} {said(part.size)}" for part in shown)


def _wrapped(text: str) -> Iterator[str]:
    """Wrap a text at 80 columns, and yield the lines; all lines except the first are indented."""
    yield from textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
