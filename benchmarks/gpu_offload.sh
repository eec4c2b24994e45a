#!/usr/bin/env bash
# Activation offload on H200s, in calls of under 560 s each; run from the repository root:
#   bash benchmarks/gpu_offload.sh front     14B, 8,192 tokens: our ends, budgets between them, Unsloth's ends       FUSED=1 or LIGER=1: those layers
#   bash benchmarks/gpu_offload.sh front16   the same at 16,384 tokens, with Liger's layers, without which keep all does not fit
#   bash benchmarks/gpu_offload.sh buffers   8B, 14B, 32B: two staging buffers, one, plain recompute                 CELLS, STEPS
#   bash benchmarks/gpu_offload.sh overlap   0.6B and 14B: copies under compute, late host, control on one stream    CELLS
#   bash benchmarks/gpu_offload.sh cards     8B, 14B, 32B under caps of 8, 12, 24 GiB                                CARDS, MODES: the first that trains counts
#   bash benchmarks/gpu_offload.sh multi     two GPUs: 8B LoRA on one, DDP and FSDP2 on two                          needs 2 GPUs
#   bash benchmarks/gpu_offload.sh full32b   four GPUs: 32B, every weight trained, built in shards                   needs 4 GPUs
# A call that follows while the machine is warm goes on where the last one ended: models, reference gradients and finished runs lie under ROOT.
# OUT: folder that comes back; BUDGET_S: seconds for this call, the setup before it excluded; STEPS: timed steps (a longer list of cells needs fewer).
set -u
call=${1:-front}
out=${OUT:-runs}
root=${ROOT:-/dev/shm/fastft}
budget=${BUDGET_S:-535}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
steps=${STEPS:-10}
host=${HOST_GIB:-24}
mkdir -p "$out" "$root/runs/$call"
left() { echo $((budget - SECONDS)); }
# Runs of earlier calls, so that they are not repeated and stand in the table.
[ -e "$root/runs/$call/raw.jsonl" ] && cp "$root/runs/$call/raw.jsonl" "$out/raw.jsonl"
rm -f "$out/table.txt"
offload() {
  local name=$1
  shift
  timeout $(($(left) + 10)) "$python" -m benchmarks.offload "$name" --out "$out" --device "$device" --steps "$steps" --budget-s $(($(left) - 15)) "$@" \
    >>"$out/driver.log" 2>&1
}
{ date; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } >>"$out/driver.log" 2>&1
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used --format=csv,noheader -l 5 >"$out/clocks.csv" 2>/dev/null &
sampler=$!

front() {
  local workload=$1
  shift
  timeout "$(left)" "$python" -m benchmarks.train_step build --root "$root" --device "$device" --workload "$workload" \
    --grow-host-gib "${GROW_GIB:-$host}" >>"$out/driver.log" 2>&1
  # shellcheck disable=SC2086
  offload front --root "$root" --workload "$workload" --host-gib "$host" --num-budgets "${NUM_BUDGETS:-7}" \
    ${BUDGETS_GIB:+--budgets-gib $BUDGETS_GIB} --extra-modes $EXTRA_MODES --peers ${PEERS-unsloth:unsloth unsloth:off} "$@"
}

case $call in
front)
  EXTRA_MODES=${EXTRA_MODES-}
  front "${WORKLOAD:-qwen3-14b-qlora}" ${LIGER:+--liger "${WORKLOAD:-qwen3-14b-qlora}"} \
    ${FUSED:+--fused "${WORKLOAD:-qwen3-14b-qlora}"} ${OPTIMIZER:+--optimizer "$OPTIMIZER"}
  ;;
front16)
  EXTRA_MODES=${EXTRA_MODES-auto=5.9:$host+liger+stream recompute:$host+liger+stream+tiles8}
  front "${WORKLOAD:-qwen3-14b-qlora-16k}" --liger ${LIGER-"${WORKLOAD:-qwen3-14b-qlora-16k}"}
  ;;
buffers)
  # shellcheck disable=SC2086
  offload buffers --cells ${CELLS:-qwen3-8b-qlora@16384 qwen3-14b-qlora@16384 qwen3-32b-qlora@16384 qwen3-8b-qlora@49152}
  ;;
overlap)
  # shellcheck disable=SC2086
  offload overlap --cells ${CELLS:-qwen3-0.6b-lora@8192 qwen3-14b-qlora@16384}
  ;;
cards)
  # A process each: the cap holds from the first byte on.
  for card in ${CARDS:-qwen3-8b-qlora=8 qwen3-14b-qlora=12 qwen3-32b-qlora=24}; do
    # shellcheck disable=SC2086
    offload small-cards --cards "$card" --tokens "${TOKENS:-8192}" --modes ${MODES:-auto:64+fused auto:64+fused+stream+tiles8}
  done
  ;;
multi | full32b)
  [ "$call" = multi ] && steps=${STEPS:-30} || steps=${STEPS:-20}
  # shellcheck disable=SC2086
  timeout $(($(left) + 10)) "$python" -m benchmarks.multi_gpu "$call" --out "$out" --device "$device" --steps "$steps" --budget-s $(($(left) - 15)) \
    ${MULTI_OPTIONS:-} >>"$out/driver.log" 2>&1
  ;;
*)
  echo "unknown call: $call" >&2
  kill "$sampler" 2>/dev/null
  exit 2
  ;;
esac
kill "$sampler" 2>/dev/null
cp "$out/raw.jsonl" "$root/runs/$call/raw.jsonl" 2>/dev/null
# At most 8 files come back; the table last, because the reply carries the end of the output.
for file in "$out"/driver.log "$out"/log.txt; do
  [ -e "$file" ] && grep -aE '^(arm|run|case|judge|build):|Error|error:' "$file" | tail -n "${LINES_SHOWN:-40}" | cut -c1-260
done
echo "===== ${call}: $SECONDS s ====="
if [ -e "$out/table.txt" ]; then cat "$out/table.txt"; else tail -n 15 "$out/driver.log" | cut -c1-400; fi
exit 0
