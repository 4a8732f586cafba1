"""The learning curve of a run: an image of reward and answer length over the training steps."""

from array import array
from collections.abc import Iterable
from pathlib import Path

# CURVES lists the keys of a step's metrics from which the learning curve is drawn.
CURVES = ("step", "reward/mean", "rollout/length_mean")


class StepHistory:
    """Compact storage of the metrics of all training steps, with about 24 bytes of memory per step.

    All metrics of the first and the last step are stored. For every step between the first and the last step, only the
    metrics of `CURVES` are stored.
    """

    def __init__(self, rows: Iterable[dict[str, float]] = ()) -> None:
        self._whole: list[dict[str, float]] = []  # the metrics of the first step and of the last step
        self._between = {name: array("d") for name in CURVES}
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self._whole) + len(self._between["step"])

    def append(self, row: dict[str, float]) -> None:
        """Add the metrics of the next training step. `row` must contain all metrics that `CURVES` lists."""
        if len(self._whole) > 1:
            last = self._whole.pop()
            for name, column in self._between.items():
                column.append(last[name])
        self._whole.append(row)

    def last(self) -> list[dict[str, float]]:
        """Return a list that contains only the metrics of the last step, or [] if no step was added."""
        return self._whole[-1:]

    def rows(self) -> list[dict[str, float]]:
        """Return the metrics of each step, from the first step to the last step."""
        columns = zip(*self._between.values(), strict=True)
        between = [dict(zip(CURVES, values, strict=True)) for values in columns]
        return [*self._whole[:1], *between, *self._whole[1:]]


def draw_learning_curve(history: list[dict[str, float]], evaluations: list[dict[str, float]], path: Path) -> None:
    """Plot training reward, evaluation rewards and answer length against the training step, as a PNG image."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for row in history]
    figure, reward = plt.subplots(figsize=(8, 4.5), layout="constrained")
    reward.plot(steps, [row["reward/mean"] for row in history], ".-", color="tab:blue", label="training reward")
    for kind, marker in (("sampled", "o"), ("greedy", "s")):
        points = [(row["step"], row[f"eval/{kind}_reward"]) for row in evaluations if f"eval/{kind}_reward" in row]
        if points:
            reward.plot(
                *zip(*points, strict=True),
                marker,
                color="tab:green",
                alpha=0.8,
                label=f"evaluation, {kind}",
                markerfacecolor="none" if kind == "greedy" else "tab:green",
            )
    reward.set_xlabel("step")
    reward.xaxis.set_major_locator(MaxNLocator(integer=True))
    reward.set_ylabel("reward", color="tab:blue")
    reward.grid(alpha=0.3)
    length = reward.twinx()
    length.plot(steps, [row["rollout/length_mean"] for row in history], color="tab:orange", label="answer length")
    length.set_ylabel("answer length, tokens", color="tab:orange")
    lines = [*reward.get_legend_handles_labels()[0], *length.get_legend_handles_labels()[0]]
    labels = [str(line.get_label()) for line in lines]
    # The legend is placed below the plot, where it cannot cover the curves.
    figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), frameon=False)
    reward.set_title("Reward and answer length")
    figure.savefig(path, dpi=120)
    plt.close(figure)
