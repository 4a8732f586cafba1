"""Tests of the adapters for environments of other libraries.

Tests that need a library are skipped if the library is not installed. `make environment-test` installs the libraries,
and lets the tests fail if a library is missing.
"""

import importlib
import os

import pytest

from rltrain.environments.adapters import from_gymnasium, from_reasoning_gym, from_textarena


def library(name):
    """Import a library, or skip the test if the library is missing and RLTRAIN_ENVIRONMENT_TEST does not require it."""
    if os.environ.get("RLTRAIN_ENVIRONMENT_TEST") == "required":
        return importlib.import_module(name)
    return pytest.importorskip(name)


class Echo:
    """An environment with Gymnasium's methods: the observation is the action, and the third step is truncated."""

    closed = False

    def reset(self, *, seed):
        self.steps = 0
        return f"seed {seed}", {}

    def step(self, action):
        self.steps += 1
        return {"said": action}, self.steps, action == "end", self.steps == 3, {}

    def close(self):
        Echo.closed = True


def test_a_gymnasium_environment_ends_if_it_terminates_or_is_truncated():
    environment = from_gymnasium(Echo)()
    assert environment.reset(seed=(1 << 62) + 5) == "seed 5"
    assert environment.step("hi") == ('{"said": "hi"}', 1.0, False)
    assert environment.step("end") == ('{"said": "end"}', 2.0, True)
    assert environment.step("hi") == ('{"said": "hi"}', 3.0, True)
    environment.close()
    assert Echo.closed


class Countdown:
    """A game with TextArena's methods, whose observation after each move is the text of the whole game."""

    def reset(self, *, num_players, seed):
        assert num_players == 1
        self.text, self.left = f"seed {seed}", 2

    def get_observation(self):
        return 0, self.text

    def step(self, *, action):
        self.left -= 1
        self.text += f"\n{action}: {self.left}"
        return self.left == 0, {}

    def close(self):
        return {0: 0.5}, {0: {}}


def test_of_a_textarena_game_the_model_sees_only_what_is_new():
    environment = from_textarena(Countdown)()
    assert environment.reset(seed=7) == "seed 7"
    assert environment.step("a") == ("a: 1", 0.0, False)
    assert environment.step("b") == ("", 0.5, True)


class Data(list):
    """A data set with the methods of reasoning-gym."""

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.1


def test_a_task_of_reasoning_gym_is_a_question_and_one_scored_answer():
    environment = from_reasoning_gym(lambda seed: Data([{"question": f"{seed}?", "answer": str(seed)}]))()
    assert environment.reset(seed=3) == "3?"
    assert environment.step("3") == ("", 1.0, True)
    assert environment.step("4") == ("", 0.1, True)


def test_a_real_gymnasium_environment():
    gymnasium = library("gymnasium")

    class Guess(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.digit = str(self.np_random.integers(10))
            return "guess", {}

        def step(self, action):
            return "no", float(action == self.digit), action == self.digit, False, {}

    make = from_gymnasium(lambda: gymnasium.wrappers.TimeLimit(Guess(), 2))
    first, second = make(), make()
    assert first.reset(seed=5) == second.reset(seed=5) == "guess"
    rewards = [(first.step(str(digit)), second.step(str(digit))) for digit in (first._env.unwrapped.digit, "x")]
    assert rewards[0] == (("no", 1.0, True), ("no", 1.0, True))
    assert rewards[1][0] == ("no", 0.0, True)
    first.close()


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "TowerOfHanoi-v0", "Mastermind-v0"])
def test_a_real_textarena_game_is_played_to_its_end(name):
    textarena = library("textarena")
    environment = from_textarena(lambda: textarena.make(name))()
    rules = environment.reset(seed=3)
    assert "[GAME] You are" in rules
    for _ in range(50):
        observation, reward, done = environment.step("[7]" if name != "Mastermind-v0" else "[1 2 3 4]")
        assert rules[:40] not in observation
        if done:
            break
        assert observation
        assert reward == 0.0
    assert done
    assert 0 <= reward <= 1


@pytest.mark.parametrize("name", ["spell_backward", "basic_arithmetic", "number_sorting"])
def test_a_real_task_of_reasoning_gym(name):
    reasoning_gym = library("reasoning_gym")
    make = from_reasoning_gym(lambda seed: reasoning_gym.create_dataset(name, size=1, seed=seed))
    first, second, other = make(), make(), make()
    assert first.reset(seed=4) == second.reset(seed=4) != other.reset(seed=5)
    assert first.step(first._entry["answer"]) == ("", 1.0, True)
    assert first.step("nothing of the kind")[1] < 1
