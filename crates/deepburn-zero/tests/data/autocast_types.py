"""Records torch.autocast in bfloat16: the result type of each op, and the losses of a small net.

    python3 -m venv venv && venv/bin/pip install torch==2.9.0 numpy
    venv/bin/python autocast_types.py > autocast_types.json

No GPU is needed: the types on CUDA come from fake tensors, which run PyTorch's dispatcher and its
autocast lists, and no kernel.

The file holds:

- "torch": the version of PyTorch.
- "cuda", "cpu": {op: {"bf16": type, "f32": type}}. The key is the type of the op's inputs, the value
  that of its result: "bf16", "f32", or "error: ..." where PyTorch refuses. Ops named "mixed_*" take
  one input of each type; "bf16" is then the type of the first input.
- "training": ten AdamW steps under torch.autocast("cpu", dtype=torch.bfloat16), and the same in fp32
  ("fp32_losses"). Weights, inputs and targets are filled by `fill`, in the order of "parameters";
  each tensor of n elements takes the next n numbers of one generator:

      state = (state * 6364136223846793005 + 1442695040888963407) mod 2^64, from state = seed
      uniform = (state >> 40) / 2^24                              in [0, 1), exact in f32
      value = (2 * uniform - 1) * bound                           computed in f64, rounded to f32

The net of the trace, with a batch of 4 images of [2, 8, 8] and 5 classes:

    x = gelu(conv2d(x, conv.weight [6, 2, 3, 3], conv.bias [6], padding 1))   exact gelu (erf)
    x = reshape(x, [4, 6, 64]) -> transpose to [4, 64, 6]
    x = linear(x, embed.weight [16, 6], embed.bias [16])                      [4, 64, 16]
    x = layer_norm(x, norm.weight [16], norm.bias [16], eps 1e-5)
    q, k, v = linear(x, {q,k,v}.weight [16, 16])                              no bias
    a = softmax(matmul(q, transpose(k)) * 0.25, last dimension)
    x = x + matmul(a, v)
    x = mean over the 64 positions
    loss = cross_entropy(linear(x, head.weight [5, 16], head.bias [5]), targets), mean over the batch

Weights are written as PyTorch has them ([out, in]); a Burn `Linear` keeps them transposed.
"""

import json
import math
import sys

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16, F32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", F32: "f32", torch.float16: "f16", torch.float64: "f64"}


