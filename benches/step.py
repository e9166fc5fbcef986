#!/usr/bin/env python3
"""Compares a training step of GPT-2 124M, 4 x 128 tokens, fp32, one rank, with eager PyTorch.

Runs both in turn, `rounds` times, and prints each round, the median of the ratios of their times and
the larger peak memory of each. The first two steps of a run are not counted. Needs a `python` on the
PATH that has torch and transformers, and a release build of `finetune`.

    cargo build --release && python benches/step.py [--rounds 3]
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


def ours(binary, steps):
    """Seconds of each step, and the process's peak memory in bytes."""
    with tempfile.TemporaryDirectory() as output:
        settings = SETTINGS | {"training.max_steps": steps}
        command = [binary, "--config", "gpt2.json", "--output-dir", output]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        # A process of its own, whose only child is the run: so the peak is the run's.
        measure = (
            "import resource, subprocess, sys;"
            "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL);"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        done = subprocess.run(
            ["python", "-c", measure, *command], cwd=ROOT, check=True, capture_output=True, text=True
        )
        rows = pathlib.Path(output, "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(row)["step_seconds"] for row in rows]
    return seconds, int(done.stdout) * 1024


def peer(steps):
    """The same of PyTorch."""
    command = ["python", ROOT / "benches/peer_step.py", "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["peak_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--binary", default=ROOT / "target/release/finetune")
    options = parser.parse_args()
    ratios, peaks = [], [0, 0]
    for round_ in range(options.rounds):
        medians = []
        for side, run in enumerate([lambda n: ours(options.binary, n), peer]):
            seconds, peak = run(options.steps)
            medians.append(statistics.median(seconds[2:]))
            peaks[side] = max(peaks[side], peak)
        ratios.append(medians[0] / medians[1])
        print(f"round {round_ + 1}: {medians[0]:.3f} s, PyTorch {medians[1]:.3f} s, ratio {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f}")
    print(f"peak memory {peaks[0] / 1e9:.2f} GB, PyTorch {peaks[1] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
