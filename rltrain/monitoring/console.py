"""Console output of a run: progress bar, samples, warnings, and a final summary of the results."""

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from rltrain.base.errors import one_line
from rltrain.batch.data_proto import DataProto
from rltrain.monitoring.evaluation_metrics import KINDS, evaluated_sets, prefix_of
from rltrain.monitoring.heartbeat import Heartbeat, duration, still
from rltrain.monitoring.printing import print_lines
from rltrain.monitoring.report.page import REPORT
from rltrain.monitoring.status_line import StatusLine

SHOWN_TEXT = 400  # Printed samples show at most SHOWN_TEXT characters of a prompt or an answer.
SHOWN_MESSAGES = 12  # A printed conversation has at most SHOWN_MESSAGES messages.
SHOWN_PARTS = 3  # The progress bar shows the scores of at most SHOWN_PARTS reward functions.
SHOWN_NAME = 16  # The progress bar shows at most SHOWN_NAME characters of the name of a reward function.
# If the output is not a terminal, the metrics of every tenth training step are printed as one line. Metrics of a step
# whose number is not a multiple of 10 are printed if no metrics were printed in the last 10 seconds.
PLAIN_EVERY, PLAIN_EVERY_S = 10, 10.0
TIMED_STEPS = 20  # The remaining time of a run is estimated from its 20 most recent steps.


HELD_OUT, TRAINING_DATA = "held-out", "training-data"


