"""Trains GPT-2 in one process with PyTorch, eagerly or with torch.compile.

With bf16, weights and optimizer states are in bf16, too.
"""

import time

import torch

import training

OPTIMIZERS = {
    "AdamW": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
    "SGD": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "Adagrad": lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate),
}


def main():
    parser = training.parser(__doc__)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    options = parser.parse_args()
    model = training.gpt2(options)
    if options.dtype == "bf16":
        model = model.bfloat16()
    run = training.compiled(options, model)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), training.LEARNING_RATE)

    def step(tokens):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        start = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), {"optimizer": time.perf_counter() - start}

    training.timed_steps(options, step)


if __name__ == "__main__":
    main()
