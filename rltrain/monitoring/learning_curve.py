"""The learning curve of a run: an image of reward and answer length over the training steps."""

from pathlib import Path

# CURVES names the values that the learning curve needs for each step.
CURVES = ("step", "reward/mean", "rollout/length_mean")


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
                label=f"held-out, {kind}",
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
    reward.legend(lines, [str(line.get_label()) for line in lines], loc="center right", frameon=False)
    reward.set_title("Reward and answer length")
    figure.savefig(path, dpi=120)
    plt.close(figure)
