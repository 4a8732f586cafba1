#!/usr/bin/env bash
# Train with your own model, data and reward: teach a model to name the largest of seven digits.
#   examples/own_data.sh [KEY=VALUE ...]     MODEL=DIR: start from another model
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}

# If MODEL is not set, start from the tiny built-in model, which has been trained a little on medians.
start='from rltrain.tasks import TASKS; from rltrain.tasks.tiny_model import cached_start; print(cached_start(TASKS["median"]))'
model=${MODEL:-$("$python" -c "$start")}

exec "$python" -m rltrain.main \
    profile=demo model.path="$model" \
    data.train=examples/own_data/train.jsonl \
    data.val=examples/own_data/val.jsonl \
    "reward.functions=[examples/own_data/reward.py:right,{path:examples/own_data/reward.py:length,weight:-0.01,outcome:false}]" \
    trainer.total_steps=40 trainer.prompts_per_step=32 trainer.prompts_per_minibatch=8 \
    trainer.output_dir="outputs/own_data_$(date +%Y-%m-%d_%H-%M-%S)" \
    "$@"
