"""Trains a Llama in one process with PyTorch, whole or with a LoRA adapter of PEFT, or generates with it.

With bf16, weights and optimizer states are in bf16, too. `--compile` trains with torch.compile.
"""

import json
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import training

# As in the jobs that the suite gives to DeepBurn.
RANK, ALPHA = 16, 32
PROMPT = 16


def decoder(options):
    """Returns the model of a folder, or a randomly initialized one."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    if options.folder:
        return AutoModelForCausalLM.from_pretrained(options.folder, dtype=dtype)
    torch.manual_seed(training.SEED)
    return LlamaForCausalLM(LlamaConfig(**json.loads(options.model))).to(dtype)


def adapted(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def train(options):
    model = decoder(options).train()
    # The cache of keys and values is not used in training.
    model.config.use_cache = False
    if options.lora:
        model = adapted(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training.LEARNING_RATE)
    run = training.compiled(options, model)

    def step(tokens):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, training.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), {}

    training.timed_steps(options, step)


def generate(options):
    model = decoder(options).eval()
    prompt = torch.arange(PROMPT).unsqueeze(0)
    count = options.generate
    start = time.perf_counter()
    found = model.generate(prompt, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0)
    training.report(seconds=time.perf_counter() - start, tokens=found.shape[1] - PROMPT)


def main():
    parser = training.parser(__doc__)
    parser.add_argument("--folder", help="a folder of Hugging Face, instead of --model")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter of all linear layers")
    parser.add_argument("--generate", type=int, metavar="N", help="generate N tokens instead of training")
    options = parser.parse_args()
    if options.generate:
        generate(options)
    else:
        train(options)


if __name__ == "__main__":
    main()
