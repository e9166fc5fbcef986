#!/usr/bin/env bash
# What only a GPU can show: the kernels on it, parity with the CPU in fp32, bf16 and fp16, ranks that
# share it at every ZeRO stage, and how fast it trains. Writes one JSON file with device, driver,
# commit and command. Fails when a check fails; the file is written all the same and says which.
#
#   benches/gpu.sh                 builds and runs
#   benches/gpu.sh --build-only    leaves everything that a run needs in target/gpu
#   benches/gpu.sh --run-only      needs that folder, bash and awk, but neither Rust nor the sources
#
#   --backend NAME   cuda (default), wgpu or flex
#   --bundle DIR     instead of target/gpu
#   --output FILE    instead of benches/results/gpu-<device>.json
#   --quick          throughput of the tiny model alone: to try the script itself
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}

command_line="benches/gpu.sh $*"
root=$(cd "$(dirname "$0")/.." && pwd)
backend=cuda bundle=$root/target/gpu output='' builds=1 runs=1 quick=0
while [ $# -gt 0 ]; do
    case $1 in
        --build-only) runs=0 ;;
        --run-only) builds=0 ;;
        --quick) quick=1 ;;
        --backend | --bundle | --output)
            [ $# -gt 1 ] || fail "$1 needs a value"
            case $1 in
                --backend) backend=$2 ;;
                --bundle) bundle=$2 ;;
                --output) output=$2 ;;
            esac
            shift
            ;;
        *) fail "unknown option $1; the head of $0 lists them" ;;
    esac
    shift
done
case $backend in
    cuda | wgpu | flex) ;;
    *) fail "--backend $backend: use cuda, wgpu or flex" ;;
esac

# ---------------------------------------------------------------------------------------- build

# The path of the executable that a cargo command with JSON messages names last.
executable() {
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

build() {
    cd "$root"
    rm -rf "$bundle"
    mkdir -p "$bundle/tiny"
    local features=() program kernels
    [ "$backend" = flex ] || features=(--features "$backend")
    program=$(cargo build --release --workspace --bin finetune "${features[@]}" \
        --message-format json-render-diagnostics | executable)
    cp "$program" "$bundle/finetune"
    if [ "$backend" != flex ]; then
        kernels=$(cargo test --no-run --release --package deepburn-kernels --test cube \
            "${features[@]}" --message-format json-render-diagnostics | executable)
        cp "$kernels" "$bundle/kernels"
    fi
    cp models/tests/data/tiny/*.{json,safetensors} "$bundle/tiny/"
    cp crates/deepburn-cli/tests/data/tokens.bin "$bundle/"
    cp "${BASH_SOURCE[0]}" "$bundle/gpu.sh"
    {
        git rev-parse HEAD
        [ -z "$(git status --porcelain --untracked-files=no)" ] || echo '(with changes)'
    } | paste -sd ' ' > "$bundle/commit"
    echo "$backend" > "$bundle/backend"
}

# ------------------------------------------------------------------------------------------ run

failures=0

# Counts a check that failed and says what it was.
check() {
    if [ "$1" != true ]; then
        failures=$((failures + 1))
        echo "FAILED: $2" >&2
    fi
}

# Text as a JSON string.
quoted() {
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

# Joins lines with commas.
listed() {
    paste -sd , -
}

# Trains into $work/$1 on backend $2 with the rest as further arguments; shows what went wrong.
train() {
    local name=$1 on=$2
    shift 2
    "$bundle/finetune" --config "$work/job.json" --backend "$on" --output-dir "$work/$name" "$@" \
        > "$work/$name.log" 2>&1 && return
    tail -n 5 "$work/$name.log" >&2
    return 1
}

# The values of field $2 in the metrics of run $1, a line each.
column() {
    sed -n "s/.*\"$2\":\([^,}]*\).*/\1/p" "$work/$1/metrics.jsonl"
}

# The largest difference of the losses of two runs; "null" where they differ in length.
largest_difference() {
    paste <(column "$1" loss) <(column "$2" loss) | awk '
        NF != 2 || $1 == "null" || $2 == "null" { broken = 1; next }
        { d = $1 - $2; if (d < 0) d = -d; if (d > most) most = d }
        END { if (broken || NR == 0) print "null"; else printf "%.3g\n", most }'
}

# The median of the numbers read, without the first three: kernels are compiled on first use.
median() {
    tail -n +4 | sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)]; else print "null" }'
}

