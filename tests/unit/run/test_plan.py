from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from rltrain.algorithms import POLICY_LOSSES
from rltrain.base.errors import ConfigError
from rltrain.run.epochs import with_epochs_as_steps
from rltrain.run.plan import Facts, batch_line, is_training_data, plan_lines, plan_rows, show_plan
from rltrain.settings.compose import compose, profile_defaults

FACTS = Facts(path="/models/m", parameters=412_928, train_prompts=8192, val_prompts={"": 256}, devices="2 CPU cores",
              memory="training rank 474 MB")  # fmt: skip


def config_of(*overrides):
    return compose(["trainer.output_dir=out", *overrides])[0]


def row(label, *overrides, facts=FACTS):
    return dict(plan_rows(config_of(*overrides), facts))[label]


def test_the_batch_sizes_are_spelt_out():
    overrides = ["trainer.epochs_per_step=2", "actor.max_tokens_per_microbatch=16384"]
    assert batch_line(config_of(*overrides)) == (
        "64 prompts x 8 samples = 512 sequences -> 2 epochs x 4 mini-batches = 8 optimizer steps; "
        "micro-batches <= 16,384 tokens"
    )


def test_epochs_are_converted_to_steps_of_which_the_last_may_be_partly_filled():
    config = with_epochs_as_steps(config_of("trainer.total_epochs=1.5", "trainer.prompts_per_step=32"), 65)
    assert config.trainer.total_steps == 4  # 1.5 epochs of 65 prompts are 97.5 prompts.
    assert dict(plan_rows(config, FACTS))["run"].startswith("4 steps (trainer.total_epochs=1.5), 8 optimizer steps; ")
    assert with_epochs_as_steps(config_of("trainer.total_steps=9"), 65).trainer.total_steps == 9


def test_a_warm_up_is_compared_with_the_number_of_steps_that_the_epochs_come_to():
    config = config_of("algorithm=ppo", "trainer.total_epochs=2", "critic.warmup_steps=200")
    assert with_epochs_as_steps(config, 64 * 101).trainer.total_steps == 202
    with pytest.raises(ConfigError, match=r"^critic\.warmup_steps=200 with trainer\.total_steps=200: "):
        with_epochs_as_steps(config, 64 * 100)


def test_one_of_a_thing_is_singular():
    overrides = ["trainer.prompts_per_step=1", "trainer.prompts_per_minibatch=1", "rollout.samples_per_prompt=1"]
    assert batch_line(config_of(*overrides)).startswith(
        "1 prompt x 1 sample = 1 sequence -> 1 epoch x 1 mini-batch = 1 optimizer step; "
    )


def test_the_default_plan_reads_as_a_whole():
    assert plan_lines(config_of(), FACTS) == [
        "step       64 prompts x 8 samples = 512 sequences -> 1 epoch x 4 mini-batches = 4 optimizer steps; "
        "micro-batches <= 8,192 tokens",
        "run        120 steps, 480 optimizer steps; seed 0; builtin:median: shuffled passes of 8,192 prompts; "
        "evaluated before and after on 256 held-out prompts",
        "algorithm  grpo advantages; vanilla loss, token-mean; no KL; AdamW, lr 0.0004 linear",
        "model      built-in tiny model; 413k parameters; float32",
        "answers    vLLM, temperature 1; prompts <= 16 tokens, answers <= 16; scored by final_answer",
        "processes  1 training rank (actor) + 1 engine + 1 reward worker; Ray on this machine, 2 CPU cores",
        "memory     training rank 474 MB",
        "output     out",
    ]


def test_the_warm_up_of_the_learning_rate_is_shown_and_compared_with_the_run():
    warm_up = ["actor.lr_schedule=constant", "actor.lr_warmup_steps=10"]
    assert row("algorithm", *warm_up).endswith("AdamW, lr 0.0004 constant after a warm-up of 10 optimizer steps")
    assert row("algorithm", *warm_up, "trainer.total_steps=2").endswith("10 optimizer steps, but the run has only 8")


@pytest.mark.parametrize(
    ("val", "own_splits", "trained"),
    [("rows.jsonl", False, True), ("rows.jsonl", True, False), ("other.jsonl", False, False)],
)
def test_an_evaluation_on_training_data_is_recognised(val, own_splits, trained):
    config = config_of("data.train=rows.jsonl", f"data.val={val}", "reward.functions=[exact_match]")
    assert is_training_data(config, val, own_splits=own_splits) == trained
    assert not is_training_data(config_of(), "builtin:median", own_splits=False)


