#!/bin/bash
# Run on the nodes of a Slurm job: start Ray on every node, run `camshaft ppo` on the first, stop Ray at the end.
#
#     sbatch --nodes=4 examples/cluster/slurm.sh data.train_files=/shared/sums/train.parquet ...
#
# Takes the arguments of `camshaft ppo`; Slurm sets the numbers of nodes and devices. Activate the environment of
# `camshaft` and `ray` before sbatch. That environment, models, data and trainer.default_local_dir must have the same
# paths on every node. Ten minutes before the time limit, or on preemption, the run saves a checkpoint and exits, and the
# job is requeued and resumes from it. If a process of the run dies, the run resumes by itself (trainer.max_restarts).
#SBATCH --job-name=camshaft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
#SBATCH --output=camshaft-%j.log
set -euo pipefail

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # of Ray's head, different for each job on a machine
size=(--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from sbatch
export RAY_USAGE_STATS_ENABLED=0

on=(srun --overlap --nodes=1 --ntasks=1) # a step on one machine, concurrent with other steps

head=${machines[0]}
address=$("${on[@]}" --nodelist="$head" hostname -I) # all addresses; the other machines use the first one
address=${address%% *}

trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
"${on[@]}" --nodelist="$head" ray start --block --head --node-ip-address="$address" --port="$port" \
    --include-dashboard=false "${size[@]}" &
export RAY_ADDRESS=$address:$port

"${on[@]}" --nodelist="$head" timeout 300 bash -c "until echo > /dev/tcp/$address/$port; do sleep 1; done" 2> /dev/null
for machine in "${machines[@]:1}"; do
    "${on[@]}" --nodelist="$machine" ray start --block --address="$RAY_ADDRESS" "${size[@]}" &
done

# Wait until all machines have joined; the run itself does not wait for them.
"${on[@]}" --nodelist="$head" timeout 300 python -c "
import sys, time, ray
ray.init(logging_level='ERROR')
while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
" "${#machines[@]}"

"${on[@]}" --nodelist="$head" camshaft ppo trainer.controller=ray trainer.nnodes="${#machines[@]}" \
    trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-1}" trainer.experiment_name="slurm-$SLURM_JOB_ID" \
    trainer.max_restarts=5 "$@" &
run=$!
# Slurm signals only this script (B:), because the signal would kill Ray; srun forwards it to the driver.
trap 'kill -USR1 "$run"' USR1
status=0
wait "$run" || status=$?
while kill -0 "$run" 2> /dev/null; do # the signal interrupts `wait`, not the run
    status=0
    wait "$run" || status=$?
done
if [ "$status" -eq 138 ]; then # 128 + SIGUSR1: stopped by the signal after saving
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
