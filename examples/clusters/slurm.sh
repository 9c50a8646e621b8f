#!/bin/bash
# A heterogeneous job: two machines of one kind and one of another, a rank on each.
#
#     sbatch examples/clusters/slurm.sh examples/resume.py
#
#SBATCH --job-name=elche
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1
set -euo pipefail

NNODES=$((SLURM_JOB_NUM_NODES_HET_GROUP_0 + SLURM_JOB_NUM_NODES_HET_GROUP_1))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
PORT=$((15000 + SLURM_JOB_ID % 10000))
export NNODES HEAD PORT ELCHE_LISTEN=auto
# In a folder that all machines see.
export ELCHE_CHECKPOINT_DIR="$SLURM_SUBMIT_DIR/checkpoints" ELCHE_CHECKPOINT_EVERY_S=600
export ELCHE_RESUME="$ELCHE_CHECKPOINT_DIR"
mkdir -p "$ELCHE_CHECKPOINT_DIR"

# SLURM_PROCID counts over both groups, one task to a machine.
srun --het-group=0,1 bash -c '
  exec torchrun --nnodes "$NNODES" --node-rank "$SLURM_PROCID" --nproc-per-node 1 \
    --master-addr "$HEAD" --master-port "$PORT" "$@"
' launcher "$@"
