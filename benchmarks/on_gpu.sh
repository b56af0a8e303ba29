#!/usr/bin/env bash
# What this project has hardly or never shown on a real GPU, what is worth most first, in calls of ten minutes:
#     benchmarks/on_gpu.sh OUT_FOLDER [SECONDS]     repeat until it says "nothing is left"
# (a) GPT-2 small in 24 GiB: the default search and eight plans by hand; (b) ResNet-50 in 12 GiB the same way;
# (c) predictions of all that these searches ran; (d) attention, offload, faults; (e) the tests marked cuda.
# On an H100 a search took 100 to 120 s, and 29 of the tests 300 s, most of it spent starting workers.
# Each step writes OUT_FOLDER/DATE-STEP.txt as it goes; one that failed is OUT_FOLDER/STEP.failed. Later calls skip both
# (RETRY=1: only what has a result), and a step begins only where its own limit ends within the call's SECONDS.
# It needs torch 2.11 with CUDA, but no network: where there is one, on the same Python,
#     grep -v '^torch==' constraints.txt > others.txt
#     python3 -m pip download --no-deps --only-binary :all: -d wheels -r others.txt setuptools wheel scipy
# makes the folder that WHEELS names. Without WHEELS nothing is installed.
# REHEARSAL=1 takes a tiny workload, few probes and ten times the limits, for an emulated card, whose times mean nothing:
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

searches=(gpt2_small=24GiB resnet50=12GiB) patience=1 storm=30 tested=tests
search=(--timeout 150)
if [[ ${REHEARSAL:-} ]]; then
    searches=(tiny_gpt=2GiB) patience=10 storm=3 tested=tests/devices/test_gpu_catalogue.py
    search=(--max-probes 2 --effort quick)
fi
searched() { # searched NAME LIMIT WORKLOAD OPTION...
    step "$1" "$2" python3 -m autofit search "benchmarks/workloads.py:$3" "${@:4}" --out "$out/$1.json"
}
checked() { # checked KIND LIMIT WORKLOAD=BUDGET: with the report of its search, where there is one
    local report="$out/search-${3%=*}.json"
    [[ ! -e $report ]] || step "$1-${3%=*}" "$2" python3 -m benchmarks.gpu_checks "$1" "${3%=*}" "${3#*=}" "$report"
}

for each in "${searches[@]}"; do # (a) and (b): an answer slower than a plan by hand is mended before anything else
    searched "search-${each%=*}" 180 "${each%=*}" --vram-budget "${each#*=}" "${search[@]}"
    checked by_hand 150 "$each"
done
for each in "${searches[@]}"; do # (c)
    checked predictions 60 "$each"
done
for strategy in attention offload; do # (d)
    searched "strategy-$strategy" 90 "${searches[0]%=*}" --strategies "$strategy" --max-probes 4
done
step faults 60 python3 -m benchmarks.gpu_checks faults --storm "$storm"
for file in $(grep -rl --include "test_*.py" "mark.cuda" "$tested"); do # (e)
    step "tests-$(basename "$file" .py)" 280 python3 -m pytest -v -m cuda -n 0 --durations 5 "$file"
done
echo "$left steps are left for another call" | sed 's/^0 .*/nothing is left/'
