"""Makes trl_packing.json: rows that TRL 1.16.0 packs.

Needs `pip install trl==1.16.0` and its dependencies. Each token has a unique id, from which the samples of a row are
found.
"""

import json
import random
from pathlib import Path

from datasets import Dataset
from trl import pack_dataset


def rows_of(lengths, max_length, strategy):
    """Returns the rows as lists of [sample, first token, last token + 1]."""
    places = [(sample, at) for sample, length in enumerate(lengths) for at in range(length)]
    ids = iter(range(len(places)))
    samples = [[next(ids) for _ in range(length)] for length in lengths]
    packed = pack_dataset(Dataset.from_dict({"input_ids": samples}), max_length, strategy)
    rows = []
    for row in packed:
        segments, start = [], 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            for sample, at in (places[id] for id in row["input_ids"][start : start + length]):
                if segments and segments[-1][0] == sample and segments[-1][2] == at:
                    segments[-1][2] += 1
                else:
                    segments.append([sample, at, at + 1])
            start += length
        rows.append(segments)
    return rows


def main():
    random.seed(0)
    few = [random.randint(0, 30) for _ in range(60)]
    equal = [random.choice([3, 4, 5, 8]) for _ in range(80)]
    groups = [min(int(random.lognormvariate(2.0, 1.0)), 60) for _ in range(1300)]
    cases = [
        {"strategy": strategy, "max_length": max_length, "lengths": lengths, "rows": rows_of(lengths, max_length, strategy)}
        for lengths, max_length in [(few, 16), (few, 31), (equal, 13), (groups, 48)]
        for strategy in ["bfd", "bfd_split", "wrapped"]
    ]
    path = Path(__file__).with_name("trl_packing.json")
    path.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