def test_the_algorithm_shows_knobs_kl_and_entropy():
    overrides = ["algorithm=ppo", "algorithm.kl_in_reward.kl_coef=0.01", "algorithm.kl_loss.kl_loss_coef=0.1"]
    assert row("algorithm", *overrides, "algorithm.entropy_coef=0.02", "algorithm.old_log_probs=rollout") == (
        "gae advantages (gamma 1.0, lam 0.95); vanilla loss (clip_ratio_c inf), token-mean; KL in reward 0.01 (k1), "
        "KL in loss 0.1 (k3); advantages normalised (batch mean, batch std); entropy bonus 0.02; the engine's "
        "log-probs used as old log-probs; AdamW, lr 0.0004 linear"
    )
    assert "; advantages limited to +-5; " in row("algorithm", "algorithm.advantage_clip=5")
    squares = row("algorithm", "algorithm.squared_log_ratio_coef=0.001")
    assert "; squared log-ratio to the engine's policy, coefficient 0.001; " in squares
    assert "; NLL of correct answers, coefficient 0.1; " in row("algorithm", "algorithm.positive_nll_coef=0.1")
    assert "(clip_ratio_high 0.28, clip_ratio_c inf)" in row("algorithm", "algorithm=dapo")


def test_a_supervised_loss_has_a_line_with_its_answers():
    overrides = ["algorithm.sft_coef=0.25", "data.sft_response=solution"]
    facts = replace(FACTS, supervised="column solution has answers to 12 of 64 prompts, 4,096 tokens")
    assert row("supervised", *overrides, facts=facts) == (
        "cross-entropy of supervised answers, coefficient 0.25; column solution has answers to 12 of 64 prompts, 4,096 "
        "tokens"
    )
    assert row("supervised", *overrides).endswith("; data.sft_response=solution")
    assert "supervised" not in dict(plan_rows(config_of(), FACTS))


def test_an_adaptive_coefficient_is_shown_as_a_start():
    overrides = ["algorithm.kl_in_reward.kl_coef=0.01", "algorithm.kl_in_reward.controller=adaptive"]
    assert "KL in reward with an adaptive coefficient that starts at 0.01 (k1)" in row("algorithm", *overrides)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.val=null"], "no evaluation (data.val=null)"),
        (
            ["data.val_sets={aime:aime.jsonl}", "trainer.eval_samples=4", "data.val_size=30"],
            "evaluated before and after on 256 held-out prompts and at most 30 prompts of aime, 4 sampled answers each",
        ),
        (["trainer.eval_every=10"], "evaluated before, after and every 10 steps on 256 held-out prompts"),
        (["data.train=a.jsonl"], "evaluated before and after on 256 prompts of the training data"),
        (["data.train=a.jsonl", "data.val=b.jsonl"], "evaluated before and after on 256 held-out prompts"),
    ],
)
def test_it_says_which_prompts_are_evaluated(overrides, text):
    assert text in row("run", *overrides)


def test_it_says_as_what_the_data_was_read():
    data, held_out = "9 rows of a.jsonl; prompt = column question, as text", "5 rows of b.jsonl; prompt = column text"
    words = ["data.train=a.jsonl"]
    assert row("data", *words, facts=replace(FACTS, data=data, val_data={"": data})) == data
    both = row("data", *words, facts=replace(FACTS, data=data, val_data={"": held_out, "aime": data}))
    assert both == f"{data}; evaluation: {held_out}"


def test_a_function_that_has_rows_for_evaluation_holds_prompts_out():
    words = ["data.train=a.py:rows"]
    assert "prompts of the training data" in row("run", *words)
    assert "on 256 held-out prompts" in row("run", *words, facts=replace(FACTS, own_splits=True))


def test_processes_are_counted_for_each_placement():
    critic = Facts(path="m", needs_critic=True, devices="8 GPUs")
    assert row("processes", "placement.actor_ranks=2", "rollout.vllm.tensor_parallel_size=2") == (
        "2 training ranks (actor) + 1 engine of 2 shards + 1 reward worker; Ray on this machine, 2 CPU cores"
    )
    assert row("processes", "placement=disaggregated", "algorithm.kl_loss.kl_loss_coef=1", facts=critic) == (
        "1 rank each for actor, reference, critic + 1 engine + 1 reward worker; Ray cluster auto, 8 GPUs; "
        "weights are sent through shared memory on one machine, or a process group between machines"
    )
    assert row("processes", "placement=inprocess", "rollout=hf") == (
        "one process without Ray, for actor, engine and rewards; 2 CPU cores"
    )


