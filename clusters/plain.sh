#!/bin/sh
# Without a launcher: Lightning starts one process per GPU of the node. On node N of two with eight GPUs each:
#   HEAD=ADDRESS-OF-NODE-0 NODE_RANK=N sh clusters/plain.sh --config CONFIG \
#     --trainer.strategy fastft_ddp --trainer.devices 8 --data.paths train.jsonl
export NODE_RANK MASTER_ADDR="$HEAD" MASTER_PORT="${PORT:-29500}"
exec fastft fit --trainer.num_nodes "${NODES:-2}" --ckpt_path last "$@"
