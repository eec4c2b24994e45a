#!/usr/bin/env bash
# The published measurements on one H200, in calls of under 560 s each; run from the repository root:
#   bash benchmarks/gpu_session.sh main      14B: plain and ours on all labels (the bars)                      about 420 s
#   bash benchmarks/gpu_session.sh peers     14B: Unsloth and TRL; builds again on a fresh machine             about 420 s
#   bash benchmarks/gpu_session.sh metadata  14B: metadata built in every layer or once; then the small models  about 480 s
#   bash benchmarks/gpu_session.sh small     0.6B and 1B: every system, labels 100 % and 30 %                   about 480 s
# Calls that follow within seconds find what the last one left in memory (models, reference gradients).
# OUT: folder that comes back; BUDGET_S: seconds for this call, the setup before it excluded; ROOT: folder in memory.
set -u
call=${1:-main}
out=${OUT:-runs}
root=${ROOT:-/dev/shm/fastft}
budget=${BUDGET_S:-530}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
steps=${STEPS:-30}
big=${BIG:-qwen3-14b-qlora}
smalls=${SMALLS:-qwen3-0.6b-lora llama-3.2-1b-lora}
mkdir -p "$out"
left() { echo $((budget - SECONDS)); }
build() { timeout "$(left)" "$python" -m benchmarks.train_step build --root "$root" --device "$device" --workload "$@" 2>>"$out/build.log"; }
# ruler WORKLOAD SECONDS ARMS...
ruler() {
  local workload=$1 seconds=$2
  shift 2
  timeout $((seconds + 15)) "$python" -m benchmarks.train_step run --root "$root" --device "$device" --out "$out" --workload "$workload" \
    --steps "$steps" --budget-s "$seconds" --arm-s 230 --diagnose --arms "$@" >>"$out/driver.log" 2>&1
  echo "[$workload done at $SECONDS s]"
}
metadata() {
  local workload=$1 seconds=$2
  shift 2
  timeout $((seconds + 20)) "$python" -m benchmarks.packed_metadata --root "$root" --device "$device" --out "$out" --workload "$workload" \
    --steps "$steps" --budget-s "$seconds" "$@" >>"$out/driver.log" 2>&1
  echo "[metadata $workload done at $SECONDS s]"
}
# Plain's gradients are needed by every other arm; a machine that still has them does not make them again.
reference() { [ -e "$root/$1/reference_gradients_1.safetensors" ] || echo plain:reference,reference@0.3; }
{ date; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } >>"$out/driver.log" 2>&1
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used --format=csv,noheader -l 5 >"$out/clocks.csv" 2>/dev/null &
sampler=$!

case $call in
main)
  build "$big"
  ruler "$big" $(($(left) - 20)) plain:recompute,keep+liger,reference@0.3 ours:recompute+liger,keep+liger \
    ours:keep+liger@0.3,keep,recompute ours:keep+liger/adamw_fused
  ;;
peers)
  build "$big" --grow-host-gib "${GROW_GIB:-16}"
  # shellcheck disable=SC2046
  ruler "$big" $(($(left) - 20)) $(reference "$big") unsloth:unsloth unsloth:off,off@0.3 trl:recompute+liger unsloth:skip-auto
  ;;
metadata)
  build "$big" $smalls
  # shellcheck disable=SC2086
  metadata "$big" $((($(left) - 40) * 6 / 10)) --build-tokens ${BUILD_TOKENS:-2048 8192 32768} --arms varlen/once sdpa/once sdpa/every-layer-loop varlen/every-layer sdpa/every-layer flex/once flex/every-layer
  for workload in $smalls; do
    metadata "$workload" $((($(left) - 30) / 2)) --build-tokens ${BUILD_TOKENS:-8192} --arms varlen/once sdpa/once sdpa/every-layer-loop varlen/every-layer \
      sdpa/every-layer-transformers flex/once flex/every-layer flex/every-layer-transformers
  done
  ;;
small)
  # shellcheck disable=SC2086
  build $smalls --grow-host-gib "${GROW_GIB:-8}"
  for workload in $smalls; do
    ruler "$workload" $((($(left) - 20) / 2)) plain:recompute,recompute@0.3,keep+liger,keep+liger@0.3 ours:keep+liger,keep+liger@0.3,recompute+liger,keep \
      unsloth:off,off@0.3 unsloth:unsloth trl:keep+liger
  done
  ;;
*)
  echo "unknown call: $call" >&2
  exit 2
  ;;
esac
kill "$sampler" 2>/dev/null
# At most 8 files come back; the tables last, because the reply carries the end of the output.
for file in "$out"/driver.log "$out"/build.log; do [ -e "$file" ] && grep -aE '^arm:|Error|error:' "$file" | tail -n 20 | cut -c1-300; done
echo "===== ${call}: $SECONDS s ====="
"$python" -m benchmarks.train_step table "$out/raw.jsonl" 2>/dev/null
[ "$call" = metadata ] && cat "$out/table.txt"
exit 0
