#!/usr/bin/env bash
# What this project has hardly or never shown on a real GPU, what is worth most first, in calls of ten minutes:
#     benchmarks/on_gpu.sh OUT_FOLDER [SECONDS]     repeat until it says "nothing is left"
# On an H100 a search took 100 to 120 s, and 29 of the tests 300 s, most of it spent starting workers.
# Each step writes OUT_FOLDER/DATE-STEP.txt as it goes; one that failed is OUT_FOLDER/STEP.failed. Later calls skip both
# (RETRY=1: only what has a result), and a step begins only where its own limit ends within the call's SECONDS.
# It needs torch 2.11 with CUDA, but no network: where there is one, on the same Python,
#     grep -v '^torch==' constraints.txt > others.txt
#     python3 -m pip download --no-deps --only-binary :all: -d wheels -r others.txt setuptools wheel scipy batch-finder autovram
# makes the folder that WHEELS names. Without WHEELS nothing is installed.
# REHEARSAL=1 takes tiny workloads, few probes and ten times the limits, for an emulated card, whose times mean nothing:
#     REHEARSAL=1 emulated-gpu run -- benchmarks/on_gpu.sh OUT_FOLDER 6000
# tests/benchmarks/test_on_gpu.py does so in CI.
set -euo pipefail

out=${1:?OUT_FOLDER} seconds=${2:-590}
mkdir -p "$out"
out=$(cd "$out" && pwd)
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
cd "$(dirname "$0")/.."

if [[ $wheels && ! -e $out/installed ]]; then
    python3 -m pip install -q --no-index --no-deps "$wheels"/*.whl
    python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . -e ./emulated_gpu
    touch "$out/installed"
fi

machine=$(
    python3 -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name(),
        torch.cuda.get_device_properties(0).total_memory, "bytes")' || true
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 || true
    echo "rehearsal: ${REHEARSAL:-no}; commit: $(git rev-parse --short HEAD 2> /dev/null || true)"
)
left=0
step() { # step NAME LIMIT_S COMMAND...: the command's output is the result, under a head that says where and when
    local name=$1 limit=$((patience * $2)) code=0
    shift 2
    compgen -G "$out/*-$name.txt" > /dev/null && return
    [[ -e $out/$name.failed && ! ${RETRY:-} ]] && return
    if ((SECONDS + limit > seconds)); then
        left=$((left + 1))
        return
    fi
    printf '%s\n%s\n$ %s\n' "$(date -u +%FT%TZ)" "$machine" "$*" > "$out/$name.running"
    rm -f "$out/$name.failed"
    timeout --signal INT --kill-after 10 "$limit" "$@" >> "$out/$name.running" 2>&1 || code=$?
    echo "exit code $code, $(date -u +%FT%TZ)" >> "$out/$name.running"
    echo "$name: exit code $code"
    if ((code == 0)); then
        mv "$out/$name.running" "$out/$(date -u +%F)-$name.txt"
    else
        mv "$out/$name.running" "$out/$name.failed"
    fi
}

workloads=(gpt2_small=24GiB resnet50=12GiB) predicted=(gpt2_small resnet50 vit unet lstm mlp) sizes=(1 2 4 8 16)
search=(--timeout 130) planned=20000 storm=30 tested=tests
versus=(--steps 20 --timed-steps 4 --repeats 1 --limit 110 --precisions bfloat16)
versus+=(--only "accelerate find_executable_batch_size" autofit)
patience=1
if [[ ${REHEARSAL:-} ]]; then
    workloads=(tiny_mlp=2GiB) predicted=(tiny_gpt) sizes=(1 2) storm=3 patience=10
    search=(--max-probes 2 --effort quick) planned=20
    versus=(--steps 2 --timed-steps 2 --repeats 1 --limit 60 --precisions float32)
    versus+=(--only "rule of Composer, halving")
    tested=tests/devices/test_gpu_catalogue.py
fi

searched() { # searched NAME WORKLOAD OPTION...
    step "$1" 160 python3 -m autofit search "benchmarks/workloads.py:$2" "${@:3}" "${search[@]}" --out "$out/$1.json"
}

for each in "${workloads[@]}"; do
    searched "search-${each%=*}" "${each%=*}" --vram-budget "${each#*=}"
done
step faults 60 python3 -m benchmarks.gpu_checks faults --storm "$storm"
for name in "${predicted[@]}"; do
    step "predictions-$name" 60 python3 -m benchmarks.gpu_checks predictions "$name" --micro-batches "${sizes[@]}"
done
for each in "${workloads[@]}"; do
    step "peers-${each%=*}" 290 python3 -m benchmarks.versus --place cuda "${versus[@]}" \
        --json "$out/peers-${each%=*}.json" "$each"
    searched "search-${each%=*}-planned" "${each%=*}" --vram-budget "${each#*=}" --planned-steps "$planned"
done
for strategy in attention head_loss; do
    searched "strategy-$strategy" "${predicted[0]}" --strategies "$strategy" --max-probes 4
done
for file in $(grep -rl --include "test_*.py" "mark.cuda" "$tested"); do
    step "tests-$(basename "$file" .py)" 280 python3 -m pytest -v -m cuda -n 0 --durations 5 "$file"
done
echo "$left steps are left for another call" | sed 's/^0 .*/nothing is left/'
