#!/usr/bin/env python3
"""Time and memory of activation checkpointing and activation offload, against a run without.

    cargo build --release --bins
    python3 benches/activations.py book.txt --nvme /mnt/nvme --rounds 3

Trains GPT-2 on one rank for two steps under each policy, in turns, so that a machine that others use too slows
all of them down alike. Prints medians: activations by the ledger, the peak of the resident set, seconds of the
second step, and all three against the first row. A ratio of seconds is taken within a round.
"""

import argparse
import json
import os
import statistics
import tempfile

MIB = 2**20


def sections(nvme):
    """Name and section `activation_checkpointing`."""
    return [
        ("off", {}),
        ("full", {"policy": "full"}),
        ("selective", {"policy": "selective"}),
        ("full, offload", {"policy": "full", "nvme_path": nvme}),
        ("selective, offload", {"policy": "selective", "nvme_path": nvme}),
    ]


def job(section, options, output):
    return {
        "model": {"architecture": "gpt2", "pretrained": None, "config": json.loads(options.model)},
        "data": {"kind": "text", "path": os.path.abspath(options.text), "sequence_length": options.length},
        "training": {"ranks": 1, "max_steps": 2, "output_dir": output},
        "deepspeed": {
            "train_micro_batch_size_per_gpu": options.sequences,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
            "activation_checkpointing": section,
        },
    }


def run(name, section, options):
    """Activations and resident set in bytes, seconds of the second step, and its loss."""
    with tempfile.TemporaryDirectory() as folder:
        output, file = os.path.join(folder, "output"), os.path.join(folder, "job.json")
        log_file = os.path.join(folder, "log")
        with open(file, "w", encoding="utf-8") as target:
            json.dump(job(section, options, output), target)
        child = os.fork()
        if child == 0:
            with open(log_file, "wb") as log:
                os.dup2(log.fileno(), 2)
            os.execv(options.program, [options.program, "--config", file])
        _, status, usage = os.wait4(child, 0)
        if status:
            with open(log_file, encoding="utf-8") as log:
                raise SystemExit(f"{name}: status {status}\n{log.read()[-2000:]}")
        with open(os.path.join(output, "metrics.jsonl"), encoding="utf-8") as rows:
            last = [json.loads(row) for row in rows if '"loss"' in row][-1]
    return last["memory"]["activations_peak"], usage.ru_maxrss * 1024, last["step_seconds"], last["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file to train on")
    parser.add_argument("--nvme", required=True, metavar="DIR", help="a folder on a disk, for offloaded activations")
    parser.add_argument("--program", default="target/release/finetune")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=8, help="of the micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--model", default="{}", metavar="JSON", help="what differs from GPT-2 124M")
    options = parser.parse_args()
    variants = sections(options.nvme)
    runs = {name: [] for name, _ in variants}
    for _ in range(options.rounds):
        for name, section in variants:
            runs[name].append(run(name, section, options))
    losses = {loss for rounds in runs.values() for *_, loss in rounds}
    if len(losses) != 1:
        raise SystemExit(f"the losses differ: {losses}")
    print(f"{'':20}{'activations, MiB':>24}{'resident set, MiB':>24}{'seconds a step':>22}")
    first = runs[variants[0][0]]
    for name, _ in variants:
        cells = []
        for column, unit in ((0, MIB), (1, MIB), (2, 1)):
            value = statistics.median(round[column] for round in runs[name])
            ratio = statistics.median(
                round[column] / base[column] for round, base in zip(runs[name], first, strict=True)
            )
            cells.append(f"{value / unit:14.1f} {ratio:7.2f}")
        print(f"{name:20}", *cells)


if __name__ == "__main__":
    main()
