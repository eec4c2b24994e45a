#!/bin/sh
# One or two nodes with torchrun: the job continues without a lost node and readmits it. Run this line on every node:
#   HEAD=ADDRESS-OF-NODE-0 sh clusters/elastic.sh --config CONFIG --trainer.strategy fastft_ddp --data.paths train.jsonl
# Without this, a node that joins later waits for an address that the others never write (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "${NODES:-1:2}" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-10}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id fastft --rdzv-conf "${RDZV:-join_timeout=600}" \
  -m lightning_fastft fit --ckpt_path last "$@"
