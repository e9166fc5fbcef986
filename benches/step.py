#!/usr/bin/env python3
"""Compares a training step of GPT-2 124M, 4 x 128 tokens, one rank, with eager PyTorch.

Runs both in turn, `rounds` times, and prints each round, the median of the ratios of their times and
the larger peak memory of each. The first two steps of a run are not counted. Needs a `python` on the
PATH that has torch and transformers, and a release build of `finetune`.

    cargo build --release && python benches/step.py [--rounds 3]

With LibTorch, PyTorch's own (`--bf16`: weights and optimizer state of PyTorch in bf16, and here f32
masters beside bf16 weights):

    export LIBTORCH_USE_PYTORCH=1
    export LD_LIBRARY_PATH=$(python -c 'import torch; print(torch.__path__[0] + "/lib")')
    cargo build --release --features deepburn-cli/tch
    python benches/step.py --backend tch [--bf16]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = {
    "data.sequence_length": 128,
    "training.ranks": 1,
    "deepspeed.train_micro_batch_size_per_gpu": 4,
    "deepspeed.gradient_accumulation_steps": 1,
    "deepspeed.zero_optimization.stage": 0,
}


def ours(binary, steps, backend, bf16):
    """Seconds of each step, and the process's peak memory in bytes."""
    with tempfile.TemporaryDirectory() as output:
        settings = SETTINGS | {"training.max_steps": steps, "training.backend": backend}
        if bf16:
            settings["deepspeed.bf16.enabled"] = "true"
        command = [binary, "--config", "gpt2.json", "--output-dir", output]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        # A process of its own, whose only child is the run: so the peak is the run's.
        measure = (
            "import resource, subprocess, sys;"
            "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        done = output_of(["python", "-c", measure, *command])
        rows = pathlib.Path(output, "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(row)["step_seconds"] for row in rows]
    return seconds, int(done) * 1024


def peer(steps, bf16):
    """The same of PyTorch."""
    command = ["python", ROOT / "benches/peer_step.py", "--steps", str(steps)]
    command += ["--bf16"] * bf16
    found = json.loads(output_of(command).splitlines()[-1])
    return found["seconds"], found["peak_bytes"]


def output_of(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--binary", default=ROOT / "target/release/finetune")
    parser.add_argument("--backend", default="flex")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    runs = [
        lambda: ours(options.binary, options.steps, options.backend, options.bf16),
        lambda: peer(options.steps, options.bf16),
    ]
    ratios, peaks = [], [0, 0]
    for round_ in range(options.rounds):
        medians = []
        for side, run in enumerate(runs):
            seconds, peak = run()
            medians.append(statistics.median(seconds[2:]))
            peaks[side] = max(peaks[side], peak)
        ratios.append(medians[0] / medians[1])
        print(f"round {round_ + 1}: {medians[0]:.3f} s, PyTorch {medians[1]:.3f} s, ratio {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f}")
    print(f"peak memory {peaks[0] / 1e9:.2f} GB, PyTorch {peaks[1] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