def test_what_overlaps_is_said_where_it_may():
    assert "engines generate" not in row("processes")
    assert row("processes", "trainer.max_staleness=2").endswith(
        "; engines generate answers while ranks train, with weights that are at most 2 weight versions old"
    )
    assert row("processes", "placement=inprocess", "rollout=hf", "trainer.max_staleness=1").endswith(
        "; answers may be 1 weight version old; in a run with one process, stale answers save no time, and the policy "
        "learns better with trainer.max_staleness=0"
    )


def test_it_says_how_prompts_are_sampled_and_what_is_trained_on_again():
    assert row("run", "data.difficulty={}").split("; ")[2] == (
        "builtin:median: 8,192 prompts in pools by difficulty, and each step samples 50% normal, 30% unseen, 10% "
        "hard (success rate <= 0) and 10% easy (success rate >= 1)"
    )
    again = ["trainer.max_staleness=2", "trainer.reuse.groups=16"]
    assert row("reuse", *again) == (
        "up to 16 of the 64 prompt groups of a step are repeated from the last 2 steps; only groups whose answers have "
        "different outcomes are repeated"
    )
    assert "are repeated from the last step;" in row("reuse", *again, "trainer.reuse.steps=1")
    assert "answers up to 2 weight versions old have token importance weights" in row("off-policy", *again)
    assert "engines generate" not in row("processes", *again)
    assert row("processes", *again, "trainer.reuse.steps=1").endswith(
        "with weights that are at most 1 weight version old"
    )


def facts_of(loss_mode):
    return replace(FACTS, aggregations=POLICY_LOSSES.metadata(loss_mode).get("aggregations", ()))


@pytest.mark.parametrize(
    ("loss", "mode", "defined"),
    [
        ("gspo", "token-mean", "seq-mean-token-mean or seq-mean-token-sum"),
        ("gspo", "seq-mean-token-sum-norm", "seq-mean-token-mean or seq-mean-token-sum"),
        ("geo_mean", "seq-mean-token-sum", "seq-mean-token-mean"),
        ("mean_ratio", "token-mean", "seq-mean-token-mean"),
    ],
)
def test_it_says_where_a_loss_of_whole_answers_is_not_aggregated_as_it_is_defined(loss, mode, defined):
    settings = [f"algorithm.loss_mode={loss}", f"algorithm.loss_agg_mode={mode}"]
    assert row("note", *settings, facts=facts_of(loss)) == (
        f"the {loss} loss is defined for algorithm.loss_agg_mode={defined}; with {mode}, the weight of an "
        "answer in the loss is proportional to its length"
    )


@pytest.mark.parametrize(
    ("loss", "mode"),
    [
        ("gspo", "seq-mean-token-mean"),
        ("gspo", "seq-mean-token-sum"),  # LUSPO
        ("geo_mean", "seq-mean-token-mean"),
        ("mean_ratio", "seq-mean-token-mean"),
        ("vanilla", "token-sum"),
    ],
)
def test_it_says_nothing_where_a_loss_is_aggregated_as_it_is_defined(loss, mode):
    settings = [f"algorithm.loss_mode={loss}", f"algorithm.loss_agg_mode={mode}"]
    assert "note" not in dict(plan_rows(config_of(*settings), facts_of(loss)))


def test_it_says_how_long_the_critic_is_trained_alone_and_how_many_optimizer_steps_are_left_for_the_actor():
    assert row("run", "algorithm=ppo", "critic.warmup_steps=20").startswith(
        "120 steps, the first 20 steps train only the critic; 480 optimizer steps of the critic, 400 of the actor; "
    )


def test_it_says_where_answers_are_too_short_for_the_length_adaptive_lambda():
    short, settings = replace(FACTS, alpha=0.05), ["algorithm=vapo", "rollout.max_response_length=20"]
    assert row("note", *settings, facts=short) == (
        "answers have at most 20 tokens, so lambda is 0 in all answers, and the advantage of a token is its "
        "one-step TD error; set algorithm.advantage.alpha above 0.05 for a lambda above 0"
    )
    assert "note" not in dict(plan_rows(config_of(*settings), replace(FACTS, alpha=0.051)))
    assert "note" not in dict(plan_rows(config_of(*settings), FACTS))  # another estimator


