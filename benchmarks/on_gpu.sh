#!/usr/bin/env bash
# What this project has never shown on a GPU, in the order of worth, in calls of ten minutes:
#     benchmarks/on_gpu.sh PART OUT_FOLDER        PART: 1 tests, 2 gpt2_small, 3 resnet50, 4 the rest
# Each step writes a file into OUT_FOLDER as it goes; one that failed is OUT_FOLDER/STEP.failed, and the next goes on.
# A repeated call skips the steps that have a result. It needs Python 3.12 and torch 2.11 with CUDA, but no network:
#     python3 -m pip download --only-binary :all: -d wheels "numpy>=2" "msgspec>=0.22" "optuna>=5" \
#         "sqlalchemy>=2" "cloudpickle>=3" pytest pytest-timeout pytest-xdist setuptools wheel
# on the same kind of machine makes the folder that WHEELS names; without WHEELS nothing is installed.
# REHEARSAL=1 takes tiny workloads and few probes, for an emulated card, whose times mean nothing.
set -euo pipefail

part=${1:?PART: 1, 2, 3 or 4} out=${2:?OUT_FOLDER}
mkdir -p "$out"
out=$(cd "$out" && pwd)
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
cd "$(dirname "$0")/.."
workloads=benchmarks/workloads.py

if [[ $wheels ]]; then
    python3 -m pip install -q --no-index --find-links "$wheels" numpy msgspec optuna sqlalchemy cloudpickle \
        pytest pytest-timeout pytest-xdist setuptools wheel
    python3 -m pip install -q --no-deps --no-build-isolation -e .
fi

step() { # step NAME SECONDS COMMAND...: the command's output is the result, under a head that says where and when
    local name=$1 seconds=$2 result code=0
    shift 2
    for result in "$out/"*"-$name.txt"; do
        if [[ -s $result ]]; then echo "$name: has a result"; return; fi
    done
    result=$out/$(date -u +%F)-$name.txt
    {
        date -u +%FT%TZ
        python3 -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name(),
            torch.cuda.get_device_properties(0).total_memory, "bytes")' || true
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 || true
        echo "rehearsal: ${REHEARSAL:-no}; commit: $(git rev-parse --short HEAD 2>/dev/null || true)"
        echo "\$ $*"
    } >"$out/$name.running"
    timeout --kill-after 10 "$seconds" "$@" >>"$out/$name.running" 2>&1 || code=$?
    echo "exit code $code, $(date -u +%FT%TZ)" >>"$out/$name.running"
    if ((code == 0)); then
        mv "$out/$name.running" "$result"
        rm -f "$out/$name.failed"
    else
        mv "$out/$name.running" "$out/$name.failed"
    fi
    echo "$name: exit code $code"
}

search() { # search WORKLOAD BUDGET
    local name=$1 budget=$2 limits=(--timeout 240)
    if [[ ${REHEARSAL:-} ]]; then limits=(--timeout 90 --max-probes 2 --effort quick); fi
    step "search-$name" 280 autofit search "$workloads:$name" --vram-budget "$budget" "${limits[@]}" \
        --out "$out/search-$name.json"
    step "search-$name-planned" 300 autofit search "$workloads:$name" --vram-budget "$budget" "${limits[@]}" \
        --planned-steps 20000 --out "$out/search-$name-planned.json"
}

case $part in
1) step tests 580 python3 -m pytest -m cuda -n 0 --junitxml "$out/tests.xml" tests ;;
2) if [[ ${REHEARSAL:-} ]]; then search tiny_gpt 2GiB; else search gpt2_small 24GiB; fi ;;
3) if [[ ${REHEARSAL:-} ]]; then search tiny_resnet 2GiB; else search resnet50 12GiB; fi ;;
4)
    names=(gpt2_small resnet50 vit unet lstm mlp) batches=(1 4) limits=(--timeout 100 --max-probes 4)
    if [[ ${REHEARSAL:-} ]]; then
        names=(tiny_gpt) batches=(1) limits=(--timeout 90 --max-probes 2 --effort quick)
    fi
    for name in "${names[@]}"; do
        for batch in "${batches[@]}"; do
            plan=("$workloads:$name" --micro-batch "$batch" --json)
            step "predict-$name-$batch" 60 autofit predict "${plan[@]}" --gpu 80GiB
            step "probe-$name-$batch" 60 autofit probe "${plan[@]}"
        done
    done
    for strategy in attention head_loss; do
        step "strategy-$strategy" 120 autofit search "$workloads:${names[0]}" --strategies "$strategy" \
            "${limits[@]}" --out "$out/strategy-$strategy.json"
    done
    ;;
*) echo "PART is 1, 2, 3 or 4" >&2 && exit 2 ;;
esac
