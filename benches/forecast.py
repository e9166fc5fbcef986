#!/usr/bin/env python3
"""The memory forecast of `finetune` against what a run measures, for 12 configurations.

    cargo build --release --bins
    python3 benches/forecast.py book.txt --nvme /mnt/nvme

Each run takes two steps of a GPT-2 of 512 x 8 (or a classifier of the same size) on the text. The forecast is
that of `job.json`, in bytes of rank 0 by tier and of the whole process. The ledger's peaks are the largest of
`metrics.jsonl`; the resident set is the peak that the system reports for the process. Ratios are forecast to
measured.
"""

import argparse
import json
import os
import tempfile

MODEL = {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 256}
# Its masks are activations. Two configurations have it.
DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
MIB = 2**20


def recompute(policy):
    return {"activation_checkpointing": {"policy": policy}}


def configurations(nvme):
    """Name, ranks, sequences of a micro-batch, keys of the DeepSpeed file, and whether it is a classifier."""
    disk = {"device": "nvme", "nvme_path": nvme}
    optimizer = {"offload_optimizer": disk}
    parameters = {**optimizer, "offload_param": {**disk, "max_in_cpu": 0}}
    limited = {"stage3_max_live_parameters": 10_000_000, "stage3_prefetch_bucket_size": 5_000_000}
    return [
        ("fp32", 1, 4, {"zero_optimization": {"stage": 0}}, False),
        ("fp32", 2, 2, {"zero_optimization": {"stage": 1}}, False),
        ("fp32, full, dropout", 1, 8, {"zero_optimization": {"stage": 3}, **recompute("full")}, False),
        ("fp32, selective", 1, 6, {"zero_optimization": {"stage": 2}, **recompute("selective")}, False),
        ("fp32", 2, 2, {"zero_optimization": {"stage": 3}}, False),
        ("bf16, dropout", 1, 4, {"zero_optimization": {"stage": 2}, **BF16}, False),
        ("bf16, full", 2, 4, {"zero_optimization": {"stage": 3}, **BF16, **recompute("full")}, False),
        ("fp16, 2 micro-batches", 2, 2,
         {"zero_optimization": {"stage": 2}, **FP16, "gradient_accumulation_steps": 2}, False),
        ("optimizer on NVMe", 1, 4, {"zero_optimization": {"stage": 2, **optimizer}}, False),
        ("parameters on NVMe", 1, 4,
         {"zero_optimization": {"stage": 3, **parameters, **limited}, **recompute("full")}, False),
        ("classifier, fp32", 1, 6, {"zero_optimization": {"stage": 1}}, True),
        ("classifier, bf16, selective", 2, 6,
         {"zero_optimization": {"stage": 3}, **BF16, **recompute("selective")}, True),
    ]


def labelled(text, folder):
    """A table of passages of the text; the label is whether a passage has a question mark."""
    path = os.path.join(folder, "passages.jsonl")
    with open(text, encoding="utf-8") as file, open(path, "w", encoding="utf-8") as table:
        words = file.read().split()
        for start in range(0, min(len(words), 60_000), 300):
            passage = " ".join(words[start:start + 300])
            table.write(json.dumps({"text": passage, "label": int("?" in passage[:400])}) + "\n")
    return path


def job(configuration, text, output, folder):
    name, ranks, sequences, deepspeed, is_classifier = configuration
    dropout = DROPOUT if "dropout" in name else NO_DROPOUT
    data = {"kind": "text", "path": text, "sequence_length": 256, "vocab_size": 4096}
    if is_classifier:
        data = {**data, "kind": "classification", "path": labelled(text, folder)}
    return {
        "model": {"architecture": "gpt2", "pretrained": None, "config": {**MODEL, **dropout}},
        "data": data,
        "training": {"ranks": ranks, "max_steps": 2, "output_dir": output},
        "deepspeed": {
            "train_micro_batch_size_per_gpu": sequences,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            **deepspeed,
        },
    }


def run(program, configuration, text):
    """The forecast, the ledger's peaks and the peak of the resident set, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        output, file = os.path.join(folder, "output"), os.path.join(folder, "job.json")
        with open(file, "w", encoding="utf-8") as target:
            json.dump(job(configuration, text, output, folder), target)
        child = os.fork()
        if child == 0:
            with open(os.path.join(folder, "log"), "wb") as log:
                os.dup2(log.fileno(), 2)
            os.execv(program, [program, "--config", file])
        _, status, usage = os.wait4(child, 0)
        if status:
            with open(os.path.join(folder, "log"), encoding="utf-8") as log:
                raise SystemExit(f"{configuration[0]}: status {status}\n{log.read()[-2000:]}")
        with open(os.path.join(output, "job.json"), encoding="utf-8") as record:
            forecast = json.load(record)["memory_forecast"]
        with open(os.path.join(output, "metrics.jsonl"), encoding="utf-8") as rows:
            memory = [json.loads(row)["memory"] for row in rows]
    ledger = {tier: max(row[f"{tier}_peak"] for row in memory) for tier in ("activations", "device", "disk")}
    return forecast, {**ledger, "rss": usage.ru_maxrss * 1024}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file to train on")
    parser.add_argument("--nvme", required=True, metavar="DIR", help="a folder on a disk, for offloaded states")
    parser.add_argument("--program", default="target/release/finetune")
    parser.add_argument("--only", type=int, action="append", metavar="N", help="run configuration N, from 1")
    options = parser.parse_args()
    tiers = ("activations", "device", "disk", "rss")
    print(f"{'':3}{'configuration':28}{'stage':>6}{'ranks':>6}", *(f"{tier + ', MiB':>27}" for tier in tiers))
    worst = dict.fromkeys(tiers, 0.0)
    for number, configuration in enumerate(configurations(options.nvme), start=1):
        if options.only and number not in options.only:
            continue
        name, ranks, _, deepspeed, _ = configuration
        forecast, measured = run(options.program, configuration, os.path.abspath(options.text))
        cells = []
        for tier in tiers:
            if measured[tier] == 0:
                cells.append(f"{'-':>27}")
                continue
            ratio = forecast[tier] / measured[tier]
            worst[tier] = max(worst[tier], abs(ratio - 1))
            cells.append(f"{forecast[tier] / MIB:9.1f} /{measured[tier] / MIB:8.1f} {ratio:7.3f}")
        stage = deepspeed["zero_optimization"]["stage"]
        print(f"{number:<3}{name:28}{stage:>6}{ranks:>6}", *cells, flush=True)
    print("largest difference:", ", ".join(f"{tier} {100 * worst[tier]:.1f} %" for tier in tiers))


if __name__ == "__main__":
    main()