STALE = "trainer.max_staleness=4"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "have token importance weights (actor probability / engine probability), truncated above 2"),
        (
            ["algorithm=icepop"],
            "have token importance weights (actor probability / engine probability), tokens dropped below 0.5 or above "
            "5",
        ),
        (
            ["algorithm=icepop", "algorithm.correction.normalize=kept"],
            "have token importance weights (actor probability / engine probability), tokens dropped below 0.5 or above "
            "5, the policy loss averaged only over the kept tokens",
        ),
        (
            ["algorithm.correction.level=sequence", "algorithm.correction.batch_normalize=true"],
            "have sequence importance weights (actor probability / engine probability), each divided by the mean "
            "importance weight of the mini-batch",
        ),
        (
            ["algorithm.correction.level=null"],
            "are trained on without correction; algorithm.correction.level=auto corrects them",
        ),
        (
            ["algorithm=sequence_masking"],
            "are dropped where algorithm.rejection finds them too far from the engine's policy, and are otherwise not "
            "corrected",
        ),
        (
            ["algorithm.old_log_probs=rollout"],
            "are corrected by the importance ratio of the vanilla loss (actor probability / engine probability)",
        ),
    ],
)
def test_it_says_what_relates_stale_answers_to_the_policy_that_sampled_them(overrides, text):
    assert row("off-policy", STALE, *overrides) == f"answers up to 4 weight versions old {text}"
    assert "off-policy" not in dict(plan_rows(config_of(*overrides), FACTS))


def test_a_loss_without_a_ratio_is_not_corrected_by_the_engines_log_probs():
    facts = replace(FACTS, uses_ratio=False)
    settings = [STALE, "algorithm=reinforce", "algorithm.old_log_probs=rollout"]
    assert row("off-policy", *settings, facts=facts) == (
        "answers up to 4 weight versions old are trained on without correction; algorithm.correction.level=auto with "
        "old_log_probs=actor corrects them"
    )


@pytest.mark.parametrize(
    ("every", "coef", "steps", "said"),
    [
        (0, 1.0, 60, "KL in loss 0.1 (k3);"),
        (1, 1.0, 60, "KL in loss 0.1 (k3), the reference model becomes a copy of the actor every step;"),
        (10, 1.0, 60, "KL in loss 0.1 (k3), the reference model becomes a copy of the actor every 10 steps;"),
        (2, 0.6, 60, ", the reference model moves by 0.6 of its distance to the actor every 2 steps;"),
        (
            60,
            1.0,
            60,
            ", the reference model becomes a copy of the actor every 60 steps, which has no effect in a run of 60 "
            "steps;",
        ),
    ],
)
def test_updates_of_the_reference_are_said(every, coef, steps, said):
    words = [f"algorithm.reference.refresh_every={every}", f"algorithm.reference.refresh_coef={coef}"]
    assert said in row("algorithm", "algorithm.kl_loss.kl_loss_coef=0.1", *words, f"trainer.total_steps={steps}")


def test_teachers_have_a_line_and_their_memory():
    words = ["algorithm=mopd", "algorithm.distillation.teacher_column=domain", "algorithm.distillation.coef=0.5",
             "algorithm.distillation.teachers=[/t/math,{name: code, path: 'http://h:1/v1'},reference]"]  # fmt: skip
    facts = Facts(path="m", parameters=2**30, teachers={"math": 2**31})
    assert row("teachers", *words, facts=facts) == (
        "math = /t/math (2.15B parameters), code = http://h:1/v1 (endpoint), reference = the starting weights (with "
        "a teacher-specific prompt template); column domain names the teacher; reverse KL of sampled tokens "
        "in the advantages, coefficient 0.5; the advantages from rewards are multiplied by 1"
    )
    exact = ["algorithm=distill", "algorithm.distillation.teachers=[/t/math]"]
    assert row("teachers", *exact) == (
        "math = /t/math; exact reverse KL in the loss, coefficient 1; rewards are only measured (final_answer)"
    )
    assert row("teachers", *exact, "data.train=a.jsonl").endswith("coefficient 1; without rewards")
    assert row("answers", *exact, "data.train=a.jsonl").endswith("answers <= 16; not scored")
    assert row("off-policy", *exact, "trainer.max_staleness=1") == (
        "answers up to 1 weight version old have no importance weights; the policy is matched to the teachers on the "
        "tokens of these answers"
    )
    penalty = [*exact, "algorithm.loss_mode=dro", "algorithm.correction.level=token"]
    assert row("off-policy", *penalty, "trainer.max_staleness=1").startswith(
        "answers up to 1 weight version old have token importance weights"
    )
    assert "(actor, reference, teacher math)" in row("processes", *words)
    follow = "algorithm.reference.refresh_every=1"
    assert ", reference = the reference model (with a teacher" in row("teachers", *words, follow, facts=facts)
    assert "teachers" not in dict(plan_rows(config_of(), FACTS))