# Arguments that select a precision.
precision() {
    case $1 in
        fp32) ;;
        bf16) echo --set deepspeed.bf16.enabled=true ;;
        # A scale that the tiny model's gradients bear, so that no step is skipped.
        fp16) echo --set deepspeed.fp16.enabled=true --set deepspeed.fp16.initial_scale_power=12 ;;
    esac
}

# At most this much may a loss differ from flex's: two orders of addition in fp32, and the last bits
# of 8 and of 11 that bf16 and fp16 have, over twelve steps on losses of about 6.
tolerance() {
    case $1 in
        fp32) echo 1e-4 ;;
        bf16) echo 5e-3 ;;
        fp16) echo 3e-3 ;;
    esac
}

kernels() {
    local passed=0 ok=true
    if [ ! -x "$bundle/kernels" ]; then
        echo null
        return
    fi
    "$bundle/kernels" --test-threads 1 --nocapture > "$work/kernels.log" 2>&1 || ok=false
    passed=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$work/kernels.log")
    [ "$ok" = true ] || grep -E 'panicked|FAILED' "$work/kernels.log" >&2 || true
    echo "{\"passed\":${passed:-0},\"ok\":$ok,\"types\":$(quoted \
        "$(sed -n 's/.*types of this device: //p' "$work/kernels.log" | head -n 1)")}"
}

parity() {
    local kind difference ok
    for kind in fp32 bf16 fp16; do
        local -a flags
        read -ra flags <<< "$(precision $kind)"
        difference=null
        if train "flex-$kind" flex "${flags[@]}" && train "device-$kind" "$backend" "${flags[@]}"; then
            difference=$(largest_difference "flex-$kind" "device-$kind")
        fi
        ok=$(awk -v d="$difference" -v t="$(tolerance $kind)" \
            'BEGIN { print (d != "null" && d + 0 <= t + 0) ? "true" : "false" }')
        echo "{\"precision\":\"$kind\",\"steps\":12,\"largest_loss_difference\":$difference,$(
        )\"tolerance\":$(tolerance $kind),\"ok\":$ok}"
    done
}

ranks() {
    local kind count stage name same
    for kind in fp32 bf16; do
        local -a flags
        read -ra flags <<< "$(precision $kind)"
        for count in 2 4; do
            for stage in 0 1 2 3; do
                name=ranks-$kind-$count-$stage same=false
                if train "$name" "$backend" --ranks $count "${flags[@]}" \
                    --set deepspeed.zero_optimization.stage=$stage &&
                    cmp -s <(column "$name" loss) <(column "ranks-$kind-$count-0" loss) &&
                    cmp -s "$work/$name/model/model.safetensors" \
                        "$work/ranks-$kind-$count-0/model/model.safetensors"; then
                    same=true
                fi
                echo "{\"precision\":\"$kind\",\"ranks\":$count,\"stage\":$stage,$(
                )\"loss\":$(column "$name" loss 2> /dev/null | tail -n 1 | grep . || echo null),$(
                )\"same_bits_as_stage_0\":$same}"
            done
        done
    done
}

# One row of the table: $1 precision, $2 ranks, $3 ZeRO stage, $4 sequences, $5 tokens of each.
throughput_of() {
    local name=speed-$1-$2-$3-$4x$5 speed=null seconds=null
    local -a flags model=(--set model.pretrained=null)
    read -ra flags <<< "$(precision "$1")"
    [ $quick = 0 ] || model=()
    if train "$name" "$backend" "${flags[@]}" "${model[@]}" --ranks "$2" \
        --set training.max_steps=20 --set data.sequence_length="$5" \
        --set deepspeed.zero_optimization.stage="$3" \
        --set deepspeed.train_micro_batch_size_per_gpu="$4"; then
        speed=$(column "$name" tokens_per_second | median)
        seconds=$(column "$name" step_seconds | median)
    fi
    printf '%-6s %5s %5s %9s %12s %12s\n' "$1" "$2" "$3" "$4x$5" "$seconds" "$speed" >&2
    echo "{\"precision\":\"$1\",\"ranks\":$2,\"stage\":$3,\"micro_batch\":$4,$(
    )\"sequence_length\":$5,\"step_seconds\":$seconds,\"tokens_per_second\":$speed}"
}

