#!/usr/bin/env bash
# Starts a Ray cluster on the nodes of a SLURM job, and a run of rltrain on it:
#
#     sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 docker/slurm.sh placement=colocated \
#         placement.actor_ranks=16 placement.rollout_replicas=16 trainer.output_dir=/shared/runs/first
#
# Submit the same command again after a failure: with trainer.resume=auto, the run continues from its last checkpoint.
# The nodes need the same Python environment; activate it before sbatch, or name its Python with PYTHON=/path/to/python.
#SBATCH --job-name=rltrain
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@300
set -euo pipefail

python="${PYTHON:-python}"
ray="$(dirname "$(command -v "$python")")/ray"
port="${RAY_PORT:-6379}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# All daemons and the run share one token, so that no other job of the machine can join the cluster.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$("$python" -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0

on() { # on NODE COMMAND...: run a command on one node of the job
    local node="$1"
    shift
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@"
}

resources=()
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
    resources+=("--num-cpus=$SLURM_CPUS_PER_TASK")
fi
# On a machine with several networks, the first address must be in the network that connects the nodes.
head="$(on "${nodes[0]}" hostname --all-ip-addresses | awk '{print $1}')"
daemons=()
trap 'kill "${daemons[@]}" 2>/dev/null; wait' EXIT

on "${nodes[0]}" "$ray" start --head --block --node-ip-address="$head" --port="$port" "${resources[@]}" &
daemons+=("$!")
for node in "${nodes[@]:1}"; do
    on "$node" "$ray" start --block --address="$head:$port" "${resources[@]}" &
    daemons+=("$!")
done

# Wait until all nodes have joined the cluster.
joined='import ray, sys; ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))'
for ((attempt = 1; ; attempt++)); do
    if on "${nodes[0]}" "$python" -c "$joined" "$head:$port" "${#nodes[@]}" 2>/dev/null; then
        break
    fi
    if ((attempt == 30)); then
        echo "error: not all of the ${#nodes[@]} nodes joined Ray at $head:$port; look for messages of ray start above" >&2
        exit 1
    fi
    sleep 2
done

# srun passes SIGTERM, which SLURM sends before the job's time limit, on to the run. The run then saves a checkpoint.
on "${nodes[0]}" "$python" -m rltrain.main "placement.address=$head:$port" trainer.resume=auto "$@" &
run="$!"
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status="$?"
if kill -0 "$run" 2>/dev/null; then # A signal has ended the first wait, and the run still saves.
    wait "$run" || status="$?"
fi
exit "$status"
