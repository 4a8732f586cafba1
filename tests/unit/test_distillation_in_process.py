"""Whole training steps with teachers on the training ranks, teachers at an endpoint, and teachers' own prompts."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.base.errors import ConfigError
from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trajectories.teachers import TeacherPrompts
from tests.in_process_trainer import in_process_trainer
from tests.made_teachers import logits_of, make_teacher, reverse_kl
from tests.teacher_server import TeacherServer
from tests.unit.test_resume_in_process import assert_same, end_runs, fitted, new_run, reseed, resumed_run
from tests.unit.test_trainer_in_process import BASE, REWARD, weights

DIGITS = "0123456789"


@pytest.fixture(autouse=True)
async def _end_runs():
    yield
    await end_runs()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    return [make_teacher(folder / name, width=width, seed=width) for name, width in (("a", 64), ("b", 32))]


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "parity.py"
    file.write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{file}:score', weight: 1.0}}]"


@pytest.fixture
def server(teachers):
    with TeacherServer(AutoModelForCausalLM.from_pretrained(teachers[0]).eval()) as running:
        yield running


def of_teachers(*entries):
    return f"algorithm.distillation.teachers=[{', '.join(entries)}]"


def by_answer(teachers, *entries):
    """Return overrides that choose the teacher by the task's answer: even digits have the first entry of `entries`.

    Each digit is the name of a teacher.
    """
    chosen = entries or [f"path: '{path}'" for path in teachers]
    named = [f"{{name: '{digit}', {chosen[number % 2]}}}" for number, digit in enumerate(DIGITS)]
    return [of_teachers(*named), "algorithm.distillation.teacher_column=answer"]


async def trainer(tasks, model, *overrides):
    made = await in_process_trainer(compose([*BASE, *overrides])[0], model, tasks)
    await made.sync_weights()
    return made


def numbers_of(made, batch):
    return [DIGITS.index(prompt.columns["answer"]) for prompt in made.collector.prompts_of(batch)]


# Tests of teachers on the training ranks


async def test_each_row_is_scored_by_the_teacher_that_its_column_names(tasks, start, reward, teachers):
    made = await trainer(tasks, start, reward, "algorithm=mopd", *by_answer(teachers))
    metrics, batch = await made.train_step()
    numbers = numbers_of(made, batch)
    assert batch.batch["teacher"].tolist() == numbers
    assert len({number % 2 for number in numbers}) == 2
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in teachers]
    for row, number in enumerate(numbers):
        log_probs = logits_of(models[number % 2], batch, row).log_softmax(-1)
        expected = log_probs.gather(1, batch[row].values("responses")[:, None])[:, 0]
        assert batch[row].values("teacher_log_probs").tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    names = {f"actor/teacher_kl/{DIGITS[number]}" for number in numbers}
    assert {name for name in metrics if name.startswith("actor/teacher_kl/")} == names
    gap = batch.values("old_log_probs") - batch.values("teacher_log_probs")
    assert metrics["actor/teacher_kl"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert metrics["actor/teacher_missing_fraction"] == 0


async def test_the_log_ratio_is_added_to_the_groups_advantage_before_the_clip(tasks, start, reward, teachers):
    settings = ["algorithm.distillation.coef=0.5", "algorithm.distillation.outcome_coef=2"]
    plain = await trainer(tasks, start, reward)
    _, expected = await plain.train_step()
    made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(teachers[0]), *settings)
    _, batch = await made.train_step()
    assert torch.equal(batch.values("responses"), expected.values("responses"))
    log_ratio = batch.values("teacher_log_probs") - batch.values("old_log_probs")
    wanted = 2 * expected.values("advantages") + 0.5 * log_ratio
    assert torch.allclose(batch.values("advantages"), wanted, atol=1e-5)
    assert torch.equal(batch.values("returns"), expected.values("returns"))
    clipped = await trainer(
        tasks, start, reward, "algorithm=mopd", of_teachers(teachers[0]), *settings, "algorithm.advantage_clip=1"
    )
    _, batch = await clipped.train_step()
    assert torch.allclose(batch.values("advantages"), wanted.clamp(-1, 1), atol=1e-5)
    assert float(wanted.abs().max()) > 1


async def test_the_exact_loss_alone_is_the_mean_kl_of_the_answers_and_rewards_change_nothing(
    tasks, start, reward, teachers
):
    found = []
    for score in (reward, "rollout.samples_per_prompt=4", "reward.functions=[]"):
        made = await trainer(tasks, start, score, "algorithm=distill", of_teachers(teachers[1]))
        metrics, batch = await made.train_step()
        found.append(await weights(made))
    assert all(torch.equal(found[0][name], tensor) for other in found[1:] for name, tensor in other.items())
    policy, teacher = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (start, teachers[1]))
    with torch.no_grad():
        kls = [reverse_kl(logits_of(policy, batch, row), logits_of(teacher, batch, row)) for row in range(len(batch))]
    assert metrics["actor/teacher_kl"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
    assert metrics["actor/distillation_loss"] == pytest.approx(float(sum(kl.mean() for kl in kls)) / len(kls), rel=1e-4)
    assert (metrics["actor/policy_loss"], metrics["actor/advantage_abs_mean"]) == (0, 0)
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize("algorithm", [["algorithm=distill"], ["algorithm=mopd", "actor.lr=1e-3"]])
async def test_D4_training_lowers_the_kl_to_the_teacher(tasks, start, reward, teachers, algorithm):
    alone = "algorithm.distillation.outcome_coef=0"
    made = await trainer(tasks, start, reward, *algorithm, of_teachers(teachers[0]), alone)
    kls = [(await made.train_step())[0]["actor/teacher_kl"] for _ in range(8)]
    assert kls[-1] < 0.9 * kls[0]


VARIANTS = {
    "exact, two teachers": lambda teachers: ["algorithm=distill", *by_answer(teachers)],
    "reward": lambda teachers: ["algorithm=mopd", of_teachers(teachers[0]), "algorithm.kl_loss.kl_loss_coef=0.01"],
    "sampled loss": lambda teachers: [
        "algorithm=distill", "algorithm.distillation.kl=sampled", of_teachers(teachers[1]),
    ],
    "a demonstration": lambda teachers: [
        "algorithm=distill", of_teachers("{path: reference, prompt_template: '{answer}{prompt}'}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
async def test_F4_a_restart_from_a_checkpoint_changes_nothing_to_the_last_bit(start, tmp_path, teachers, name):
    overrides = [*VARIANTS[name](teachers), "trainer.deterministic=true"]
    whole = await fitted(start, tmp_path / "whole", *overrides)
    await (await new_run(start, tmp_path / "parts", *overrides)).steps(2)
    reseed()
    resumed = await resumed_run(start, tmp_path / "parts", *overrides)
    assert resumed.trainer.step == 2
    assert_same(await resumed.fit(), whole)


# Tests of a teacher with a prompt of its own


async def test_a_teacher_behind_a_demonstration_scores_the_same_answer_in_another_context(tasks, start, reward):
    template = "{path: reference, prompt_template: '{answer}#{prompt}'}"
    made = await trainer(tasks, start, reward, "algorithm=distill", of_teachers(template))
    metrics, batch = await made.train_step()
    assert "timing/ref_log_probs" not in metrics  # without a KL term, the reference model only teaches
    assert not {"ref_log_probs", "ref_hidden"} & {*batch.keys()}
    model = AutoModelForCausalLM.from_pretrained(start).eval()
    for row, prompt in enumerate(made.collector.prompts_of(batch)):
        seen = list(f"{prompt.columns['answer']}#{prompt.text}".encode())
        response = batch[row].values("responses")
        logits = model(torch.tensor([[*seen, *response.tolist()]])).logits[0, len(seen) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        assert batch[row].values("teacher_log_probs").tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert bytes(batch[row].values("prompts").tolist()).decode() == prompt.text


@pytest.mark.parametrize("outcome_coef", [0, 1])
async def test_E10_an_answer_that_is_too_long_for_the_teachers_context_has_no_term_and_is_counted(
    tasks, start, reward, caplog, teachers, outcome_coef
):
    """The teacher has 64 positions, so a prompt of 8 tokens, repeated seven times, leaves 8 for the answer."""
    template = f"{{path: '{teachers[0]}', prompt_template: '{'{prompt}' * 7}'}}"
    coef = f"algorithm.distillation.outcome_coef={outcome_coef}"
    made = await trainer(tasks, start, reward, "algorithm=distill", coef, of_teachers(template))
    with caplog.at_level(logging.WARNING):
        metrics, batch = await made.train_step()
    missing = (batch.lengths("responses") > 8).tolist()
    assert 0 < sum(missing) < len(missing)
    assert [number == -1 for number in batch.batch["teacher"].tolist()] == missing
    assert metrics["actor/teacher_missing_fraction"] == sum(missing) / len(missing)
    assert "answers have no distillation term: the teacher's prompt has more than" in caplog.text
    trained = [bool(batch[row].values("response_mask").any()) for row in range(len(batch))]
    assert trained == [bool(outcome_coef) or not one for one in missing]


def test_in_chat_messages_the_template_replaces_the_last_user_message():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    config = compose(["algorithm=distill", of_teachers("{path: m, prompt_template: '{prompt} Hint: {hint}'}")])[0]
    made = TeacherPrompts(config.algorithm.distillation.teachers[0], tokenizer, "text")
    assert made.fields == ["hint"]
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c {x}"},
    ]  # fmt: skip
    prompt = Prompt(0, "rendered", [1], {"hint": 7}, messages)
    ids = made.ids(prompt, 100)
    assert bytes(ids).decode() == "<user>a<assistant>b<user>c {x} Hint: 7"
    assert messages[-1]["content"] == "c {x}"
    assert made.ids(prompt, 10) == "the teacher's prompt has more than 10 tokens"
    assert "no value in column 'hint'" in made.ids(Prompt(0, "t", [1], {"hint": None}, messages), 100)
    assert "the chat messages have no user message" in made.ids(Prompt(0, "t", [1], {"hint": 1}, messages[1:2]), 100)
    assert bytes(made.ids(Prompt(0, "text", [1], {"hint": "h"}), None)).decode() == "text Hint: h"


# Tests of endpoints


async def test_an_endpoint_gives_what_the_same_model_on_the_ranks_gives(tasks, start, reward, teachers, server):
    found = []
    for teacher in (teachers[0], server.url):
        made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(f"'{teacher}'"))
        metrics, batch = await made.train_step()
        found.append((metrics, batch.values("teacher_log_probs"), await weights(made)))
    (ranks, log_probs, after), (endpoint, others, changed) = found
    assert others.tolist() == pytest.approx(log_probs.tolist(), abs=1e-4)
    assert endpoint["actor/teacher_kl"] == pytest.approx(ranks["actor/teacher_kl"], rel=1e-4)
    assert endpoint["actor/grad_norm"] == pytest.approx(ranks["actor/grad_norm"], rel=1e-3)
    assert max(float((after[name] - changed[name]).abs().max()) for name in after) < 1e-4
    bodies = server.requests
    assert len(bodies) == 16
    assert set(server.paths) == {"/v1/completions"}
    assert all(body["max_tokens"] == 1 and body["prompt_logprobs"] == 0 for body in bodies)
    assert {body["model"] for body in bodies} == {"tiny"}


async def test_a_request_that_fails_is_sent_again(tasks, start, reward, server):
    server.fails = lambda number: 500 if number < 2 else None
    made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(f"'{server.url}'"))
    metrics, _ = await made.train_step()
    assert metrics["actor/teacher_missing_fraction"] == 0
    assert len(server.requests) == 18


async def test_answers_whose_requests_all_fail_are_counted_and_have_no_term(tasks, start, reward, server, caplog):
    once = ["algorithm.distillation.retries=0", "algorithm.distillation.max_concurrent=1"]
    made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(f"'{server.url}'"), *once)
    server.fails = lambda number: 400 if number % 4 == 0 else None
    with caplog.at_level(logging.WARNING):
        metrics, batch = await made.train_step()
    assert metrics["actor/teacher_missing_fraction"] == 0.25
    assert "4 of 16 answers have no distillation term: BadRequestError" in caplog.text
    plain = await trainer(tasks, start, reward)
    _, expected = await plain.train_step()
    missing = (batch.batch["teacher"] == -1)[:, None] & batch.padding_mask("responses")
    assert torch.equal(batch.padded("advantages")[missing], expected.padded("advantages")[missing])
    assert not torch.equal(batch.padded("advantages")[~missing], expected.padded("advantages")[~missing])
    assert bool(batch.values("response_mask").all())


async def test_an_endpoint_that_is_down_is_asked_only_once_a_step_and_comes_back(tasks, start, reward, server):
    """If only the teacher gives advantages, a step without the teacher's log-probs changes no weight."""
    once = ["algorithm.distillation.retries=1", "algorithm.distillation.max_concurrent=1"]
    alone = "algorithm.distillation.outcome_coef=0"
    made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(f"'{server.url}'"), *once, alone)
    before = await weights(made)
    server.fails = lambda number: 503
    metrics, batch = await made.train_step()
    assert len(server.requests) == 2
    assert metrics["actor/teacher_missing_fraction"] == 1
    assert "actor/teacher_kl" not in metrics
    assert not bool(batch.values("response_mask").any())
    assert all(torch.equal(before[name], tensor) for name, tensor in (await weights(made)).items())
    server.fails = lambda number: None
    metrics, batch = await made.train_step()
    assert metrics["actor/teacher_missing_fraction"] == 0
    assert bool(batch.values("response_mask").all())


@pytest.mark.parametrize("value", [None, "NaN", float("nan")])
async def test_a_log_prob_that_is_no_number_is_a_failure_and_not_a_zero(tasks, start, reward, server, value):
    spoilt = []

    def spoil(answer):
        if not spoilt:
            spoilt.append(answer["choices"][0]["prompt_logprobs"][-1])
            next(iter(spoilt[0].values()))["logprob"] = value
        return answer

    server.answer = spoil
    made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(f"'{server.url}'"))
    metrics, batch = await made.train_step()
    assert metrics["actor/teacher_missing_fraction"] == 1 / 16
    assert bool(batch.values("advantages").isfinite().all())


async def test_a_row_whose_teacher_is_unknown_stops_the_run(tasks, start, reward, teachers):
    named = f"{{name: '1', path: '{teachers[0]}'}}", f"{{name: x, path: '{teachers[1]}'}}"
    column = "algorithm.distillation.teacher_column=answer"
    made = await trainer(tasks, start, reward, "algorithm=mopd", of_teachers(*named), column)
    with pytest.raises(ConfigError, match=r"the column 'answer' is '\d', but must name one of the teachers 1, x"):
        await made.train_step()
