"""Tests of a run's report in a browser: clicks, typed text and hovering."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.monitoring.report.page import write_report
from tests.e2e.runs import train
from tests.image_models import picture
from tests.made_runs import batch, made_run, with_pictures


def count(page) -> str:
    return page.inner_text("#count")


def settled(page, text: str) -> None:
    page.locator("#count", has_text=text).wait_for()


def tip(page) -> dict[str, str]:
    """Return the values that the page's tooltip shows for a token, by name."""
    cells = page.locator("#tip tr").all()
    found = {row.locator("th").inner_text(): row.locator("td").inner_text() for row in cells}
    return {"token": page.inner_text("#tip .what"), "state": page.inner_text("#tip .faint"), **found}


def reading(page) -> str:
    """Return the text below the first chart, which lists the values of the chart's curves."""
    return page.inner_text("#charts .values >> nth=0").strip()


def token(page, card: int, place: int):
    return page.locator(".card").nth(card).locator(".tokens span").nth(place)


@pytest.mark.slow
def test_a_conversation_shows_its_turns_and_its_stop_reason(tmp_path, opened):
    run = train(
        tmp_path / "run", "data=higher_lower", "placement=inprocess", "rollout=hf", "trainer.total_steps=1",
        "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=4", "data.val=null",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    rows = pq.read_table(run.output / "rollouts/step_000001.parquet").to_pylist()
    page = opened(run.output / "report.html")
    for card, row in enumerate(rows[:4]):
        facts = page.locator(".card").nth(card).locator(".facts").inner_text()
        assert f"{row['turns']} turn" in facts
        assert f"ended by {row['stop_reason']}" in facts
    observed = page.locator(".card").first.locator(".tokens span.observed").all_inner_texts()
    assert "".join(observed).count("user") == rows[0]["turns"] - (rows[0]["stop_reason"] != "max_turns")
    reasons = [option for option in page.locator("select[name=finish] option").all_inner_texts() if option != "all"]
    assert reasons == sorted({row["stop_reason"] for row in rows})


@pytest.mark.slow
def test_the_page_of_a_real_run_has_the_values_of_the_stored_tokens(tmp_path, opened):
    run = train(
        tmp_path / "run", "algorithm.kl_loss.kl_loss_coef=0.01", "placement=inprocess", "rollout=hf",
        "trainer.total_steps=3", "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2",
        "rollout.samples_per_prompt=4", "data.val_size=4", "actor.lr=1e-3",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert f"report:         {run.output / 'report.html'}" in run.stdout
    table = pq.read_table(run.output / "rollouts/step_000003.parquet").to_pylist()
    page = opened(run.output / "report.html")
    assert count(page) == "16 samples of 48, in 4 groups"
    assert page.locator("#charts .chart").count() >= 12
    assert "actor.lr" in page.inner_text("#config")
    # The actor computes no old log-probs of the first mini-batch before the update.
    known = [row["old_log_probs"][1] is not None for row in table]
    assert sorted(known) == [False] * 8 + [True] * 8
    number, other, place = known.index(True), known.index(False), 1
    token(page, other, place).hover()
    assert tip(page)["ratio old / rollout"] == "–"
    row = table[number]
    page.locator(".card").nth(number).scroll_into_view_if_needed()
    token(page, number, place).hover()
    values = tip(page)
    old, engine, ref = (row[f"{name}_log_probs"][place] for name in ("old", "rollout", "ref"))
    assert values["id"] == str(row["response_ids"][place])
    assert values["state"] == "sampled and trained on"
    assert float(values["advantage"]) == pytest.approx(row["advantages"][place], rel=0.01, abs=1e-4)
    assert float(values["rollout log-prob"].split()[0]) == pytest.approx(engine, rel=0.01, abs=1e-4)
    assert float(values["ratio old / rollout"]) == pytest.approx(math.exp(old - engine), rel=0.01)
    assert float(values["KL, old − ref"]) == pytest.approx(old - ref, rel=0.02, abs=1e-5)
    assert values["weight version"] == str(row["policy_version"][place])
    page.select_option("[name=step]", "1")
    page.locator(".tokens .special", has_text="<eos>").first.wait_for()


def test_samples_are_found_by_step_text_reward_and_failure(opened, made):
    page = opened(made)
    assert count(page) == "2 samples of 5, in 1 group"
    page.select_option("[name=step]", "")
    settled(page, "5 samples of 5, in 3 groups")
    page.fill("[name=text]", "<B>X")
    settled(page, "1 sample of 5, in 1 group")
    assert page.locator(".card").first.inner_text().endswith("</script><b>x</b><eos>")
    page.fill("[name=text]", "8=")  # The search text occurs in a prompt.
    settled(page, "1 sample of 5, in 1 group")
    page.locator(".group h3", has_text="prompt group 8").wait_for()
    page.fill("[name=text]", "")
    page.fill("[name=least]", "0.2")
    page.fill("[name=most]", "0.6")
    settled(page, "2 samples of 5, in 2 groups")
    page.get_by_role("button", name="Reset", exact=True).click()
    settled(page, "2 samples of 5, in 1 group")
    page.check("[name=failed]")
    settled(page, "1 sample of 5, in 1 group")
    assert "it broke" in page.inner_text(".card")
    page.get_by_role("button", name="Show the whole group").click()
    assert page.locator(".card").count() == 2


def test_a_token_shows_its_values_and_an_observation_has_none(opened, made):
    page = opened(made)
    page.select_option("[name=step]", "1")
    settled(page, "3 samples of 5")
    token(page, 0, 0).hover()
    assert tip(page) == {
        "token": '"1"', "state": "sampled and trained on", "id": "49", "advantage": "-1",
        "rollout log-prob": "-0.125 (88.3%)", "old log-prob": "0.125", "ratio old / rollout": "1.284",
        "ref log-prob": "-0.625", "KL, old − ref": "0.75", "entropy": "0.5", "weight version": "70003",
    }  # fmt: skip
    token(page, 0, 1).hover()
    assert tip(page) == {"token": '"2"', "state": "observation: not sampled, not trained on", "id": "50"}
    assert "observed" in token(page, 0, 1).get_attribute("class")


def test_the_colour_of_a_token_follows_the_chosen_value(opened, made):
    page = opened(made)
    colour = "element => element.style.background"
    negative = token(page, 0, 0).evaluate(colour)
    assert "--low" in negative  # The token's advantage is -1.
    page.select_option("[name=color]", "kl")
    page.locator(".card .tokens span[style*='--high']").first.wait_for()
    page.select_option("[name=color]", "entropy")
    page.locator(".card .tokens span[style*='--plain']").first.wait_for()
    page.select_option("[name=color]", "none")
    page.locator(".card .tokens span[style*='rgba']").first.wait_for(state="detached")
    assert page.locator("[name=color] option").all_inner_texts() == [
        "advantage", "ratio, old / rollout", "entropy", "KL, old − ref", "−log-prob", "none",
    ]  # fmt: skip


def test_a_prompt_shows_its_images(tmp_path, opened):
    made = with_pictures(batch(["1", "2"], uids=[0, 1]), [[picture(1), picture(2)], []])
    run = made_run(tmp_path / "run", [made])
    write_report([run], tmp_path / "page.html")
    page = opened(tmp_path / "page.html")
    settled(page, "2 samples of 2, in 2 groups")
    images = page.locator(".prompt img")
    assert images.count() == 2
    assert images.nth(1).get_attribute("alt") == "image 2 of the prompt"
    assert [images.nth(place).evaluate("image => image.naturalWidth") for place in (0, 1)] == [28, 28]


def test_everything_can_be_reached_with_the_keyboard(opened, made):
    page = opened(made)
    page.focus("[name=text]")
    page.keyboard.type("5")
    settled(page, "1 sample of 5")
    page.focus(".card .tokens")
    page.keyboard.press("ArrowRight")
    assert tip(page)["token"] == '"5"'
    page.keyboard.press("ArrowRight")
    assert tip(page)["token"] == '"6"'
    page.keyboard.press("End")
    assert tip(page)["token"] == '"<eos>" (special token)'
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.focus("#charts .chart > svg >> nth=0")
    page.keyboard.press("Home")
    assert reading(page) == "mean 0.125 (step 1)"


def test_hovering_a_curve_shows_the_values_of_that_step_in_all_charts(opened, made):
    page = opened(made)
    picture = page.locator("#charts .chart svg[role=img]").first
    box = picture.bounding_box()
    assert reading(page) == "mean 0.25"
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)  # The middle of the x axis is step 1 of steps 0 to 2.
    assert reading(page) == "mean 0.125"
    assert "step 1:" in page.inner_text("#time .values")


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_window_in_light_and_dark(opened, made, width, scheme):
    page = opened(made, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")


def test_several_runs_are_drawn_over_each_other_and_can_be_hidden(tmp_path, opened):
    folders = [made_run(tmp_path / name, [batch(), batch()]) for name in ("one", "two")]
    write_report(folders, tmp_path / "both.html")
    page = opened(tmp_path / "both.html")
    curves = page.locator("#charts .chart").first.locator("path.curve")
    assert curves.count() == 2
    page.uncheck("#legend input >> nth=0")
    assert curves.count() == 1
    page.select_option("[name=run]", "1")
    settled(page, "2 samples of 8")


def test_a_page_of_ten_thousand_answers_of_256_tokens_is_small_and_opens_and_is_searched(
    tmp_path, opened, record_property
):  # fmt: skip
    folder = large_run(tmp_path / "large", steps=20, samples=500, length=256)
    write_report([folder], tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 20_000_000
    page = opened(tmp_path / "large.html")
    seconds = page.evaluate("performance.now()") / 1000  # The page's clock starts when the browser starts to open it.
    record_property("time to open a report of 10,000 answers of 256 tokens", f"{seconds:.1f} s")
    assert count(page) == "500 samples of 10,000, in 125 groups"
    page.select_option("[name=step]", "")
    page.fill("[name=text]", "needle")
    settled(page, "1 sample of 10,000")


def large_run(folder, *, steps: int, samples: int, length: int):
    """Make a run with random tokens, log-probs and advantages.

    Exactly one answer of the run contains the token "needle".
    """
    made_run(folder, [])
    rng, vocabulary = np.random.default_rng(0), 50_000
    texts = [f" w{number}" for number in range(vocabulary)]
    texts[-1] = " needle"
    words = np.array(texts, dtype=object)
    pq.write_table(pa.table({"id": range(vocabulary), "text": texts, "special": [False] * vocabulary}),
                   folder / "tokens.parquet")  # fmt: skip
    offsets = np.arange(samples + 1, dtype=np.int32) * length

    def lists(values):
        return pa.ListArray.from_arrays(offsets, values.reshape(-1))

    for step in range(1, steps + 1):
        ids = np.minimum(rng.zipf(1.2, (samples, length)) - 1, vocabulary - 2)
        if step == 7:
            ids[3, 100] = vocabulary - 1
        engine = -rng.gamma(0.3, 1.5, (samples, length)).astype(np.float32)
        old = engine + rng.normal(0, 0.02, engine.shape).astype(np.float32)
        columns = {
            "uid": np.arange(samples) // 4 + step * samples, "prompt": [f"{row // 4}=" for row in range(samples)],
            "response": ["".join(words[row]) for row in ids], "score": rng.random(samples), "response_ids": lists(ids),
            "response_mask": lists(np.ones(ids.shape, bool)), "policy_version": lists(np.full(ids.shape, step)),
            "rollout_log_probs": lists(engine), "old_log_probs": lists(old),
            "ref_log_probs": lists(old - rng.normal(0.05, 0.2, old.shape).astype(np.float32)),
            "advantages": lists(np.repeat(rng.normal(0, 1, (samples, 1)), length, 1)),
            "finish_reason": ["stop"] * samples,
        }  # fmt: skip
        pq.write_table(pa.table(columns), folder / "rollouts" / f"step_{step:06d}.parquet")
    return folder