def ops(device):
    """{name: function of a dtype}; inputs are positive and below 1, for log, acos and the like."""

    def x(*shape):
        return lambda dtype: torch.full(shape, 0.5, device=device, dtype=dtype)

    def unary(function, *shape):
        make = x(*(shape or (4, 6)))
        return lambda dtype: function(make(dtype))

    def parameters(function, shape, *others):
        makers = [x(*shape)] + [x(*other) for other in others]
        return lambda dtype: function(*[make(dtype) for make in makers])

    def mixed(function, first=(4, 6), second=(4, 6)):
        def run(dtype):
            other = F32 if dtype == BF16 else BF16
            return function(x(*first)(dtype), x(*second)(other))

        return run

    def classes(count):
        return torch.zeros(count, dtype=torch.int64, device=device)

    def batch_norm(dtype):
        """In training, with affine parameters in f32, as a module has under autocast. Without running
        statistics, with which the op asks the driver on CUDA; they do not change its type."""
        ones, zeros = (torch.full((6,), v, device=device, dtype=F32) for v in (1.0, 0.0))
        return F.batch_norm(x(4, 6, 5)(dtype), None, None, ones, zeros, True)

    return {
        # Products.
        "matmul": parameters(torch.matmul, (4, 6), (6, 5)),
        "matmul_batched": parameters(torch.matmul, (2, 4, 6), (2, 6, 5)),
        "linear": parameters(F.linear, (4, 6), (5, 6), (5,)),
        "conv1d": parameters(F.conv1d, (2, 3, 8), (4, 3, 3), (4,)),
        "conv2d": parameters(F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3), (4,)),
        "conv3d": parameters(F.conv3d, (2, 3, 6, 6, 6), (4, 3, 3, 3, 3), (4,)),
        "conv_transpose1d": parameters(F.conv_transpose1d, (2, 3, 8), (3, 4, 3), (4,)),
        "conv_transpose2d": parameters(F.conv_transpose2d, (2, 3, 8, 8), (3, 4, 3, 3), (4,)),
        "conv_transpose3d": parameters(F.conv_transpose3d, (2, 3, 6, 6, 6), (3, 4, 3, 3, 3), (4,)),
        "scaled_dot_product_attention": parameters(
            F.scaled_dot_product_attention, (2, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)
        ),
        "mixed_matmul": mixed(torch.matmul, (4, 6), (6, 5)),
        "mixed_linear": mixed(F.linear, (4, 6), (5, 6)),
        "mixed_conv2d": mixed(F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3)),
        # Element by element, two operands.
        "add": parameters(torch.add, (4, 6), (4, 6)),
        "sub": parameters(torch.sub, (4, 6), (4, 6)),
        "mul": parameters(torch.mul, (4, 6), (4, 6)),
        "div": parameters(torch.div, (4, 6), (4, 6)),
        "mixed_add": mixed(torch.add),
        "mixed_sub": mixed(torch.sub),
        "mixed_mul": mixed(torch.mul),
        "mixed_div": mixed(torch.div),
        "mixed_where": mixed(lambda a, b: torch.where(a > 0.1, a, b)),
        "mixed_cat": mixed(lambda a, b: torch.cat([a, b])),
        "mixed_stack": mixed(lambda a, b: torch.stack([a, b])),
        "mixed_max_pair": mixed(torch.maximum),
        "mixed_pow": mixed(torch.pow),
        "mixed_atan2": mixed(torch.atan2),
        "cat": parameters(lambda a, b: torch.cat([a, b]), (4, 6), (4, 6)),
        "where": parameters(lambda a, b: torch.where(a > 0.1, a, b), (4, 6), (4, 6)),
        "max_pair": parameters(torch.maximum, (4, 6), (4, 6)),
        "add_scalar": unary(lambda a: a + 1.5),
        "mul_scalar": unary(lambda a: a * 1.5),
        "pow_scalar": unary(lambda a: a**2.5),
        "pow_square": unary(lambda a: a**2),
        "pow": parameters(torch.pow, (4, 6), (4, 6)),
        "atan2": parameters(torch.atan2, (4, 6), (4, 6)),
        "remainder_scalar": unary(lambda a: torch.remainder(a, 0.3)),
        # Element by element, one operand.
        "exp": unary(torch.exp),
        "expm1": unary(torch.expm1),
        "log": unary(torch.log),
        "log1p": unary(torch.log1p),
        "log2": unary(torch.log2),
        "log10": unary(torch.log10),
        "sqrt": unary(torch.sqrt),
        "rsqrt": unary(torch.rsqrt),
        "reciprocal": unary(torch.reciprocal),
        "tanh": unary(torch.tanh),
        "sigmoid": unary(torch.sigmoid),
        "log_sigmoid": unary(F.logsigmoid),
        "softplus": unary(F.softplus),
        "relu": unary(torch.relu),
        "leaky_relu": unary(F.leaky_relu),
        "gelu": unary(F.gelu),
        "silu": unary(F.silu),
        "erf": unary(torch.erf),
        "erfinv": unary(torch.erfinv),
        "sin": unary(torch.sin),
        "cos": unary(torch.cos),
        "tan": unary(torch.tan),
        "sinh": unary(torch.sinh),
        "cosh": unary(torch.cosh),
        "asin": unary(torch.asin),
        "acos": unary(torch.acos),
        "atan": unary(torch.atan),
        "asinh": unary(torch.asinh),
        "acosh": unary(lambda a: torch.acosh(a + 1)),
        "atanh": unary(torch.atanh),
        "abs": unary(torch.abs),
        "neg": unary(torch.neg),
        "sign": unary(torch.sign),
        "round": unary(torch.round),
        "floor": unary(torch.floor),
        "ceil": unary(torch.ceil),
        "clamp": unary(lambda a: torch.clamp(a, 0.1, 0.3)),
        "dropout": unary(lambda a: F.dropout(a, 0.5, True)),
        "transpose": unary(lambda a: a.transpose(0, 1)),
        # Reductions.
        "sum": unary(torch.sum),
        "sum_dim": unary(lambda a: a.sum(1)),
        "mean": unary(torch.mean),
        "mean_dim": unary(lambda a: a.mean(1)),
        "prod": unary(torch.prod),
        "prod_dim": unary(lambda a: a.prod(1)),
        "cumsum": unary(lambda a: a.cumsum(1)),
        "cumprod": unary(lambda a: a.cumprod(1)),
        "cummax": unary(lambda a: a.cummax(1)[0]),
        "max": unary(torch.max),
        "max_dim": unary(lambda a: a.max(1)[0]),
        "min_dim": unary(lambda a: a.min(1)[0]),
        "var": unary(torch.var),
        "std": unary(torch.std),
        "norm": unary(lambda a: torch.linalg.vector_norm(a)),
        "logsumexp": unary(lambda a: torch.logsumexp(a, 1)),
        "sort": unary(lambda a: a.sort()[0]),
        "topk": unary(lambda a: a.topk(2)[0]),
        # Modules.
        "softmax": unary(lambda a: torch.softmax(a, -1)),
        "log_softmax": unary(lambda a: torch.log_softmax(a, -1)),
        "layer_norm": parameters(
            lambda a, w, b: F.layer_norm(a, [6], w, b), (4, 6), (6,), (6,)
        ),
        "layer_norm_f32_weights": lambda dtype: F.layer_norm(
            x(4, 6)(dtype), [6], x(6)(F32), x(6)(F32)
        ),
        "rms_norm": parameters(lambda a, w: F.rms_norm(a, [6], w), (4, 6), (6,)),
        "group_norm": parameters(
            lambda a, w, b: F.group_norm(a, 2, w, b), (4, 6, 5), (6,), (6,)
        ),
        "instance_norm": unary(F.instance_norm, 4, 6, 5),
        "batch_norm_train": batch_norm,
        "embedding": lambda dtype: F.embedding(classes(4), x(5, 6)(dtype)),
        "gather": unary(lambda a: a.gather(0, torch.zeros(1, 6, dtype=torch.int64, device=device))),
        "index_select": unary(lambda a: a.index_select(0, classes(2))),
        "max_pool1d": unary(lambda a: F.max_pool1d(a, 2), 2, 3, 8),
        "max_pool2d": unary(lambda a: F.max_pool2d(a, 2), 2, 3, 8, 8),
        "avg_pool1d": unary(lambda a: F.avg_pool1d(a, 2), 2, 3, 8),
        "avg_pool2d": unary(lambda a: F.avg_pool2d(a, 2), 2, 3, 8, 8),
        "adaptive_avg_pool1d": unary(lambda a: F.adaptive_avg_pool1d(a, 2), 2, 3, 8),
        "adaptive_avg_pool2d": unary(lambda a: F.adaptive_avg_pool2d(a, 2), 2, 3, 8, 8),
        "interpolate_nearest": unary(
            lambda a: F.interpolate(a, scale_factor=2, mode="nearest"), 2, 3, 8, 8
        ),
        "interpolate_bilinear": unary(
            lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), 2, 3, 8, 8
        ),
        "interpolate_bicubic": unary(
            lambda a: F.interpolate(a, scale_factor=2, mode="bicubic"), 2, 3, 8, 8
        ),
        # Losses.
        "mse_loss": parameters(F.mse_loss, (4, 6), (4, 6)),
        "l1_loss": parameters(F.l1_loss, (4, 6), (4, 6)),
        "smooth_l1_loss": parameters(F.smooth_l1_loss, (4, 6), (4, 6)),
        "huber_loss": parameters(F.huber_loss, (4, 6), (4, 6)),
        "kl_div": parameters(
            lambda a, b: F.kl_div(a, b, reduction="batchmean"), (4, 6), (4, 6)
        ),
        "cross_entropy": unary(lambda a: F.cross_entropy(a, classes(4))),
        "nll_loss": unary(lambda a: F.nll_loss(a, classes(4))),
        "binary_cross_entropy_with_logits": parameters(
            F.binary_cross_entropy_with_logits, (4, 6), (4, 6)
        ),
        "cosine_similarity": parameters(F.cosine_similarity, (4, 6), (4, 6)),
    }


