"""Runs in which the model talks with an environment over several turns."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from runs import finish, start, train, train_here
from transformers import AutoTokenizer

from rltrain.batch.trajectory import NOT_SAMPLED
from tests.chat_model import GAME, save_chat_model
from workers.environments.turn_journal import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    save_chat_model(folder / "model")
    (folder / "game.py").write_text(GAME)
    rows = [{"prompt": f"guess {n}", "answer": str(n)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={folder}/model", f"data.train={folder}/rows.jsonl", "data.val=null", "actor.lr=1e-3",
        f"rollout.environment={folder}/game.py:Game", "reward.functions=[environment_reward]", "rollout=hf",
        "rollout.max_prompt_length=100", "rollout.max_response_length=150", "rollout.max_turn_length=12",
        "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=4",
        "trainer.total_steps=3", "trainer.deterministic=true", "trainer.save_every=1",
        "placement.threads_per_worker=1",  # Runs in one process and on Ray are compared bit by bit.
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(common, tmp_path_factory):
    run = train(tmp_path_factory.mktemp("undisturbed") / "run", *common, "placement=inprocess")
    assert run.status == 0, run.stderr
    return run


def test_rows_are_the_conversations_and_only_sampled_tokens_are_trained(common, undisturbed):
    tokenizer = AutoTokenizer.from_pretrained(common[0].partition("=")[2])
    rows = [row for table in undisturbed.samples().values() for row in table.to_pylist()]
    assert len(rows) == 3 * 4 * 4
    assert {row["turns"] for row in rows} == {1, 2, 3}
    for row in rows:
        sampled = [version != NOT_SAMPLED for version in row["policy_version"]]
        assert row["response_mask"] == sampled
        messages, ended = json.loads(row["messages"]), row["finish_reason"] == "stop"
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        text = tokenizer.decode(row["prompt_ids"] + row["response_ids"])
        if ended:
            assert text + "\n" == rendered  # the template adds a line break that was not sampled
        assert len(messages) == 2 * row["turns"]
        assert messages[0]["content"].startswith("guess ")
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        seen = [message["content"] for message in messages if message["role"] == "user"][1:]
        number = int(messages[0]["content"].partition("seed ")[2])
        assert [one[0] for one in seen] == [str(n + 1) for n in range(len(seen))]
        assert 0 <= number < 97
        rewards = [sum(map(ord, one)) % 5 / 4 for one in said]
        assert row["score"] == pytest.approx(sum(rewards) + 0.125)


def test_E1_engine_and_actor_agree_over_turns(undisturbed):
    assert all(row["actor/engine_gap"] < 1e-5 for row in undisturbed.metrics())


@pytest.mark.usefixtures("settings_restored")
def test_a_resumed_run_ends_as_the_undisturbed_run(common, undisturbed, tmp_path):
    first = train_here(tmp_path / "run", *common, "placement=inprocess", "trainer.total_steps=1")
    assert first.status == 0, first.stderr
    last = train_here(tmp_path / "run", *common, "placement=inprocess", "trainer.resume=auto")
    assert last.status == 0, last.stderr
    assert last.timeless() == undisturbed.timeless()
    assert last.samples() == undisturbed.samples()
    names = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not any("template_process" in name for name in names)


PLAYER = '''
"""The game of game.py as an agent program with the client of OpenAI."""

import httpx
from game import Game
from openai import AsyncOpenAI


async def run(base_url, api_key, messages, answer, seed):
    game, rewards = Game(), {}
    messages[-1]["content"] += f"\\n{game.reset(answer, seed)}"
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        over = False
        while not over:
            done = await client.chat.completions.create(model="policy", messages=messages)
            (choice,) = done.choices
            text, rewards[done.id], over = game.step(choice.message.content or "")
            messages += [choice.message, {"role": "user", "content": text}]
            over = over or choice.finish_reason != "stop"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
        await http.post(f"{base_url}/reward", json={"reward": game.reward()})
    return rewards
'''


def test_an_agent_program_with_openais_client_gives_the_rows_of_the_same_environment_as_a_class(
    common, undisturbed, tmp_path
):
    folder = Path(common[0].partition("=")[2]).parent
    (folder / "player.py").write_text(PLAYER)
    agent = [f"rollout.agent={folder}/player.py:run", "rollout.environment=null"]
    run = train(tmp_path / "run", *common, *agent, "placement.environment_workers=2")
    assert run.status == 0, run.stderr
    assert run.survivors == []
    rows, expected = (
        [row for table in one.samples().values() for row in table.to_pylist()] for one in (run, undisturbed)
    )
    assert {row.pop("stop_reason") for row in rows} == {"done"}
    assert {row.pop("stop_reason") for row in expected} == {"done", "max_response_length"}
    assert json.dumps(rows) == json.dumps(expected)


BRANCHING = '''
"""An agent that also asks as a sub-agent, and whose last request starts a new conversation."""

from openai import AsyncOpenAI


async def run(base_url, api_key, messages, answer):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(conversation, text):
            conversation.append({"role": "user", "content": text})
            done = await client.chat.completions.create(model="policy", messages=conversation, max_tokens=4)
            text = done.choices[0].message.content or ""
            conversation.append({"role": "assistant", "content": text})
            return text

        own, helper = messages[:-1], []
        said = [await ask(own, messages[-1]["content"])]
        said.append(await ask(helper, f"help with {answer}"))
        said.append(await ask(own, "and then"))
        said.append(await ask(helper, "more"))
        said.append(await ask([], "in short"))
    return sum(map(ord, "".join(said))) % 5 / 4
'''


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.broad)])
def test_T1_an_agent_with_several_conversations_is_trained_on_each_answer_in_its_own_context(
    common, tmp_path, algorithm
):
    folder = Path(common[0].partition("=")[2]).parent
    (folder / "branching.py").write_text(BRANCHING)
    own = [f"rollout.agent={folder}/branching.py:run", "rollout.environment=null", f"algorithm={algorithm}"]
    run = train(tmp_path / "run", *common, *own, "placement=inprocess", "rollout.max_response_length=400")
    assert run.status == 0, run.stderr
    tokenizer = AutoTokenizer.from_pretrained(common[0].partition("=")[2])
    for row in (row for table in run.samples().values() for row in table.to_pylist()):
        assert (row["turns"], row["contexts"], row["stop_reason"]) == (5, 5, "done")
        assert [message.get("context") for message in json.loads(row["messages"]) if message["role"] == "user"] == [
            None, 1, 2, 3, 4
        ]  # fmt: skip
        text = tokenizer.decode(row["response_ids"])
        # The second request of a conversation repeats its first message. Each answer is trained on once.
        assert [text.count(part) for part in ("guess ", "help with", "and then", "more", "in short")] == [1, 2, 1, 1, 1]
        assert sum(row["response_mask"]) <= 5 * 4
    for metrics in run.metrics():
        assert metrics["actor/engine_gap"] < 1e-5
        assert metrics["rollout/contexts_mean"] == 5


def test_T6_weights_change_in_the_middle_of_conversations_and_each_token_knows_its_version(common, tmp_path):
    folder = Path(common[0].partition("=")[2]).parent
    own = [f"rollout.environment={slow_game(folder)}:Game", "trainer.deterministic=false", "trainer.total_steps=6"]
    run = train(tmp_path / "run", *common, *own, "trainer.max_staleness=1", "algorithm=tis")
    assert run.status == 0, run.stderr
    mixed = 0
    for step, table in enumerate(run.samples().values(), 1):
        for row in table.to_pylist():
            versions = [version for version in row["policy_version"] if version != NOT_SAMPLED]
            assert versions == sorted(versions)
            assert all(step - 2 <= version <= step - 1 for version in versions)
            mixed += len(set(versions)) > 1
    assert mixed > 0
    assert run.metrics()[0]["actor/engine_gap"] < 1e-5  # In the first step, all tokens are from the current weights.


def test_T5_a_killed_environment_worker_or_engine_changes_no_result(common, undisturbed, tmp_path):
    output = tmp_path / "run"
    process = start(output, *common, "placement.environment_workers=2", "trainer.total_steps=3")
    struck = []
    deadline = time.monotonic() + 200
    while len(struck) < 2 and process.poll() is None and time.monotonic() < deadline:
        for word in ("environment worker 0", "rollout replica 0"):
            pid = pid_of(output, word)
            if pid and word not in struck and (output / "metrics.jsonl").exists():
                os.kill(pid, signal.SIGKILL)
                struck.append(word)
        time.sleep(0.01)
    run = finish(process, output)
    assert run.status == 0, run.stderr
    assert len(struck) == 2
    assert run.survivors == []
    assert run.timeless() == undisturbed.timeless()
    assert run.samples() == undisturbed.samples()


def test_T5_a_killed_driver_takes_the_recorded_turns_again(common, undisturbed, tmp_path):
    """The log-prob of one recorded token is changed before the resume, so the samples show that the record was used."""
    folder, output = Path(common[0].partition("=")[2]).parent, tmp_path / "run"
    own = [*common, f"rollout.environment={slow_game(folder)}:Game", "placement.environment_workers=2"]
    process = start(output, *own)
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        recorded = [line for path in output.glob("turns/*.jsonl") for line in read_lines(path)]
        if (output / "checkpoints/step_1/manifest.json").exists() and sum(line["turn"] == 1 for line in recorded) > 2:
            break
        time.sleep(0.01)
    process.kill()
    assert finish(process, output).status == -signal.SIGKILL
    path = min(output.glob("turns/*.jsonl"))
    first, *others = read_lines(path)
    assert set(first["result"]["versions"]) == {1}
    first["result"]["log_probs"][0] -= 0.5
    path.write_text("".join(f"\n{json.dumps(line)}" for line in (first, *others)))
    run = train(output, *own, "trainer.resume=auto")
    assert run.status == 0, run.stderr
    assert list(output.glob("turns/*")) == []
    changed = []
    for table, expected in zip(run.samples().values(), undisturbed.samples().values(), strict=True):
        for row, other in zip(table.to_pylist(), expected.to_pylist(), strict=True):
            gaps = [a - b for a, b in zip(row.pop("rollout_log_probs"), other.pop("rollout_log_probs"), strict=True)]
            changed += [(int(path.stem), gap) for gap in gaps if gap and row["uid"] == int(path.stem)]
            assert json.dumps(row) == json.dumps(other)
    assert changed == [(int(path.stem), pytest.approx(-0.5, abs=1e-6))]


def slow_game(folder):
    """Write the game with a pause in each step, and return the path of the file."""
    path = folder / "slow.py"
    game = GAME.replace("class Game:", "import time\n\n\nclass Game:")
    path.write_text(game.replace("reward = sum", "time.sleep(0.4)\n        reward = sum"))
    return path


def pid_of(output, word):
    """Return the process id of a worker of a run, or None if processes.json lacks the worker."""
    try:
        processes = json.loads((output / "processes.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return processes[word]["pid"] if word in processes else None
