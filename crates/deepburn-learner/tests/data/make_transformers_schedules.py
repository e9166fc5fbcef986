"""Writes transformers_schedules.json: the learning rates of transformers' schedules.

    pip install transformers torch      # made with transformers 5.24.0, torch 2.15.0
    python make_transformers_schedules.py > transformers_schedules.json

Each case lists the rates that optimizer steps 1, 2, 3, ... use. `warmup_steps` is written as in TrainingArguments: below
1 it is a ratio of `max_steps`.
"""

import json
import math

import torch
import transformers

CASES = [
    # type, kwargs, lr, warmup_steps, max_steps
    ("constant", {}, 1e-3, 0, 4),
    ("constant_with_warmup", {}, 1e-3, 3, 6),
    ("linear", {}, 5e-5, 3, 10),
    ("linear", {}, 2e-5, 0, 5),
    ("linear", {}, 1e-3, 0.07, 100),
    ("linear", {}, 1e-3, 0.25, 10),
    ("linear", {}, 1e-3, 6, 6),
    ("cosine", {}, 1e-3, 2, 9),
    ("cosine", {"num_cycles": 1.25}, 1e-3, 0, 8),
    ("cosine_with_restarts", {}, 1e-3, 2, 8),
    ("cosine_with_restarts", {"num_cycles": 3}, 1e-3, 1, 13),
    ("polynomial", {}, 1e-4, 2, 8),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}, 1e-3, 0, 7),
    ("inverse_sqrt", {}, 1e-3, 4, 12),
    ("inverse_sqrt", {}, 1e-3, 0, 5),
    ("inverse_sqrt", {"timescale": 10}, 1e-3, 2, 8),
    ("cosine_with_min_lr", {"min_lr": 1e-4}, 1e-3, 2, 9),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.0}, 1e-3, 0.1, 11),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 1e-3, 3, 9),
    ("cosine_warmup_with_min_lr", {"min_lr": 5e-4, "warmup_lr_rate": 0.1}, 1e-3, 3, 9),
    ("warmup_stable_decay", {"num_decay_steps": 4}, 1e-3, 3, 12),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 2, "min_lr_ratio": 0.1,
                             "warmup_type": "cosine", "decay_type": "linear"}, 1e-3, 3, 12),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"}, 1e-3, 3, 10),
    ("warmup_stable_decay", {"num_decay_steps": 6, "num_cycles": 1.5}, 1e-3, 4, 8),
]


def rates(kind, kwargs, lr, warmup_steps, max_steps):
    # TrainingArguments.get_warmup_steps
    warmup = int(warmup_steps) if warmup_steps >= 1 else math.ceil(max_steps * warmup_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = transformers.get_scheduler(kind, optimizer, warmup, max_steps, dict(kwargs))
    found = []
    for _ in range(max_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


names = ["lr_scheduler_type", "lr_scheduler_kwargs", "learning_rate", "warmup_steps", "max_steps"]
cases = [dict(zip(names, case), rates=rates(*case)) for case in CASES]
print("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]")