def result_types(device):
    """The types that autocast gives on a device; on CUDA with fake tensors."""
    table = {}
    for name in ops(device):
        table[name] = {}
        for label, dtype in (("bf16", BF16), ("f32", F32)):
            table[name][label] = result_type(device, name, dtype)
    return table


def result_type(device, name, dtype):
    # `torch.autocast("cuda")` switches itself off where there is no GPU; its state can be set.
    torch.set_autocast_dtype(device, BF16)
    torch.set_autocast_enabled(device, True)
    try:
        if device == "cpu":
            return NAMES[ops(device)[name](dtype).dtype]
        # cuDNN and the choice of an attention kernel ask the driver. Autocast acts before them.
        with FakeTensorMode(), torch.backends.cudnn.flags(enabled=False), sdpa_kernel(
            SDPBackend.MATH
        ):
            return NAMES[ops(device)[name](dtype).dtype]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return "error: " + str(error).strip().splitlines()[0]
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


class Generator:
    """The generator of the header."""

    def __init__(self, seed):
        self.state = seed

    def uniform(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 40) / 2**24

    def fill(self, shape, bound):
        count = math.prod(shape)
        values = [(2 * self.uniform() - 1) * bound for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).to(F32).reshape(shape)


# Name, shape, bound; order of the generator.
PARAMETERS = [
    ("conv.weight", [6, 2, 3, 3], 0.25),
    ("conv.bias", [6], 0.1),
    ("embed.weight", [16, 6], 0.5),
    ("embed.bias", [16], 0.1),
    ("norm.weight", [16], 1.0),
    ("norm.bias", [16], 0.1),
    ("q.weight", [16, 16], 0.4),
    ("k.weight", [16, 16], 0.4),
    ("v.weight", [16, 16], 0.4),
    ("head.weight", [5, 16], 0.4),
    ("head.bias", [5], 0.1),
]
SEED, STEPS, BATCH, CLASSES = 2024, 10, 4, 5
ADAMW = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


