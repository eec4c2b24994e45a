#!/bin/bash
# Two nodes with eight GPUs each under SLURM; the job is requeued before its time limit, and after a failure.
#   sbatch --gpus-per-node=8 clusters/slurm.sh --config CONFIG --trainer.strategy fastft_ddp --data.paths train.jsonl
#SBATCH --nodes=2 --ntasks-per-node=8 --time=24:00:00
#SBATCH --signal=USR1@120 --requeue --open-mode=append

srun --kill-on-bad-exit=1 python -m lightning_fastft fit --ckpt_path last "$@"
code=$?
# After USR1 the run has requeued the job itself (exit code 138). After other failures requeue it, at most ten times.
if [ "$code" -ne 0 ] && [ "$code" -ne 138 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
