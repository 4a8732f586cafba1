"""Diagnosis of a run: applies all rules of the doctor, and separates causes from effects among the findings.

The following command prints the table of rules for `docs/when-a-run-goes-wrong.md`:

    python -m rltrain.monitoring.doctor.diagnosis
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from rltrain.monitoring.doctor import engine_rules, policy_rules, reward_rules
from rltrain.monitoring.doctor.history import Finding, History
from rltrain.monitoring.report.run_files import RunFiles

# An update changes the answers only from the next training step on, so the effects of an update appear at least one
# step after the update.
NEXT_STEP = 1
# As the entropy of a policy falls, its answers become alike before the rule `entropy collapsed` reports the collapse.
# The collapse can therefore cause findings that begin at an earlier step than the finding `entropy collapsed`.
ANY_STEP = -inf


@dataclass(frozen=True)
class Rule:
    """A rule of the doctor, which recognises one kind of failure.

    Attributes:
        name: name of the rule, which is also the name of its finding.
        check: function that returns a finding if the condition of the rule holds, and returns None otherwise.
        explains: names of other rules whose findings count as effects of this rule's finding.
        after: the finding of another rule counts as an effect of this rule's finding only if the other rule's finding
            begins at least `after` training steps later than this rule's finding.
    """

    name: str
    check: Callable[[History], Finding | None]
    explains: tuple[str, ...] = ()
    after: float = 0


COLLAPSES = ("dead reward", "answers cut", "entropy collapsed", "entropy grows", "reward fell", "too few groups")
LOSSES = (*COLLAPSES, "critic explains nothing", "far from the reference", "skipped updates", "evaluation got worse")
RULES = (
    Rule("reward function fails", reward_rules.reward_fails, ("reward never applies", "dead reward", "too few groups")),
    Rule("reward never applies", reward_rules.reward_never_applies, ("dead reward", "too few groups")),
    Rule("stale weights", engine_rules.stale_weights, ("learning rate too high", *LOSSES)),
    Rule("learning rate too high", policy_rules.learning_rate_too_high, LOSSES, NEXT_STEP),
    Rule("skipped updates", policy_rules.skipped_updates),
    Rule("answers cut", engine_rules.answers_cut, ("dead reward", "too few groups", "reward fell")),
    Rule("dead reward", reward_rules.dead_reward, ("too few groups", "critic explains nothing")),
    Rule("entropy collapsed", policy_rules.entropy_collapsed, COLLAPSES, ANY_STEP),
    Rule("entropy grows", policy_rules.entropy_grows, ("reward fell",)),
    Rule("reward fell", reward_rules.reward_fell),
    Rule("reward hacking", reward_rules.reward_hacking),
    Rule("evaluation got worse", reward_rules.worse_evaluation),
    Rule("engine and actor differ", engine_rules.engine_differs),
    Rule("stale answers without correction", engine_rules.stale_answers, ("answers too old",)),
    Rule("answers too old", engine_rules.answers_too_old),
    Rule("far from the reference", policy_rules.far_from_reference),
    Rule("too few groups", reward_rules.too_few_groups),
    Rule("critic explains nothing", policy_rules.critic_explains_nothing),
)


def diagnose(run: RunFiles) -> list[Finding]:
    """Return the findings about a run, with the most serious finding first.

    If one finding is the effect of another finding, only the causing finding is returned. The field `effects` of a
    returned finding lists the effects of that finding by name and first step, for example "dead reward (from step 2)".
    A finding that begins at the first step of the run never counts as an effect of a finding that begins later.
    """
    history = History(run)
    found = {rule.name: finding for rule in RULES if (finding := rule.check(history)) is not None}
    kept = {name: replace(finding, name=name, effects=[]) for name, finding in found.items()}
    for rule in RULES:
        if rule.name not in kept:
            continue
        for name in _effects(rule, kept, history):
            kept[rule.name].effects += [f"{name} (from step {kept[name].step})", *kept[name].effects]
            del kept[name]
    return list(kept.values())


def _effects(rule: Rule, found: dict[str, Finding], history: History) -> list[str]:
    """Return the names of all findings in `found` that are effects of the finding of `rule`."""
    step = found[rule.name].step
    names = [
        name for name in rule.explains if name in found and name != rule.name and found[name].step - step >= rule.after
    ]
    return [name for name in names if rule.after >= 0 or found[name].step > history.first_step]


def table() -> str:
    """Return a Markdown table of the names and conditions of all rules.

    The condition of a rule is the text after the first paragraph of the docstring of the rule's function.
    """
    lines = ["| finding | when |", "|---|---|"]
    for rule in RULES:
        _, _, condition = (inspect.getdoc(rule.check) or "").partition("\n\n")
        lines.append(f"| {rule.name} | {' '.join(condition.split()).rstrip('.')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