def loss_of(p, images, targets):
    x = F.gelu(F.conv2d(images, p["conv.weight"], p["conv.bias"], padding=1))
    x = x.reshape(BATCH, 6, 64).transpose(1, 2)
    x = F.linear(x, p["embed.weight"], p["embed.bias"])
    x = F.layer_norm(x, [16], p["norm.weight"], p["norm.bias"], 1e-5)
    q, k, v = (F.linear(x, p[f"{name}.weight"]) for name in "qkv")
    attention = torch.softmax(torch.matmul(q, k.transpose(1, 2)) * 0.25, -1)
    x = x + torch.matmul(attention, v)
    logits = F.linear(x.mean(1), p["head.weight"], p["head.bias"])
    return F.cross_entropy(logits, targets), logits


def train(autocast):
    generator = Generator(SEED)
    p = {name: generator.fill(shape, bound) for name, shape, bound in PARAMETERS}
    batches = []
    for step in range(STEPS):
        images = generator.fill([BATCH, 2, 8, 8], 1.0)
        targets = torch.tensor([int(generator.uniform() * CLASSES) for _ in range(BATCH)])
        batches.append((images, targets))
    first = {name: tensor.flatten()[:3].tolist() for name, tensor in p.items()}
    first["images of step 0"] = batches[0][0].flatten()[:3].tolist()
    for tensor in p.values():
        tensor.requires_grad_()
    optimizer = torch.optim.AdamW(p.values(), **{**ADAMW, "betas": tuple(ADAMW["betas"])})
    losses, types = [], {}
    for images, targets in batches:
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            loss, logits = loss_of(p, images, targets)
        types = {"logits": NAMES[logits.dtype], "loss": NAMES[loss.dtype]}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    targets = [targets.tolist() for _, targets in batches]
    return losses, targets, types, first


def training():
    losses, targets, types, first = train(True)
    return {
        "seed": SEED,
        "parameters": [{"name": n, "shape": s, "bound": b} for n, s, b in PARAMETERS],
        "optimizer": ADAMW,
        "inputs": "after the parameters, for each of the steps: images [4, 2, 8, 8] with bound 1, "
        "then 4 targets, each floor(uniform * 5)",
        "targets": targets,
        "first_values": first,
        "types": types,
        "losses": losses,
        "fp32_losses": train(False)[0],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    record = {
        "torch": torch.__version__,
        "cuda": result_types("cuda"),
        "cpu": result_types("cpu"),
        "training": training(),
    }
    json.dump(record, sys.stdout, indent=1)
    print()
