#!/usr/bin/env bash
# Train several algorithms with the same task, seed and number of steps, and print a table of the results.
#   examples/compare_algorithms.sh [KEY=VALUE ...]     ALGORITHMS="grpo ppo": train these algorithms     OUT=DIR: output folder
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
out=${OUT:-outputs/compare_$(date +%Y-%m-%d_%H-%M-%S)}

for algorithm in ${ALGORITHMS:-grpo rloo gspo}; do
    "$python" -m rltrain.main "algorithm=$algorithm" trainer.total_steps=40 trainer.sample_every=0 "$@" \
        "trainer.output_dir=$out/$algorithm"
done
"$python" examples/compare_runs.py "$out"/*/
