#!/bin/bash
# A heterogeneous job: two hosts of one kind and one of another, a launcher on each.
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
export NNODES RENDEZVOUS="$HEAD:$((15000 + SLURM_JOB_ID % 10000))"
# In a folder that all hosts see, and this user alone.
export KEY="$HOME/.elche-key-$SLURM_JOB_ID" CHECKPOINTS="$SLURM_SUBMIT_DIR/checkpoints"
(umask 077; openssl rand -hex 32 > "$KEY")
trap 'rm -f "$KEY"' EXIT

# SLURM_PROCID counts over both groups, one task to a host.
srun --het-group=0,1 bash -c '
  exec elche run --nnodes "$NNODES" --node-rank "$SLURM_PROCID" \
    --rendezvous "$RENDEZVOUS" --key-file "$KEY" \
    --checkpoint-dir "$CHECKPOINTS" --checkpoint-every 600 --resume \
    "$@"
' launcher "$@"
