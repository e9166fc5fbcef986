"""Prints traces of fine-tuning the tiny GPT-2 with Muon and LAMB, for tests/programs.

    pip install torch==2.9 transformers==5.23 deepspeed==0.19.8 ninja numpy
    python optimizer_traces.py > optimizer_traces.json      # reads ../../../../models/tests/data/tiny and tokens.bin

The differences between the variants are printed to stderr. Model, data, batches, clipping and warm-up are the same as
in traces/s0_n1.json: 4 sequences of 32 tokens per step, in the order of the file, on one rank, gradients clipped to a
norm of 1, and five steps of logarithmic warm-up, of which the first two have a learning rate of 0.

Each variant is a trace of the same format. In its rows, `loss` is the loss before the step, `grad_norm` the norm before
clipping (null if DeepSpeed does not store it), `lr` the learning rate of the matrices (of all parameters with LAMB),
and `adam_lr` the learning rate of AdamW. `ds` is a DeepSpeed configuration. Without `warmup_max_lr`, its schedule
increases to the learning rates of the optimizer's groups.

muon            torch.optim.Muon for the 2D weights of the blocks, torch.optim.AdamW for all other parameters, in f32.
                Each matrix is transposed to [out, in]. attn.c_attn, which is [in, 3 * out], is split into three of them
muon_f64        `muon` in f64, including the model, to tell rounding errors of f32 from differences of the formula
muon_bf16       `muon` as published in PyTorch, with the Newton-Schulz iteration in bfloat16. Its numbers depend on how
                the CPU adds products of bfloat16
deepspeed_muon  DeepSpeed without ZeRO, with its Newton-Schulz iterations in f32. It does not transpose or split 2D
                parameters ([in, out], attn.c_attn as one matrix), and also updates wte and wpe, because their names do
                not contain "embed"
deepspeed_muon_standard     `deepspeed_muon` with ns_method "standard"
deepspeed_muon_published    `deepspeed_muon` in fp16, which DeepSpeed chooses if the CPU supports it, or else in f32
deepspeed_muon_stage1, _stage2, _stage3
                `deepspeed_muon` with ZeRO, which clips orthogonalized updates instead of gradients
lamb            the formula of DeepSpeed's csrc/lamb/fused_lamb_cuda_kernel.cu for all parameters, with the model in f32
                and moments and update in f64. `coefficients` of a row is the number of parameters whose coefficient is
                1 because a norm is 0, min_coeff, between the bounds, and max_coeff. The first and the last are always 0
lamb_fast       `lamb` with 10 times the learning rate, so that losses change more, and fewer coefficients are min_coeff
"""
import contextlib, json, math, os, pathlib, socket, sys

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
os.environ["DS_ACCELERATOR"] = "cpu"
# DeepSpeed compiles its update. Eager operations round in an order that does not depend on the compiler.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import numpy as np
import torch

# DeepSpeed logs to the standard output.
OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import deepspeed
from deepspeed.runtime.zero.muon import original_muon
from transformers import GPT2LMHeadModel

HERE = pathlib.Path(__file__).resolve().parent
TINY = HERE / "../../../../models/tests/data/tiny"
STEPS, BATCH, SEQ, CLIP, WARMUP = 15, 4, 32, 1.0, 5
MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
LAMB = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_coeff": 10.0, "min_coeff": 0.01}
PUBLISHED = original_muon.ns_compute_dtype


def configuration(kind, params, stage=0):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": kind, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_num_steps": WARMUP}},
        "gradient_clipping": CLIP,
        # DeepSpeed refuses Muon with reduce_scatter at stage 3.
        "zero_optimization": {"stage": stage, **({"reduce_scatter": False} if stage == 3 else {})},
        "steps_per_print": 100000,
    }


def muon_configuration(stage=0, **more):
    shared = {key: ADAMW[key] for key in ("betas", "eps", "weight_decay")}
    rates = {"lr": ADAMW["lr"], "muon_lr": MUON["lr"], "adam_lr": ADAMW["lr"]}
    params = {**rates, "momentum": MUON["momentum"], **shared, **more, "torch_adam": True}
    return configuration("Muon", params, stage)


