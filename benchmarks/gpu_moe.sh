#!/usr/bin/env bash
# Mixtures of experts on one H200, in calls of under 560 s each; run from the repository root:
#   bash benchmarks/gpu_moe.sh layer    one layer of experts, both shapes: eager, grouped_mm, published, ours     LAYER_OPTIONS
#   bash benchmarks/gpu_moe.sh qwen3    whole steps of Qwen3-30B-A3B, packed, beside Unsloth                       repeat until no row is missing
#   bash benchmarks/gpu_moe.sh gptoss   whole steps of gpt-oss-20b, packed, beside Unsloth on padded batches
# WORKLOAD: another of the same family: its name with -skewed, -16k, -skewed-16k, or all layers (qwen3-30b-a3b-lora, gpt-oss-20b-lora).
# A call that follows while the machine is warm goes on where the last one ended: models, reference gradients and finished cases lie under ROOT.
# ARMS: arms of benchmarks.moe; PADDED: documents in Unsloth's batches; STEPS: timed steps; OUT: folder that comes back; BUDGET_S: seconds of this call.
set -u
call=${1:-layer}
out=${OUT:-runs}
root=${ROOT:-/dev/shm/fastft}
budget=${BUDGET_S:-535}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
steps=${STEPS:-30}
warmup=${WARMUP:-6}
mkdir -p "$out" "$root/runs/$call"
left() { echo $((budget - SECONDS)); }
# Cases of earlier calls, so that they are not repeated and stand in the table.
[ -e "$root/runs/$call/raw.jsonl" ] && cp "$root/runs/$call/raw.jsonl" "$out/raw.jsonl"
rm -f "$out/table.txt"
{ date; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } >>"$out/driver.log" 2>&1
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used --format=csv,noheader -l 5 >"$out/clocks.csv" 2>/dev/null &
sampler=$!

# whole WORKLOAD ARMS...
whole() {
  local workload=$1
  shift
  timeout "$(left)" "$python" -m benchmarks.train_step build --root "$root" --device "$device" --workload "$workload" \
    --grow-host-gib "${GROW_GIB:-8}" >>"$out/driver.log" 2>&1
  timeout $(($(left) + 10)) "$python" -m benchmarks.moe run --root "$root" --device "$device" --out "$out" --workload "$workload" --steps "$steps" \
    --warmup "$warmup" --budget-s $(($(left) - 15)) --arm-s "${ARM_S:-260}" --diagnose --arms "$@" >>"$out/driver.log" 2>&1
}

case $call in
layer)
  # shellcheck disable=SC2086
  timeout $(($(left) + 10)) "$python" -m benchmarks.moe_layer --out "$out" --device "$device" --runs "$steps" --budget-s $(($(left) - 40)) \
    ${LAYER_OPTIONS:-} >>"$out/driver.log" 2>&1
  ;;
qwen3)
  # shellcheck disable=SC2086
  whole "${WORKLOAD:-qwen3-30b-a3b-12l-lora}" ${ARMS:-plain:reference ours:recompute,keep unsloth:unsloth unsloth:off \
    plain:recompute,recompute+published,recompute+eager}
  ;;
gptoss)
  peers=
  for size in ${PADDED:-16 32 64}; do peers="$peers unsloth:unsloth+padded$size unsloth:off+padded$size"; done
  # Eager attention builds every score of a pack, which 16,384 tokens have no room for.
  workload=${WORKLOAD:-gpt-oss-20b-12l-lora}
  flex=$(case $workload in *-16k) echo +flex ;; esac)
  # shellcheck disable=SC2086
  whole "$workload" ${ARMS:-plain:reference$flex ours:recompute,keep $peers \
    plain:recompute+grouped_mm+flex,recompute+published+flex,recompute+eager+flex}
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
  [ -e "$file" ] && grep -aE '^(arm|case|judge|build|unsloth trains)|Error|error:' "$file" | tail -n "${LINES_SHOWN:-25}" | cut -c1-300
done
echo "===== ${call}: $SECONDS s ====="
if [ -e "$out/table.txt" ]; then cat "$out/table.txt"; else tail -n 15 "$out/driver.log" | cut -c1-400; fi
exit 0