class ConsoleDisplay:
    """Display of the progress of a run: a live progress bar on a terminal, and lines of text in a file or pipe.

    Args:
        total_steps: total number of training steps of the run.
        sample_every: number of training steps between two printed samples; 0 prints no samples.
        heartbeat: the heartbeat of the run, to whose console the display writes.
        components: names of the reward functions and reward models.
        evaluated: what the evaluation set of `data.val` contains, `HELD_OUT` or `TRAINING_DATA`.
        text_of: function that converts token ids to text, including special tokens. If `text_of` is None, samples are
            shown without special tokens.
    """

    def __init__(
        self,
        total_steps: int,
        sample_every: int,
        heartbeat: Heartbeat,
        *,
        components: Sequence[str] = (),
        evaluated: str = HELD_OUT,
        text_of: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.total_steps, self.sample_every = total_steps, sample_every
        self.heartbeat, self.console = heartbeat, heartbeat.console
        self.components, self.evaluated, self.text_of = components, evaluated, text_of
        self.steps = StatusLine("step", total_steps, self.time_left)
        self.live = Live(self.steps, console=self.console, transient=True)
        self.failures_seen = False
        # The pairs (step number, end time) of the most recent steps that this process has trained.
        self.ended: list[tuple[int, float]] = []
        # Time of the last printed line with the metrics of a training step, or the time at which the display was
        # created. `said_at` has an effect only if the output is not a terminal.
        self.said_at = time.monotonic()
        self.last = 0  # Number of the most recent training step that has ended.
        self.since = time.monotonic()  # Time at which that step ended, or at which the run was restored.

    def __enter__(self) -> "ConsoleDisplay":
        if self.heartbeat.is_live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While the `with` block runs, show what the training run is waiting for, and for how long."""
        began = time.monotonic()
        if not self.heartbeat.is_live:
            self.heartbeat.say(what)
        line = StatusLine(what, ending=lambda: duration(time.monotonic() - began))
        with self._shown(line), self.heartbeat.during(what):
            yield

    @contextmanager
    def counting(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show the progress of a phase before training, such as creating the built-in model.

        Yields:
            A callback that takes the number of finished steps and the total number of steps of the phase. If the
            callback is never called, nothing is shown.
        """
        line, beginning = StatusLine(what), still(what)

        def update(done: int, total: int) -> None:
            if not self.heartbeat.is_live and not line.total:
                self.heartbeat.say(what)
            line.done, line.total = done, total
            self.live.update(line)

        def told() -> str:
            return f"{what}: {line.done}/{line.total}" if line.total else beginning()

        with self._shown(self.steps), self.heartbeat.during(told):
            yield update

    @contextmanager
    def _shown(self, line: StatusLine) -> Iterator[None]:
        """Show another line on a terminal until the `with` block ends; then show the training steps again."""
        self.live.update(line, refresh=self.live.is_started)
        try:
            yield
        finally:
            self.live.update(self.steps)

    def restore(self, step: int) -> None:
        """Show that training continues after the step `step`."""
        self.last = self.steps.done = step
        self.ended, self.since = [], time.monotonic()

    def step(self, step: int, metrics: dict[str, float], batch: DataProto) -> None:
        """Update the progress bar, and print a sample after step 1 and after every `sample_every` steps."""
        now = time.monotonic()
        self.last, self.since = step, now
        self.ended = [*self.ended[-TIMED_STEPS:], (step, now)]
        self.steps.done, self.steps.parts = step, step_parts(metrics, longest_name=SHOWN_NAME)
        due = step % PLAIN_EVERY == 0 or step == self.total_steps or now - self.said_at >= PLAIN_EVERY_S
        if not self.heartbeat.is_live and due:
            left = f"  {told}" if (told := self.time_left()) else ""
            self.heartbeat.say(f"step {step:>4}/{self.total_steps}  {step_text(metrics)}{left}")
            self.said_at = now
        if self.sample_every and (step == 1 or step % self.sample_every == 0):
            print_lines(self.console, sample_text(step, batch, self.components, self.text_of))
        self.failures(step, batch)

    def time_left(self) -> str:
        """Return the estimated time until the run ends, such as "12 min left"; return "" before the third step.

        The estimate of the remaining time assumes that each remaining step takes the mean time of the last
        `TIMED_STEPS` steps, including evaluations and checkpoints. The first training step of the process is left
        out of the mean time, because process start and compilation make the first step slow.
        """
        if len(timed := self.ended) < 3:
            return ""
        (first, began), (last, ended) = timed[0], timed[-1]
        if last - first < 2 or last >= self.total_steps:
            return ""
        left = (ended - began) / (last - first) * (self.total_steps - last) - (time.monotonic() - ended)
        return f"{duration(max(0.0, left))} left"

    @contextmanager
    def training(self, phase: Callable[[], str], waited_for: Callable[[], str] = lambda: "") -> Iterator[None]:
        """While the `with` block runs, let the lines of the heartbeat name the current step.

        Args:
            phase: function that returns the name of the current phase of the step, or "" before the first phase.
            waited_for: function that returns the names of the processes for which the driver waits, or "" if the driver
                waits for none. Both functions are called in another thread.
        """

        def line() -> str:
            ended = self.last >= self.total_steps
            step = "after the last step" if ended else f"step {self.last + 1:>4}/{self.total_steps}"
            text = f"{step}  for {duration(time.monotonic() - self.since)}"
            text += f", now: {doing}" if (doing := phase().replace("_", " ")) else ""
            return text + (f"; waiting for {names}" if (names := waited_for()) else "")

        with self.heartbeat.during(line):
            yield

    def failures(self, step: int, batch: DataProto) -> None:
        """Warn about failed rewards of a step; after the first such warning, warn only in every tenth step."""
        errors = [error for error in batch.non_tensor_batch["reward_error"] if error]
        if errors and (not self.failures_seen or step % PLAIN_EVERY == 0):
            first = one_line(errors[0])
            # If a conversation failed, its stop reason is "error" and its reward was not computed.
            reasons = Counter(batch.non_tensor_batch.get("stop_reason", ()))
            what = "conversations" if reasons["error"] == len(errors) else "rewards"
            text = f"  step {step}: {len(errors)} of {len(batch)} {what} failed and are left out: {first}"
            print_lines(self.console, Text(text, "yellow"))
        self.failures_seen = self.failures_seen or bool(errors)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Print the results of an evaluation, one line per evaluation set."""
        for name in evaluated_sets(metrics):
            print_lines(self.console, evaluation_text(step, name, metrics, self.evaluated))

    def warning(self, text: str) -> None:
        """Print a warning as one coloured line."""
        print_lines(self.console, Text(f"warning: {one_line(text, 1000)}", "yellow"))


@contextmanager
def downloading(heartbeat: Heartbeat, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a download while the `with` block runs: a bar on a terminal, otherwise a line every minute.

    Yields:
        A callback that takes the number of downloaded bytes and the total number of bytes. If the yielded callback is
        never called, for example because no file has to be downloaded, no progress is shown.
    """
    began: list[tuple[float, int]] = []  # The time and the number of downloaded bytes of the first call of `update`.
    asking = still(f"asking the hub for {what}")

    def speed() -> float:
        return (line.done - began[0][1]) / max(time.monotonic() - began[0][0], 1e-3)

    def ending() -> str:
        return f"{duration((line.total - line.done) / speed())} left" if speed() > 0 else ""

    def told() -> str:
        return f"downloading {what}: {decimal(line.done)} of {decimal(line.total)}" if began else asking()

    line = StatusLine(f"downloading {what}", ending=ending, unit=decimal)
    live = Live(line, console=heartbeat.console, transient=True)

    def update(done: int, total: int) -> None:
        line.done, line.total = done, total
        if not began:
            began.append((time.monotonic(), done))
            live.start() if heartbeat.is_live else heartbeat.say(f"downloading {what}")
        line.parts = [f"{decimal(round(speed()))}/s"]

    try:
        with heartbeat.during(told):
            yield update
    finally:
        live.stop()


def step_text(metrics: dict[str, float]) -> str:
    """Return the most important metrics of a training step as text."""
    return "  ".join(step_parts(metrics))


def step_parts(metrics: dict[str, float], longest_name: int | None = None) -> list[str]:
    """Return the most important metrics of a training step as short texts, the most important text first.

    Names of reward functions with more than `longest_name` characters are shortened in the middle.
    """
    kls = ("actor/ref_kl", "reward/kl", "actor/teacher_kl", "actor/ppo_kl")
    kl = next((metrics[name] for name in kls if name in metrics), 0.0)
    parts = _parts(metrics)
    scores = [f"{_short(name, longest_name)} {metrics[f'reward/{name}/mean']:.2f}" for name in parts[:SHOWN_PARTS]]
    accuracy = [f"acc {metrics['reward/accuracy']:.0%}"] if "reward/accuracy" in metrics else []
    return [
        *([f"reward {metrics['reward/mean']:.2f}"] if parts else []),
        *(scores if len(parts) > 1 else []),
        *accuracy,
        f"kl {kl:.4f}",
        f"len {metrics['rollout/length_mean']:.1f}",
        f"{metrics['perf/tokens_per_s']:,.0f} tok/s",
    ]


def _short(name: str, limit: int | None) -> str:
    if limit is None or len(name) <= limit:
        return name
    half = (limit - 2) // 2
    return f"{name[:half]}..{name[-half:]}"


def evaluation_text(step: int, name: str, metrics: Mapping[str, float], evaluated: str = HELD_OUT) -> str:
    """Return the results of one evaluation set as text.

    The text about an evaluation set contains the accuracy (or the mean reward, if the accuracy is unknown), pass@k and
    the mean answer length. In a run without rewards, the text contains only the mean answer length. If the run has
    several reward functions, the text about an evaluation set contains the mean scores of the first `SHOWN_PARTS`
    reward functions.

    Args:
        step: number of training steps before the evaluation.
        name: name of the evaluation set; "" stands for the set from `data.val`.
        metrics: a mapping from metric name to value, with the metrics of all evaluation sets.
        evaluated: what the evaluation set of `data.val` contains, `HELD_OUT` or `TRAINING_DATA`.
    """
    prefix = prefix_of(name, "sampled")
    what, form = _headline(name, metrics)
    texts = []
    if f"{prefix}_{what}" in metrics:
        texts = [", ".join(f"{kind} {metrics[f'{prefix_of(name, kind)}_{what}']:{form}}" for kind in KINDS)]
    else:
        what = "answers"
    passes = [metric for metric in metrics if metric.startswith(f"{prefix}_pass_at_")]
    texts += [f"pass@{metric.rpartition('_')[2]} {metrics[metric]:.1%}" for metric in passes]
    parts = [metric for metric in metrics if metric.startswith(f"{prefix}_reward/")]
    if len(parts) > 1:
        texts.append(", ".join(f"{metric.rpartition('/')[2]} {metrics[metric]:.2f}" for metric in parts[:SHOWN_PARTS]))
    texts.append(f"{metrics[f'{prefix}_length']:.1f} tokens")
    return f"{name or evaluated} {what} after {_steps(step)}: {'; '.join(texts)}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _headline(name: str, metrics: Mapping[str, float]) -> tuple[str, str]:
    """Return the name of an evaluation set's main metric, and the format string for the metric's values.

    The main metric of an evaluation set is the accuracy if the accuracy is known, and the mean reward otherwise.
    """
    known = all(f"{prefix_of(name, kind)}_accuracy" in metrics for kind in KINDS)
    return ("accuracy", ".1%") if known else ("reward", ".3g")


def _parts(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the reward functions and reward models that occur in the metrics."""
    names = (name.split("/") for name in metrics)
    return [name[1] for name in names if len(name) == 3 and name[0] == "reward" and name[2] == "mean"]


def sample_text(
    step: int, batch: DataProto, components: Sequence[str] = (), text_of: Callable[[list[int]], str] | None = None
) -> Text:
    """Return one sample of the batch as text: the prompt and answer (or the conversation), followed by the reward.

    The step number determines which sample of the batch is shown. Text that a model wrote is never interpreted as
    console markup.

    Args:
        step: number of the training step.
        batch: the batch that was trained on.
        components: names of the reward functions and reward models.
        text_of: function that converts token ids to text with special tokens. If `text_of` is None, the prompt and
            answer texts stored in the batch are shown.
    """
    row = (step * 7) % len(batch)
    objects = batch.non_tensor_batch
    if "messages" in objects:
        ending = str(objects["stop_reason"][row])
        return Text.assemble(
            (f"  sample of step {step}\n", "dim"),
            *_conversation(json.loads(str(objects["messages"][row]))),
            ("    reward     ", "dim"),
            f"{_score_text(batch, row, components)}  (ended by: {ending})",
        )
    prompt, response = str(objects["prompt_text"][row]), str(objects["response_text"][row])
    if text_of is not None:
        only = batch[row : row + 1]
        prompt, response = text_of(_shown_prompt(only)), text_of(only.values("responses").tolist())
    ending = {"stop": "", "length": " (cut at the length limit)"}.get(objects["finish_reason"][row], " (aborted)")
    return Text.assemble(
        (f"  sample of step {step}\n", "dim"),
        ("    prompt  ", "dim"),
        f"{one_line(prompt, SHOWN_TEXT)}\n",
        ("    answer  ", "dim"),
        (one_line(response, SHOWN_TEXT), "bold"),
        f"{ending}\n",
        ("    reward  ", "dim"),
        _score_text(batch, row, components),
    )


def _shown_prompt(row: DataProto) -> list[int]:
    """Return the token ids of the prompt of a batch with one row, where one token stands for adjacent image tokens."""
    ids = row.values("prompts")
    if "prompt_images" in row:
        images = row.values("prompt_images")
        first = images.new_ones(len(images)).bool()
        first[1:] = images[1:] != images[:-1]
        ids = ids[(images == 0) | first]
    return [int(token) for token in ids.tolist()]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return one line of text for each message of a conversation, with the model's answers in bold.

    If a conversation has several contexts, an additional line marks the beginning of each context after the first.
    """
    lines, shown = list[Text](), 0
    for message in messages[:SHOWN_MESSAGES]:
        calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
        said = one_line(" ".join(filter(None, [str(message.get("content") or ""), *calls])), SHOWN_TEXT)
        role = one_line(str(message["role"]), 20)
        if (context := message.get("context", 0)) > shown:
            lines.append(Text(f"    new context {context + 1}\n", "dim"))
            shown = context
        lines.append(Text.assemble((f"    {role:<10} ", "dim"), (said, "bold" if role == "assistant" else ""), "\n"))
    if len(messages) > SHOWN_MESSAGES:
        lines.append(Text(f"    ... and {len(messages) - SHOWN_MESSAGES} more messages\n", "dim"))
    return lines


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in function["arguments"].items())
    return f"{function['name']}({arguments})"


def _score_text(batch: DataProto, row: int, components: Sequence[str]) -> str:
    """Return the reward of a row as text, with the score of each function if the run has several reward functions.

    The text is "failed" if the row's reward failed, and "none" in a run without rewards.
    """
    scores = batch.batch["reward_components"][row].tolist()
    # The column `valid` cannot be used to detect failed rewards, because `valid` is also False for rows that have a
    # score but are excluded from the statistics.
    if batch.non_tensor_batch["reward_error"][row] or (scores and all(math.isnan(score) for score in scores)):
        return "failed"
    if not scores:
        return "none"
    total = f"{float(batch.batch['scores'][row]):g}"
    parts = [f"{name} {score:g}" for name, score in zip(components, scores, strict=False) if not math.isnan(score)]
    return f"{total}  ({', '.join(parts)})" if len(scores) > 1 else total


def summary(
    console: Console,
    *,
    evaluations: Sequence[dict[str, float]],
    steps: int,
    seconds: float,
    output_dir: Path,
    curve: Path | None,
    overrides: Sequence[str],
    finished: bool,
    other_algorithm: bool = True,
    evaluated: str = HELD_OUT,
) -> None:
    """Print the results of training, the paths of the result files, and a shell command to run next.

    If `other_algorithm` is False, another algorithm cannot train with the run's other settings, and no command that
    tries one is printed.
    """
    title = "Done" if finished else "Stopped early"
    console.print(f"\n[bold]{title}[/] after {_steps(steps)}, {seconds:.0f} s", highlight=False)
    if len(evaluations) >= 2:
        for number, name in enumerate(evaluated_sets(evaluations[-1])):
            table = _before_and_after(name, evaluated, evaluations[0], evaluations[-1])
            console.print(*[""] * (number > 0), table, sep="\n")
    for name, path in (
        ("learning curve", curve),
        ("report", output_dir / REPORT),
        ("model", output_dir / "model"),
        ("all results", output_dir),
    ):
        if path is not None and path.exists():
            console.print(Text(f"{name + ':':<16}{path}"), soft_wrap=True)
    if not finished:
        commands = [resume_command(overrides, output_dir)]
    else:
        commands = [*[next_command(overrides)] * other_algorithm, *board_command(output_dir)]
    for number, command in enumerate(commands):
        what = "" if number else "next:" if finished else "to go on:"
        console.print(Text(f"{what:<16}{command}"), soft_wrap=True)


def _before_and_after(name: str, evaluated: str, before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Return a table with the metrics of one evaluation set before and after training."""
    numbers = [Column(header, no_wrap=True) for header in ("before", "after")]
    table = Table(Column(name or evaluated, overflow="fold"), *numbers, box=None, pad_edge=False)
    prefix = prefix_of(name, "sampled")
    parts = [metric for metric in after if metric.startswith(f"{prefix}_reward/")]
    rows = []
    for kind in KINDS:
        if len(parts) > 1 or _headline(name, after)[0] == "reward":
            rows.append((f"{kind} reward", f"{prefix_of(name, kind)}_reward", ".3g"))
        rows.append((f"{kind} accuracy", f"{prefix_of(name, kind)}_accuracy", ".1%"))
    rows += [
        (f"sampled pass@{metric.rpartition('_')[2]}", metric, ".1%")
        for metric in after
        if metric.startswith(f"{prefix}_pass_at_")
    ]
    rows += [(f"sampled {metric.rpartition('/')[2]}", metric, ".3g") for metric in parts if len(parts) > 1]
    rows.append(("answer length", f"{prefix}_length", ".1f"))
    for label, metric, form in rows:
        if metric in before and metric in after:
            table.add_row(label, f"{before[metric]:{form}}", f"{after[metric]:{form}}")
    return table


def resume_command(overrides: Sequence[str], output_dir: Path) -> str:
    """Return the shell command that resumes a stopped run."""
    own = ("trainer.output_dir", "trainer.resume")
    rest = [override for override in overrides if override.split("=", 1)[0] not in own]
    words = [*rest, f"trainer.output_dir={output_dir}", "trainer.resume=auto"]
    return f"{shlex.quote(sys.executable)} -m rltrain.main {' '.join(map(shlex.quote, words))}"


def next_command(overrides: Sequence[str]) -> str:
    """Return a shell command that trains with another algorithm on the same data.

    `next_command` omits all overrides of keys in the config section `algorithm` from the training command, because
    another algorithm may not accept the overrides. `next_command` omits the override of `data.sft_response` from the
    training command, because rltrain refuses `data.sft_response` if `algorithm.sft_coef` is 0, as it is without
    overrides.
    """
    tried = next((o.split("=", 1)[1] for o in overrides if o.startswith("algorithm=")), "grpo")
    other = "ppo" if tried == "grpo" else "grpo"
    # If several command-line overrides set the same key, the last override applies.
    last = {override.split("=", 1)[0]: override for override in overrides}
    of_this_run = ("algorithm", "data.sft_response", "trainer.output_dir", "trainer.checkpoint_dir", "trainer.resume")
    rest = [
        override
        for key, override in last.items()
        if key not in of_this_run and not key.lstrip("+~").startswith("algorithm.")
    ]
    command = " ".join(map(shlex.quote, [f"algorithm={other}", *rest]))
    return f"{shlex.quote(str(_python()))} -m rltrain.main {command}"


def board_command(output_dir: Path) -> list[str]:
    """Return the shell command that starts TensorBoard, or [] if the run has no folder `tensorboard`.

    The folder `tensorboard` is missing if `trainer.trackers` does not contain `tensorboard`.
    """
    board = shlex.quote(str(_python().with_name("tensorboard")))
    return [f"{board} --logdir {shlex.quote(str(output_dir.parent))}"] if (output_dir / "tensorboard").is_dir() else []


def _python() -> Path:
    """Return the path of the running Python interpreter, relative to the working directory if it lies inside."""
    python = Path(sys.executable)
    return python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
