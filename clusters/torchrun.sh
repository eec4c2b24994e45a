#!/bin/sh
# A fixed number of nodes with torchrun. On node N of two with eight GPUs each:
#   HEAD=ADDRESS-OF-NODE-0 NODE_RANK=N sh clusters/torchrun.sh --config CONFIG --trainer.strategy fastft_ddp \
#     --data.paths train.jsonl
exec torchrun --nnodes "${NODES:-2}" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-8}" \
  --master-addr "$HEAD" --master-port "${PORT:-29500}" \
  -m lightning_fastft fit --ckpt_path last "$@"
