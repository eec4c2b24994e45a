#!/usr/bin/env bash
# Published figures beside ours on one H200, in one call of BUDGET_S seconds; run from the repository root:
#   bash benchmarks/gpu_published.sh
# PARTS, in this order:
#   waits        device queries of a layer of experts and of a mask, and the layer's times
#   traditional  a padded loop of transformers + PEFT on a 7B Llama beside ours
#   dense        the optimisations on and off on DENSE, varlen attention
#   mixture      the same on MIXTURE: eight combinations, two more experts functions; takes what time is left
#   mask         DENSE once more, with the dense mask of the published experiment; only where time is left
# A call that follows in the same OUT and ROOT goes on where the last one ended: PARTS="mixture mask" after PARTS="waits traditional dense".
# OUT: folder that comes back (at most 7 files); ROOT: folder in memory, 33 GB; STEPS: timed steps of a case; DEVICE=cpu runs tiny shapes.
set -u
out=${OUT:-runs}
root=${ROOT:-/dev/shm/fastft}
budget=${BUDGET_S:-555}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
parts=${PARTS:-waits traditional dense mixture mask}
steps=${STEPS:-20}
if [ "$device" = cpu ]; then
  dense=${DENSE:-tiny} mixture=${MIXTURE:-tiny-moe} llama=tiny-llama attention=sdpa
else
  dense=${DENSE:-qwen3-0.6b-lora} mixture=${MIXTURE:-qwen3-30b-a3b-12l-lora} llama=llama-7b-lora attention=varlen
fi
mkdir -p "$out" "$root/runs/published"
left() { echo $((budget - SECONDS)); }
smaller() { [ "$1" -lt "$2" ] && echo "$1" || echo "$2"; }
# Cases of earlier calls, so that they are not repeated and stand in the tables.
[ -e "$root/runs/published/raw.jsonl" ] && cp "$root/runs/published/raw.jsonl" "$out/raw.jsonl"
rm -f "$out/table.txt"
{ date; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } >>"$out/driver.log" 2>&1
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used --format=csv,noheader -l 5 >"$out/clocks.csv" 2>/dev/null &
sampler=$!

# published SECONDS COMMAND OPTIONS...: nothing is started with less than 40 s.
published() {
  local seconds name=$2
  seconds=$(smaller "$1" $(($(left) - 12)))
  shift 2
  if [ "$seconds" -lt 40 ]; then
    echo "[$name $*: not started, $(left) s left]"
    return
  fi
  # The command ends its processes at its budget and writes its rows; the limit here is for one that does not.
  timeout -k 5 $((seconds + 8)) "$python" -m benchmarks.published "$name" --out "$out" --device "$device" --root "$root" --budget-s $((seconds - 8)) \
    "$@" >>"$out/driver.log" 2>&1
  echo "[$name $*: code $?, done at $SECONDS s]"
}
has() { case " $parts " in *" $1 "*) true ;; *) false ;; esac }

workloads=
has traditional && workloads="$workloads $llama"
if has dense || has mask; then workloads="$workloads $dense"; fi
has mixture && workloads="$workloads $mixture"
if [ -n "$workloads" ]; then
  # shellcheck disable=SC2086
  timeout -k 5 "$(smaller 200 "$(left)")" "$python" -m benchmarks.published build --root "$root" --device "$device" --workload $workloads \
    >>"$out/driver.log" 2>&1
  echo "[build$workloads: code $?, done at $SECONDS s]"
fi
has waits && published 75 waits --runs "$steps"
has traditional && published 210 traditional --workload "$llama" --steps "$(smaller 10 "$steps")" --arm-s 120
has dense && published 110 combinations --workload "$dense" --steps "$steps" --attention "$attention"
has mixture && published 400 combinations --workload "$mixture" --steps "$steps" --attention "$attention"
has mask && published 110 combinations --workload "$dense" --steps "$steps" --attention sdpa
kill "$sampler" 2>/dev/null
cp "$out/raw.jsonl" "$root/runs/published/raw.jsonl" 2>/dev/null
results=benchmarks/results.csv
[ -e "$out/rows.csv" ] && results="$results $out/rows.csv"
# shellcheck disable=SC2086
timeout 60 "$python" -m benchmarks.published table --results $results --out "$out/published.md" >>"$out/driver.log" 2>&1
# At most 8 files come back; the table last, because the reply carries the end of the output.
for file in "$out"/driver.log "$out"/log.txt; do
  [ -e "$file" ] && grep -aE '^(arm|case|judge|build)|Error|error:' "$file" | tail -n "${LINES_SHOWN:-15}" | cut -c1-220
done
echo "===== published: $SECONDS s ====="
if [ -e "$out/table.txt" ]; then cut -c1-230 "$out/table.txt"; else tail -n 15 "$out/driver.log" | cut -c1-400; fi
exit 0