def test_values_that_the_profile_gives_are_listed_with_their_keys():
    words = ["model.path=x", "actor.lr=1e-5", "trainer.total_steps=7"]
    found = profile_defaults(words)
    critic = replace(FACTS, defaults=found, needs_critic=True)
    assert "critic.lr" not in row("defaults", *words, facts=replace(FACTS, defaults=found, needs_critic=False))
    assert "critic.lr=" in row("defaults", *words, facts=critic)
    start, *shown = row("defaults", *words, facts=critic).split(": ", 1)
    assert (start, shown) == ("from the profile", [", ".join(f"{key}={value}" for key, value in found.items())])
    assert {"rollout.max_response_length=1024", "trainer.eval_every=20"} < {*shown[0].split(", ")}
    assert not {"actor.lr", "trainer.total_steps"} & {text.partition("=")[0] for text in shown[0].split(", ")}
    assert "defaults" not in dict(plan_rows(config_of(), FACTS))


@pytest.mark.parametrize(("count", "text"), [(7_615_616_512, "7.62B"), (494_032_768, "494M"), (999, "999")])
def test_a_model_of_ones_own_is_named_with_its_size(count, text):
    facts = Facts(path="/models/m", parameters=count)
    assert row("model", "model.path=/models/m", facts=facts) == f"/models/m; {text} parameters; float32"


def test_with_adapters_only_they_have_gradients_and_optimizer_states():
    facts = Facts(path="m", parameters=2**30, adapters=2**27, needs_critic=False)
    lora = "model.lora={rank:16,targets:[q_proj,v_proj]}"
    assert row("model", lora, facts=facts).endswith(
        "; training changes only adapters of rank 16, alpha 32, on q_proj, v_proj: 134M parameters"
    )
    assert "on all linear layers: 134M" in row("model", "model.lora={rank:16}", facts=facts)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_gets_a_frame_that_fits_it(width):
    out = StringIO()
    show_plan(Console(file=out, force_terminal=True, width=width, color_system=None), config_of(), FACTS)
    lines = out.getvalue().splitlines()
    assert {len(line) for line in lines} == {min(width, 100)}
    assert "64 prompts x 8 samples = 512 sequences" in lines[1]
    assert "-> 1 epoch x 4 mini-batches = 4" in out.getvalue()


def test_anything_else_gets_one_line_an_entry_however_long():
    out = StringIO()
    show_plan(Console(file=out, width=40), config_of(), FACTS)
    assert len(out.getvalue().splitlines()) == 8


def test_top_p_and_top_k_are_said_with_what_they_mean_for_the_engines_log_probs():
    assert row("sampling", "rollout.top_p=0.9", "rollout.top_k=50") == (
        "rollout.top_p=0.9, rollout.top_k=50: the engine samples from a truncated distribution and returns the "
        "log-probs of that distribution, so training does not use the engine's log-probs for corrections and does not "
        "compare them with the actor's log-probs"
    )
    assert row("sampling", "rollout.top_k=50").startswith("rollout.top_k=50: ")
    assert "sampling" not in dict(plan_rows(config_of(), FACTS))


def test_stop_strings_are_shown_as_python_writes_them():
    assert "answers <= 16 or up to '\\n\\n' or '###'; scored" in row("answers", r'rollout.stop=["\n\n","###"]')


def test_reward_functions_of_other_trainers_are_named():
    facts = Facts(path="m", signatures={"accuracy": "TRL", "compute_score": "verl"})
    assert row("rewards", facts=facts) == (
        "reward function accuracy: called with TRL's signature; reward function compute_score: called with verl's "
        "signature"
    )
    assert "rewards" not in dict(plan_rows(config_of(), FACTS))
