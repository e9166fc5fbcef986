"""Dynamic batches against fixed ones: samples a second of the same model on the same texts.

    cargo build --release --bin finetune
    python benches/batching.py --data stanfordnlp/imdb [--rounds 3] [--steps 30] [--ranks 2]

Fixed batches are shuffled and padded to the longest of each; dynamic ones have the same budget of
places a micro-batch. Both runs of a round follow each other, and the median of the rounds' ratios
is quoted. Texts have the same mean length in both, so samples a second are told by tokens a second,
padding excluded.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The first steps fill caches.
WARM_UP = 3


def tokens_per_second(binary, arguments, sets):
    with tempfile.TemporaryDirectory() as folder:
        sets = {
            "data.path": arguments.data,
            "data.splits": {"train": "train"},
            "data.sequence_length": arguments.length,
            "model.config.max_len": arguments.length,
            "training.ranks": arguments.ranks,
            "training.eval_steps": None,
            "training.max_steps": arguments.steps,
            "deepspeed.train_micro_batch_size_per_gpu": arguments.rows,
            **sets,
        }
        command = [binary, "--config", ROOT / "configs/imdb_cpu.json", "--output-dir", folder]
        for key, value in sets.items():
            value = value if isinstance(value, str) else json.dumps(value)
            command += ["--set", f"{key}={value}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(pathlib.Path(folder) / "metrics.jsonl")]
    rows = [row for row in rows if "tokens" in row][WARM_UP:]
    return sum(row["tokens"] for row in rows) / sum(row["step_seconds"] for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=ROOT / "target/release/finetune")
    parser.add_argument("--data", default="stanfordnlp/imdb")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    batching = {
        "enabled": True,
        "max_tokens": arguments.rows * arguments.length,
        "sequence_picking_order": "random",
    }
    sampling = {"enabled": True, "dynamic_batching": batching}
    dynamic = {"deepspeed.data_efficiency": {"enabled": True, "data_sampling": sampling}}
    ratios = []
    for _ in range(arguments.rounds):
        fixed = tokens_per_second(arguments.binary, arguments, {})
        budgeted = tokens_per_second(arguments.binary, arguments, dynamic)
        ratios.append(budgeted / fixed)
        print(f"fixed {fixed:.0f} tokens/s, dynamic {budgeted:.0f} tokens/s: {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f}")


main()
