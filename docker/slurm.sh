#!/usr/bin/env bash
# Start a Ray cluster on the nodes of a SLURM job, start a run of rltrain on the cluster, and stop both at the end of the
# job. docs/clusters.md has the command. If a node fails, SLURM starts the job again. Shortly before the job's time limit,
# this script puts the job back into the queue. In both cases, the run continues from its last checkpoint.
#
# The environment variable PYTHON names the Python with rltrain's packages, if it is not the first one in PATH.
# HEAD_ADDRESS is the address of the first node. Set HEAD_ADDRESS if the other nodes cannot reach the first address that
# `hostname -I` prints.
#SBATCH --job-name=rltrain
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

: "${SLURM_JOB_NUM_NODES:?start this script with sbatch}"
cpus="${SLURM_CPUS_PER_TASK:?name the CPU cores that Ray may use on a node, with sbatch --cpus-per-task=NUMBER}"
python="${PYTHON:-python}"
ray="$(dirname "$(command -v "$python")")/ray"
head="${HEAD_ADDRESS:-$(hostname --all-ip-addresses | cut --delimiter=' ' --fields=1)}"
address="$head:6379"

# Ray's processes and the run share a token that no other job knows.
RAY_AUTH_TOKEN="$("$python" -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

processes=()
# shellcheck disable=SC2329 # the trap calls it
stop() {
    trap '' TERM USR1
    kill -TERM "${processes[@]}" 2>/dev/null || true
    timeout 60 "$ray" stop --grace-period 20 >/dev/null || true
    wait
}
trap stop EXIT

# This script runs on the first node of the job. The head starts here, and srun starts Ray on all other nodes.
timeout 120 "$ray" start --head --node-ip-address="$head" --port=6379 --num-cpus="$cpus" --include-dashboard=false
workers=$((SLURM_JOB_NUM_NODES - 1))
if ((workers)); then
    srun --relative=1 --nodes="$workers" --ntasks="$workers" --cpus-per-task="$cpus" --kill-on-bad-exit=0 \
        "$ray" start --block --address="$address" --num-cpus="$cpus" &
    processes+=("$!")
fi

# Wait until all nodes have joined, at most five minutes.
all_joined='import ray, sys, time
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(1)'
# Ray logs to stderr for a minute if its head has ended, so stderr is dropped. The messages of `ray start` name the cause.
timeout --kill-after=5 300 "$python" -c "$all_joined" "$address" "$SLURM_JOB_NUM_NODES" 2>/dev/null &
processes+=("$!")
wait -n || true # ends when all nodes have joined, or when srun or the time limit has ended
if kill -0 "$!" 2>/dev/null || ! wait "$!"; then
    echo "error: not all $SLURM_JOB_NUM_NODES nodes joined Ray at $address; the messages of ray start above say why" >&2
    exit 1
fi

requeue=no
"$python" -m rltrain.main placement=colocated "placement.address=$address" trainer.resume=auto "$@" &
run="$!"
processes+=("$run")
# A run that gets SIGTERM saves a checkpoint and ends. SLURM sends SIGUSR1 five minutes before the time limit, and
# `scancel --batch --signal=TERM JOB` sends SIGTERM.
trap 'kill -TERM "$run"' TERM
trap 'requeue=yes; kill -TERM "$run"' USR1
status=0
wait "$run" || status="$?"
while kill -0 "$run" 2>/dev/null; do # a signal ends `wait` early
    status=0
    wait "$run" || status="$?"
done
if [[ "$requeue" == yes && "$status" != 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
