"""Trains GPT-2 with DeepSpeed on the CPU at a ZeRO stage, with DeepSpeed's defaults and PyTorch's AdamW.

The file is not called `deepspeed.py`, because `import deepspeed` would import it instead of the package.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # noqa: E402

import training  # noqa: E402


def configuration(options):
    """Returns DeepSpeed's configuration. With `--nvme`, optimizer states and parameters are offloaded to NVMe."""
    zero = {"stage": options.stage}
    if options.nvme:
        nvme = {"device": "nvme", "nvme_path": options.nvme, "pin_memory": False}
        # A buffer has to hold the largest parameter, the token embedding.
        zero |= {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0, "buffer_size": 100_000_000}}
    plan = {
        "train_micro_batch_size_per_gpu": options.sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": training.LEARNING_RATE, "torch_adam": not options.nvme}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if options.dtype == "bf16":
        plan["bf16"] = {"enabled": True}
    return plan


def main():
    parser = training.parser(__doc__)
    parser.add_argument("--stage", type=int, choices=range(4), default=0)
    parser.add_argument("--nvme", metavar="DIR", help="keep model states in this folder (stage 3)")
    options = parser.parse_args()
    deepspeed.init_distributed()
    model = training.gpt2(options)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(options)
    )

    def step(tokens):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach(), {}

    training.timed_steps(options, step)


if __name__ == "__main__":
    main()
