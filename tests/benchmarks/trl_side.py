"""Run TRL's GRPOTrainer on a job of `job.py`, in TRL's own virtual environment.

Only the reward function comes from rltrain.

The command is `python -m tests.benchmarks.trl_side JOB.json {hf|vllm}`, from the repository root. The job's progress
file gets one line per step, as soon as the step's rewards are computed. The file for evaluations gets one line per
batch of an evaluation.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from rltrain.rewards.final_answer import final_answer  # noqa: E402
from rltrain.rewards.numeric_match import numeric_match  # noqa: E402

DUAL_CLIP = 3.0  # TRL's `delta` bounds the loss of negative advantages, like the dual clip in grpo.yaml.


def settings(job: dict[str, Any], engine: str) -> GRPOConfig:
    """Return the job's settings as TRL's config.

    Options that the job does not determine keep TRL's defaults, except for defaults that are meant for GPUs.

    Each generation serves `minibatches` optimizer steps. TRL's loss type `bnpo` is the token mean over a mini-batch.
    """
    rows = job["prompts_per_step"] * job["samples_per_prompt"]
    options: dict[str, Any] = {}
    if engine == "vllm":
        options = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False,
            "vllm_gpu_memory_utilization": 0.1,
            "vllm_max_model_length": job["max_prompt_length"] + job["max_response_length"],
        }  # fmt: skip
    return GRPOConfig(
        output_dir=str(Path(job["progress"]).parent / "trl"),
        per_device_train_batch_size=rows // job["minibatches"], gradient_accumulation_steps=1,
        steps_per_generation=job["minibatches"], num_iterations=1, num_generations=job["samples_per_prompt"],
        max_completion_length=job["max_response_length"], temperature=1.0, top_p=1.0, top_k=0,
        max_steps=job["steps"] * job["minibatches"], shuffle_dataset=False,
        loss_type="bnpo", scale_rewards="group", beta=0.0, epsilon=0.2, epsilon_high=0.2, delta=DUAL_CLIP,
        learning_rate=job["lr"], lr_scheduler_type="linear", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        adam_beta1=0.9, adam_beta2=0.999, optim="adamw_torch_fused",
        use_cpu=True, bf16=False, gradient_checkpointing=False, model_init_kwargs={"dtype": torch.float32},
        logging_steps=job["minibatches"], save_strategy="no", report_to=[], disable_tqdm=True, seed=job["seed"],
        dataloader_pin_memory=False, **evaluation(job), **options,
    )  # fmt: skip


def evaluation(job: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's options for the job's evaluations; {} if the job has none."""
    if not job["eval_every"]:
        return {}
    return {
        "eval_strategy": "steps",
        "eval_steps": job["eval_every"] * job["minibatches"],
        "num_generations_eval": job["eval_samples"],
        "per_device_eval_batch_size": 10 * job["eval_samples"],
    }


def data_set(path: str) -> Dataset | None:
    """Read rows of JSON, with questions as chat messages; None if the file has no rows."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for row in rows:
        if "question" in row:
            row["prompt"] = [{"role": "user", "content": row.pop("question")}]
    return Dataset.from_list(rows) if rows else None


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is a string, or a list of messages if the prompt is a chat."""
    text: str = completion if isinstance(completion, str) else completion[0]["content"]
    return text


def score(task: str, prompt: Any, response: str, answer: str, finish_reason: str) -> float:
    """Score a response with the reward function of the job's task."""
    if task == "sums":
        return numeric_match(str(prompt), response, answer=answer) or 0.0
    return final_answer(prompt, response, answer=answer, finish_reason=finish_reason)


def let_weights_in() -> None:
    """Make vLLM on CPU take new weights the way TRL sends them.

    On CPU, vLLM computes with packed copies of the weights and discards the originals, so TRL's `load_weights` raises
    an error. Layers keep their weights if they use torch's own matrix product instead of vLLM's packed product.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def main(path: str, engine: str) -> None:
    """Run the job of the file `path` with the given engine of TRL, "hf" or "vllm"."""
    if engine == "vllm":
        let_weights_in()
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config, step = settings(job, engine), 0

    def reward(prompts: list[Any], completions: list[Any], completion_ids: Any, answer: list[str], **_: Any) -> Any:
        nonlocal step
        ended = ["stop" if job["stop_id"] in ids else "length" for ids in completion_ids]
        scores = [
            score(job["task"], prompt, text_of(completion), right, reason)
            for prompt, completion, right, reason in zip(prompts, completions, answer, ended, strict=True)
        ]
        mean, lengths = sum(scores) / len(scores), sum(map(len, completion_ids)) / len(scores)
        training = trainer.model.training
        step += training
        line = {"step": step, "reward/mean": mean, "rollout/length_mean": lengths}
        if not training:
            line = {"step": step, "eval/sampled_reward": mean}
        with Path(job["progress" if training else "evaluations"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return scores

    trainer = GRPOTrainer(
        model=job["model"], reward_funcs=reward, args=config, train_dataset=data_set(job["data"]),
        eval_dataset=data_set(job["val"]),
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
