#!/bin/bash
# The classifier of image_classifier.py on several hosts: sbatch examples/slurm_job.sh
# One launcher on each host starts its ranks. Two minutes before the time is over they finish their
# step, save and end with exit code 75; the job is queued again, and goes on from there.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

cd "${SLURM_SUBMIT_DIR:-.}" || exit
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share the host have others

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    lockstep run --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-endpoint "$first:$port" \
    -n "${RANKS_PER_NODE:-8}" --grace 110 examples/image_classifier.py --folder "run-$SLURM_JOB_ID"
code=$?
if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