def batches():
    tokens = np.fromfile(HERE / "tokens.bin", dtype=np.uint16).astype(np.int64)
    sequences = torch.from_numpy(tokens[: len(tokens) // SEQ * SEQ].reshape(-1, SEQ))
    return [sequences[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]


def model():
    return GPT2LMHeadModel.from_pretrained(TINY).train()


def trace(ds, rows):
    rows = [{"step": number + 1, **row, "loss_scale": 1.0, "skipped": False} for number, row in enumerate(rows)]
    return {"ds": ds, "world": 1, "seq": SEQ, "rows": rows}


def warmup(step):
    """Returns the factor of step `step`, counted from 0. DeepSpeed sets the rate of a step after the previous step."""
    return min(1.0, math.log(max(step, 1)) / math.log(WARMUP))


def train(net, update):
    """Trains and returns the rows. `update` takes a step with a factor of its learning rates and returns the rates."""
    rows = []
    for step, tokens in enumerate(batches()):
        loss = net(input_ids=tokens, labels=tokens).loss
        net.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        rates = update(warmup(step))
        rows.append({"loss": loss.item(), **rates, "grad_norm": norm.item()})
    return rows


@contextlib.contextmanager
def without_bfloat16():
    """Makes torch.optim.Muon orthogonalize matrices in their own type. It would convert them to bfloat16."""
    published = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.clone
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = published


def matrices(net):
    """Returns the 2D weights of the blocks, each with a function that splits a tensor of its shape into matrices."""
    def transposed(weight):
        return [weight.T]

    def three(weight):
        return [part.T for part in weight.chunk(3, dim=1)]

    return [(p, three if "c_attn" in name else transposed)
            for name, p in net.named_parameters() if name.startswith("transformer.h.") and p.ndim == 2]


def torch_muon(dtype=torch.float32, published=False):
    net = model().to(dtype)
    hidden = matrices(net)
    # The parameters of the optimizer are copies of the matrices in its layout.
    copies = [[torch.nn.Parameter(part.contiguous()) for part in parts(weight.data)] for weight, parts in hidden]
    taken = {id(weight) for weight, _ in hidden}
    muon = torch.optim.Muon([copy for own in copies for copy in own], nesterov=True, ns_steps=5, **MUON)
    adamw = torch.optim.AdamW([p for p in net.parameters() if id(p) not in taken], **ADAMW)

    def update(factor):
        muon.param_groups[0]["lr"] = factor * MUON["lr"]
        adamw.param_groups[0]["lr"] = factor * ADAMW["lr"]
        for (weight, parts), own in zip(hidden, copies):
            for copy, part in zip(own, parts(weight.grad)):
                copy.grad = part.contiguous()
        with contextlib.nullcontext() if published else without_bfloat16():
            muon.step()
        adamw.step()
        for (weight, parts), own in zip(hidden, copies):
            for copy, part in zip(own, parts(weight.data)):
                part.copy_(copy.data)
        return {"lr": factor * MUON["lr"], "adam_lr": factor * ADAMW["lr"]}

    return trace(muon_configuration(), train(net, update))


def deepspeed_muon(ds, published=False):
    # It chooses 16 bits wherever the CPU supports them.
    original_muon.ns_compute_dtype = PUBLISHED if published else lambda _: torch.float32
    net = model()
    engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds)
    rows = []
    for tokens in batches():
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        # Stage 3 has several groups of the same rate.
        rates = {bool(group["use_muon"]): float(group["lr"]) for group in optimizer.param_groups}
        engine.step()
        norm = engine.get_global_grad_norm()
        rows.append({"loss": loss.item(), "lr": rates[True], "adam_lr": rates[False],
                     "grad_norm": None if norm is None else float(norm)})
    engine.destroy()
    return trace(ds, rows)


def lamb(peak):
    net = model()
    moments = [(torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64))
               for p in net.parameters()]
    step = 0

    @torch.no_grad()
    def update(factor):
        nonlocal step
        step, (beta1, beta2) = step + 1, LAMB["betas"]
        # The correction is part of the learning rate: eps, decay and coefficient see uncorrected moments.
        rate = factor * peak * (1 - beta2 ** step) ** 0.5 / (1 - beta1 ** step)
        counts = {"no_norm": 0, "min": 0, "between": 0, "max": 0}
        for p, (m, v) in zip(net.parameters(), moments):
            weight, gradient = p.double(), p.grad.double()
            m.copy_(beta1 * m + (1 - beta1) * gradient)
            v.copy_(beta2 * v + (1 - beta2) * gradient ** 2)
            direction = m / (v.sqrt() + LAMB["eps"]) + LAMB["weight_decay"] * weight
            norms, coefficient, kind = (weight.norm().item(), direction.norm().item()), 1.0, "no_norm"
            if 0.0 not in norms:
                ratio = norms[0] / norms[1]
                coefficient = min(max(ratio, LAMB["min_coeff"]), LAMB["max_coeff"])
                kind = "between" if coefficient == ratio else "min" if ratio < coefficient else "max"
            counts[kind] += 1
            p.copy_(weight - rate * coefficient * direction)
        return {"lr": factor * peak, "coefficients": counts}

    return trace(configuration("Lamb", {"lr": peak, **LAMB}), train(net, update))


def difference(one, other):
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(one["rows"], other["rows"]))


def main():
    torch.set_num_threads(1)
    found = {
        "muon": torch_muon(),
        "muon_f64": torch_muon(dtype=torch.float64),
        "muon_bf16": torch_muon(published=True),
        "deepspeed_muon": deepspeed_muon(muon_configuration()),
        "deepspeed_muon_standard": deepspeed_muon(muon_configuration(ns_method="standard")),
        "deepspeed_muon_published": deepspeed_muon(muon_configuration(), published=True),
    }
    for stage in (1, 2, 3):
        found[f"deepspeed_muon_stage{stage}"] = deepspeed_muon(muon_configuration(stage))
    found["lamb"], found["lamb_fast"] = lamb(2e-3), lamb(2e-2)
    for one, other in [("muon", "muon_f64"), ("muon", "muon_bf16"), ("muon", "deepspeed_muon"),
                       ("deepspeed_muon", "deepspeed_muon_standard"), ("deepspeed_muon", "deepspeed_muon_published"),
                       ("deepspeed_muon", "deepspeed_muon_stage1"), ("deepspeed_muon_stage1", "deepspeed_muon_stage2"),
                       ("deepspeed_muon_stage1", "deepspeed_muon_stage3"), ("lamb", "lamb_fast")]:
        print(f"{one}, {other}: losses {difference(found[one], found[other]):.1e}", file=sys.stderr)
    print(json.dumps(found, indent=1), file=OUTPUT, flush=True)


if __name__ == "__main__":
    main()