throughput() {
    local kind
    printf '%-6s %5s %5s %9s %12s %12s\n' kind ranks stage batch 's/step' 'tokens/s' >&2
    for kind in fp32 bf16 fp16; do
        if [ $quick = 1 ]; then
            throughput_of $kind 1 0 4 32
            continue
        fi
        throughput_of $kind 1 0 4 128
        throughput_of $kind 1 0 8 1024
        throughput_of $kind 2 3 4 1024
    done
}

# Name and driver of the device.
device() {
    case $backend in
        cuda) nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 ;;
        wgpu)
            (vulkaninfo --summary 2> /dev/null || true) |
                sed -n 's/^\s*deviceName\s*= //p' | grep -m 1 . || echo 'a wgpu device'
            ;;
        flex) sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1 ;;
    esac
}

driver() {
    case $backend in
        cuda) nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1 ;;
        wgpu)
            (vulkaninfo --summary 2> /dev/null || true) |
                sed -n 's/^\s*driverInfo\s*= //p' | grep -m 1 . || echo unknown
            ;;
        flex) uname -sr ;;
    esac
}

job() {
    cat << JSON
{
  "model": { "pretrained": "$bundle/tiny",
             "config": { "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0 } },
  "data": { "kind": "tokens", "path": "$bundle/tokens.bin", "sequence_length": 32, "shuffle": false },
  "training": { "max_steps": 12, "seed": 1 },
  "deepspeed": {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": { "type": "AdamW", "params": { "lr": 1e-3, "weight_decay": 0.1 } },
    "gradient_clipping": 1.0,
    "zero_optimization": { "stage": 0 }
  }
}
JSON
}

run() {
    [ -x "$bundle/finetune" ] || fail "$bundle has no finetune; run $0 --build-only first"
    local built
    built=$(cat "$bundle/backend")
    [ "$built" = "$backend" ] || fail "$bundle was built for $built, not $backend"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    job > "$work/job.json"
    local name ok
    name=$(device)
    if [ -z "$output" ]; then
        mkdir -p "$root/benches/results"
        output=$root/benches/results/gpu-$(echo "$name" | tr -cs 'A-Za-z0-9\n' - | sed 's/-*$//').json
    fi
    echo "on $name" >&2
    echo '--- kernels' >&2 && kernels > "$work/kernels.json"
    echo '--- parity with flex' >&2 && parity > "$work/parity.json"
    echo '--- ranks that share the device' >&2 && ranks > "$work/ranks.json"
    echo '--- throughput' >&2 && throughput > "$work/throughput.json"
    for section in kernels parity ranks; do
        while read -r row; do
            ok=true
            case $row in *'"ok":false'* | *'"same_bits_as_stage_0":false'*) ok=false ;; esac
            check $ok "$section: $row"
        done < "$work/$section.json"
    done
    {
        echo "{\"device\":$(quoted "$name"),"
        echo " \"driver\":$(quoted "$(driver)"),"
        echo " \"backend\":\"$backend\","
        echo " \"commit\":$(quoted "$(cat "$bundle/commit")"),"
        echo " \"command\":$(quoted "$command_line"),"
        echo " \"date\":\"$(date -u +%Y-%m-%dT%H:%M:%SZ)\","
        echo " \"failed_checks\":$failures,"
        echo " \"kernels\":$(cat "$work/kernels.json"),"
        for section in parity ranks throughput; do
            echo " \"$section\":["
            sed 's/^/  /; $!s/$/,/' "$work/$section.json"
            [ $section = throughput ] && echo ' ]' || echo ' ],'
        done
        echo '}'
    } > "$output.partial"
    mv "$output.partial" "$output"
    echo "results are in $output" >&2
    [ $failures = 0 ] || fail "$failures checks failed"
}

[ $builds = 0 ] || build
[ $runs = 0 ] || run
