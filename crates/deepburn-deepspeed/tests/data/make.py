"""Writes the checkpoints that the tests of deepburn-deepspeed read, with DeepSpeed.

    pip install torch==2.9 transformers==5 deepspeed==0.19.8 safetensors numpy
    python make.py              # all of them
    python make.py s2 s3_bf16   # some

Every variant runs in a separate torchrun process, on the CPU. A folder NAME contains:

    latest, TAG/*.pt   the checkpoint that DeepSpeed saved after SAVE steps
    expected.json      the state of the live engine at the time of the save: shape and tied names of each
                       parameter, SHA-256 of the f32 bytes of its weights and of the optimizer's arrays
    trace.json         (for variants that train the model in `mini/`) losses, learning rates, gradient norms
                       and loss scales of the whole run, and of a run that resumed from the checkpoint

Variants with `pipeline` are cut into that many stages, whose number times the replicas is the number of processes.
Their losses have no norms, because DeepSpeed's norm leaves parts of pipelines out; they are not clipped.

`mini/` has the initial weights and the configuration of that model, `tokens.bin` the u16 tokens.
Weights are read with DeepSpeed's accessors of full parameters (safe_get_full_*) and compared with the
output of its zero_to_fp32, so that the expected values do not depend on this crate.
"""
import hashlib, json, os, pathlib, shutil, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent
SEQ = 32
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}}
FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}
BF16 = {"enabled": True}


def variant(world, stage, model="micro", save=3, steps=3, optimizer=None, groups=False, frozen=(), exclude=False,
            client=None, tag=None, zero=None, fused=False, pipeline=1, untied=False, **ds):
    return dict(world=world, stage=stage, model=model, save=save, steps=steps, optimizer=optimizer, groups=groups,
                frozen=frozen, exclude=exclude, client=client, tag=tag, zero=zero or {}, fused=fused, pipeline=pipeline, untied=untied, ds=ds)


def traced(world, stage, **more):
    return variant(world, stage, model="mini", save=6, steps=12, **more)


VARIANTS = {
    # Variants of the mini model, with a trace.
    "s0": traced(2, 0),
    "s1": traced(2, 1),
    "s2": traced(3, 2),
    "s3": traced(3, 3),
    "s0_fp16": traced(2, 0, fp16=FP16),
    "s0_fp16_fused": variant(2, 0, fp16=FP16, fused=True),
    # One micro-batch per step: with several, DeepSpeed's stages skip different steps. The scale does not
    # grow, because DeepSpeed halves the gradients of steps in which it grows.
    "s2_fp16": traced(2, 2, fp16={**FP16, "initial_scale_power": 22, "loss_scale_window": 100}, gradient_accumulation_steps=1),
    "s1_bf16": traced(2, 1, bf16=BF16),
    "s3_bf16": traced(2, 3, bf16=BF16),
    "s2_groups": traced(2, 2, groups=True),
    "s3_groups": traced(2, 3, groups=True, zero={"sub_group_size": 1500}),
    # Pipelines, of `world` processes in all.
    "p2_s0": traced(2, 0, pipeline=2, gradient_clipping=0),
    "p2_s1": traced(4, 1, pipeline=2, gradient_clipping=0),
    "p3_s0_fp16": traced(3, 0, pipeline=3, gradient_clipping=0, fp16={**FP16, "initial_scale_power": 10, "loss_scale_window": 100}),
    "p3_s1_bf16": traced(3, 1, pipeline=3, gradient_clipping=0, bf16=BF16),
    "p2_s0_untied": variant(2, 0, model="mini", pipeline=2, gradient_clipping=0, untied=True),
    "p2_s1_frozen": variant(2, 1, model="mini", pipeline=2, gradient_clipping=0, frozen=("1.weight", "ln_1.bias")),
    # Variants of a smaller model, to cover all layouts.
    "one_rank": variant(1, 2),
    "one_rank_s3": variant(1, 3, tag="last"),
    "s0_bf16": variant(2, 0, bf16=BF16),
    "s0_groups": variant(2, 0, groups=True),
    "s0_frozen": variant(2, 0, frozen=("wpe", "ln_1.bias")),
    "s0_sgd": variant(2, 0, client="sgd"),
    "s1_bf16_f32_gradients": variant(2, 1, bf16=BF16, data_types={"grad_accum_dtype": "fp32"}),
    "s1_frozen": variant(2, 1, frozen=("wpe", "ln_1.bias")),
    "s2_frozen": variant(3, 2, frozen=("wpe", "ln_1.bias"), bf16=BF16),
    "s3_frozen": variant(3, 3, frozen=("wpe", "ln_1.bias"), bf16=BF16),
    "s2_excluded": variant(2, 2, frozen=("wpe", "ln_1.bias"), exclude=True),
    "s2_sgd": variant(2, 2, client="sgd"),
    "s3_adagrad": variant(2, 3, client="adagrad", zero={"zero_allow_untested_optimizer": True}),
    "s2_adagrad": variant(2, 2, client="adagrad"),
    "s2_lion": variant(2, 2, client="lion"),
    "s2_round_robin": variant(3, 2, zero={"round_robin_gradients": True}),
    "s2_aligned": variant(3, 2, zero={"parameter_alignment": True}),
    "s2_elastic": variant(3, 2, zero={"elastic_checkpoint": True}),
    "s2_offload": variant(2, 2, zero={"offload_optimizer": {"device": "cpu"}}, zero_force_ds_cpu_optimizer=False),
    "s3_fp16": variant(2, 3, fp16=FP16, zero={"stage3_param_persistence_threshold": 0}),
}


def config(v):
    zero = dict(stage=v["stage"], **v["zero"])
    ds = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
          "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
          "gradient_clipping": 0.5, "steps_per_print": 100000, "zero_allow_untested_optimizer": True,
          **v["ds"]}
    zero.pop("zero_allow_untested_optimizer", None)
    ds["zero_optimization"] = zero
    if v["client"] is None:
        ds["optimizer"] = v["optimizer"] or ADAMW
    return ds


def prepare():
    import numpy as np, torch
    from transformers import GPT2Config, GPT2LMHeadModel
    for name, sizes in {"mini": (64, 32, 16, 2), "micro": (32, 32, 6, 1)}.items():
        torch.manual_seed(7)
        vocab, positions, width, layers = sizes
        c = GPT2Config(vocab_size=vocab, n_positions=positions, n_embd=width, n_layer=layers, n_head=2, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        model = GPT2LMHeadModel(c)
        with torch.no_grad():  # All layer norms differ, so that a wrong order is detected.
            for p in model.parameters():
                p.add_(torch.randn(p.shape) * 0.02)
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
    rng = np.random.default_rng(7)
    (np.cumsum(rng.integers(0, 5, 96 * SEQ)) % 64).astype(np.uint16).tofile(HERE / "tokens.bin")


def worker(name):
    import math, numpy as np, torch, deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from transformers import GPT2LMHeadModel
    v, out = VARIANTS[name], HERE / name
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.use_deterministic_algorithms(True)
    toks = np.fromfile(HERE / "tokens.bin", dtype=np.uint16).astype(np.int64)
    if v["model"] == "micro":
        toks = toks % 32
    n = len(toks) // SEQ
    seqs = torch.from_numpy(toks[: n * SEQ].reshape(n, SEQ))
    mine = list(range(rank, n, world))

    def engine():
        model = GPT2LMHeadModel.from_pretrained(HERE / v["model"])
        model.train()
        for key, p in model.named_parameters():
            p.requires_grad = not any(f in key for f in v["frozen"])
        params = list(model.parameters())
        if v["groups"]:
            decay, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
            params = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = None
        if v["client"] == "sgd":
            optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        elif v["client"] == "adagrad":
            optimizer = torch.optim.Adagrad(params, lr=1e-2)
        elif v["client"] == "lion":
            optimizer = Lion(params)
        if v["fused"]:  # The wrapper of fused Adam, which the CPU does not have, writes another layout.
            import deepspeed.runtime.engine as runtime
            runtime.FusedAdam = torch.optim.AdamW
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if name == "s0_sgd" else None
        eng, opt, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(v), lr_scheduler=scheduler,
                                              model_parameters=None if optimizer else params)
        return eng, opt

    class Lion(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_((m * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
                    m.mul_(0.99).add_(p.grad, alpha=0.01)

    def run(eng, opt, first, last, save=None):
        mb, gas = eng.train_micro_batch_size_per_gpu(), eng.gradient_accumulation_steps()
        pos, rows = first * mb * gas, []
        for s in range(first, last):
            losses = []
            for _ in range(gas):
                idx = [mine[(pos + i) % len(mine)] for i in range(mb)]
                pos += mb
                x = seqs[idx]
                loss = eng(input_ids=x, labels=x).loss
                eng.backward(loss)
                losses.append(loss.detach().float().item())
                lr = float(opt.param_groups[0]["lr"])
                scale = float(getattr(opt, "cur_scale", getattr(opt, "loss_scale", 1.0)) or 1.0)
                eng.step()
            l = torch.tensor([sum(losses) / len(losses)], dtype=torch.float64)
            torch.distributed.all_reduce(l)
            l /= world
            gn = eng.get_global_grad_norm()
            applied = bool(eng.was_step_applied()) if v["ds"].get("fp16") else True
            rows.append(dict(step=s + 1, loss=l.item(), lr=lr, grad_norm=None if (gn is None or not applied) else float(gn),
                             loss_scale=scale, skipped=not applied))
            if save == s + 1:
                eng.save_checkpoint(out, tag=v["tag"], exclude_frozen_parameters=v["exclude"])
                known = expected(eng, opt)
                if rank == 0:
                    (out / "expected.json").write_text(json.dumps(known, indent=1) + "\n")
        return rows

    def digest(t):
        return hashlib.sha256(t.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()

    def of_fp16_optimizer(opt):
        """Masters and arrays of the wrappers of stage 0, which have no accessors: one flat tensor per group
        (fused), or one tensor per parameter (unfused)."""
        found = {}
        for g, group in enumerate(opt.fp16_groups):
            at = 0
            for i, p in enumerate(group):
                whole = opt.fp32_groups_flat[g] if hasattr(opt, "fp32_groups_flat") else opt.fp32_groups[g][i]
                state = opt.optimizer.state[whole]
                cut = slice(at, at + p.numel()) if hasattr(opt, "fp32_groups_flat") else slice(None)
                at += p.numel()
                arrays = {k: t.flatten()[cut] for k, t in state.items() if torch.is_tensor(t) and t.dim() > 0}
                found[p] = (whole.data.flatten()[cut], arrays)
        return found

    def of_partitions(opt, keys):
        """Arrays of stages 1 and 2, assembled from the partitions of all ranks."""
        found = {}
        for g, group in enumerate(opt.round_robin_bit16_groups):
            offsets = opt.round_robin_bit16_offsets[g]
            state = opt.optimizer.state[opt.single_partition_of_fp32_groups[g]]
            for k in keys:
                parts = [torch.empty_like(state[k]) for _ in range(world)]
                torch.distributed.all_gather(parts, state[k].contiguous())
                whole = torch.cat([t.flatten() for t in parts])
                for p, at in zip(group, offsets):
                    found.setdefault(p, {})[k] = whole[at:at + p.numel()]
        return found

    def expected(eng, opt):
        base = getattr(opt, "optimizer", opt)
        keys, steps = [], []
        for state in base.state.values():
            for k, t in state.items():
                if k == "step":
                    steps.append(int(t))
                elif torch.is_tensor(t) and k not in keys:
                    keys.append(k)
        wrapped = of_fp16_optimizer(opt) if hasattr(opt, "fp32_groups_flat") or hasattr(opt, "fp32_groups") else {}
        parts = of_partitions(opt, keys) if hasattr(opt, "round_robin_bit16_groups") else {}
        names, ties = {}, {}
        for key, p in eng.module.named_parameters(remove_duplicate=False):
            if p in names:
                ties.setdefault(names[p], []).append(key)
            else:
                names[p] = key
        params = []
        for p, key in names.items():
            shape = list(getattr(p, "ds_shape", p.shape))
            arrays, full = {}, None
            if p in wrapped:
                full, arrays = wrapped[p]
            elif p.requires_grad:
                # The accessors are wrong with round_robin_gradients; in f32 the model contains the masters.
                accessor = eng.zero_optimization() and "round_robin_gradients" not in v["zero"]
                full = safe_get_full_fp32_param(p) if accessor else p.data
                for k in keys if p not in parts else ():
                    t = safe_get_full_optimizer_state(p, k) if eng.zero_optimization() else base.state[p].get(k)
                    arrays[k] = t
                arrays.update(parts.get(p, {}))
            elif hasattr(p, "ds_id"):
                with deepspeed.zero.GatheredParameters([p]):
                    full = p.data.clone()
            else:
                full = p.data
            assert full.numel() == math.prod(shape), (key, full.shape, shape)
            params.append(dict(name=key, shape=shape, trainable=p.requires_grad, aliases=ties.get(key, []), weights=digest(full),
                               first=full.flatten()[:2].float().tolist(), moments={k: digest(t) for k, t in arrays.items()}))
        scaler = None
        if v["ds"].get("fp16"):
            s = getattr(opt, "loss_scaler", None) or opt.loss_scale_config
            scaler = dict(scale=float(s.cur_scale), hysteresis=int(getattr(s, "cur_hysteresis", 1)),
                          last_overflow=int(s.last_overflow_iter), iteration=int(s.cur_iter))
        return dict(version=deepspeed.__version__, stage=v["stage"], world_size=world, global_steps=eng.global_steps,
                    skipped_steps=eng.skipped_steps, global_samples=eng.global_samples, steps=sorted(set(steps)),
                    schedule=getattr(eng.lr_scheduler, "last_batch_iteration", None), loss_scale=scaler,
                    moments=keys, parameters=params)

    eng, opt = engine()
    rows = run(eng, opt, 0, v["steps"], v["save"])
    if v["steps"] > v["save"]:
        eng.destroy()
        eng, opt = engine()
        eng.load_checkpoint(out)
        resumed = run(eng, opt, v["save"], v["steps"])
        if rank == 0:
            trace = dict(ds=config(v), world=world, seq=SEQ, saved_after=v["save"], rows=rows, resumed=resumed)
            (out / "trace.json").write_text(json.dumps(trace, indent=1) + "\n")
    if rank == 0:
        second_opinion(name, digest)


def pipeline_worker(name):
    """Trains GPT-2 as a pipeline of the modules of transformers, with a tied embedding."""
    import numpy as np, torch, deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from torch.nn import functional as F
    from transformers import GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    v, out = VARIANTS[name], HERE / name
    dp = v["world"] // v["pipeline"]
    torch.use_deterministic_algorithms(True)
    whole = GPT2LMHeadModel.from_pretrained(HERE / v["model"])
    c, parts = whole.config, whole.transformer

    class Embedding(torch.nn.Embedding):
        def __init__(self):
            super().__init__(c.vocab_size, c.n_embd)
            self.load_state_dict(parts.wte.state_dict())

    class Positions(torch.nn.Embedding):
        def __init__(self):
            super().__init__(c.n_positions, c.n_embd)
            self.load_state_dict(parts.wpe.state_dict())

        def forward(self, x):
            return x + self.weight[:x.shape[1]]

    class Block(GPT2Block):
        def __init__(self, i):
            super().__init__(c, layer_idx=i)
            self.load_state_dict(parts.h[i].state_dict())

        def forward(self, x):
            y = super().forward(x)
            return y if torch.is_tensor(y) else y[0]

    class Head(torch.nn.Linear):
        def __init__(self):
            super().__init__(c.n_embd, c.vocab_size, bias=False)
            self.load_state_dict(parts.wte.state_dict())

    class Norm(torch.nn.LayerNorm):
        def __init__(self):
            super().__init__(c.n_embd, eps=c.layer_norm_epsilon)
            self.load_state_dict(parts.ln_f.state_dict())

    def loss_fn(logits, labels):
        return F.cross_entropy(logits[:, :-1].float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))

    def engine():
        layers = [TiedLayerSpec("wte", Embedding), LayerSpec(Positions), *[LayerSpec(Block, i) for i in range(c.n_layer)],
                  LayerSpec(Norm), TiedLayerSpec("wte", Embedding, forward_fn=lambda m, x: x @ m.weight.t())]
        if v["untied"]:
            layers[0], layers[-1] = LayerSpec(Embedding), LayerSpec(Head)
        model = PipelineModule(layers=layers, num_stages=v["pipeline"], loss_fn=loss_fn, partition_method="parameters")
        for key, p in model.named_parameters():
            p.requires_grad = not any(f in key for f in v["frozen"])
        trained = [p for p in model.parameters() if p.requires_grad]
        return deepspeed.initialize(model=model, model_parameters=trained, config=config(v))[:2]

    toks = np.fromfile(HERE / "tokens.bin", dtype=np.uint16).astype(np.int64)
    n = len(toks) // SEQ
    seqs = torch.from_numpy(toks[: n * SEQ].reshape(n, SEQ))

    def batches(eng, done):
        mine, pos = list(range(eng.grid.get_data_parallel_rank(), n, dp)), done
        mb = eng.train_micro_batch_size_per_gpu()
        while True:
            x = seqs[[mine[(pos + i) % len(mine)] for i in range(mb)]]
            pos += mb
            yield x, x

    def digest(t):
        return hashlib.sha256(t.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()

    def arrays(eng, opt, p, key):
        """Masters and moments of a parameter, of all replicas."""
        if not p.requires_grad:
            return p.data, {}
        if not eng.zero_optimization() and not hasattr(opt, "round_robin_bit16_groups"):
            base = getattr(opt, "optimizer", opt)
            full = p
            for group, masters in zip(getattr(opt, "fp16_groups", []), getattr(opt, "fp32_groups", [])):
                full = next((m for q, m in zip(group, masters) if q is p), full)
            return full.data, {k: base.state[full][k] for k in ("exp_avg", "exp_avg_sq")}
        group = next(i for i, ps in enumerate(opt.round_robin_bit16_groups) if any(q is p for q in ps))
        at = next(o for q, o in zip(opt.round_robin_bit16_groups[group], opt.round_robin_bit16_offsets[group]) if q is p)
        masters = opt.single_partition_of_fp32_groups[group]
        found = {}
        for k, t in {"weights": masters, **{k: opt.optimizer.state[masters][k] for k in ("exp_avg", "exp_avg_sq")}}.items():
            pieces = [torch.empty_like(t.data) for _ in range(dp)]
            torch.distributed.all_gather(pieces, t.data.contiguous(), group=eng.grid.get_data_parallel_group())
            found[k] = torch.cat([piece.flatten() for piece in pieces])[at:at + p.numel()]
        return found.pop("weights"), found

    def expected(eng, opt):
        params = []
        for key, p in eng.module.named_parameters():
            full, moments = arrays(eng, opt, p, key)
            # Without partitions, the files name no keys of tied layers; the layer is the first.
            key = key.replace("tied_modules.wte", "0") if v["stage"] == 0 else key
            params.append(dict(name=key, shape=list(p.shape), trainable=p.requires_grad, aliases=[], weights=digest(full),
                               first=full.flatten()[:2].float().tolist(), moments={k: digest(t) for k, t in moments.items()}))
        stages = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(stages, params)
        params = {p["name"]: p for stage in stages for p in stage}
        scaler = None
        if v["ds"].get("fp16"):
            s = opt.loss_scale_config
            scaler = dict(scale=float(s.cur_scale), hysteresis=1, last_overflow=int(s.last_overflow_iter), iteration=int(s.cur_iter))
        base = getattr(opt, "optimizer", opt)
        steps = sorted({int(state["step"]) for state in base.state.values() if "step" in state})
        return dict(version=deepspeed.__version__, stage=v["stage"], world_size=dp, pipeline_stages=v["pipeline"], global_steps=eng.global_steps,
                    skipped_steps=eng.skipped_steps, global_samples=eng.global_samples, steps=steps,
                    schedule=eng.lr_scheduler.last_batch_iteration, loss_scale=scaler, moments=["exp_avg", "exp_avg_sq"], parameters=list(params.values()))

    def run(eng, opt, first, last, save=None):
        per_step = eng.train_micro_batch_size_per_gpu() * eng.gradient_accumulation_steps()
        it, rows = batches(eng, first * per_step), []
        for s in range(first, last):
            loss = eng.train_batch(it if eng.is_first_stage() or eng.is_last_stage() else None)
            lr = float(opt.param_groups[0]["lr"])
            rows.append(dict(step=s + 1, loss=float(loss), lr=lr, grad_norm=None, loss_scale=None, skipped=False))
            if save == s + 1:
                eng.save_checkpoint(out, tag=v["tag"])
                known = expected(eng, opt)
                if torch.distributed.get_rank() == 0:
                    (out / "expected.json").write_text(json.dumps(known, indent=1) + "\n")
        return rows

    deepspeed.init_distributed("gloo")
    eng, opt = engine()
    rows = run(eng, opt, 0, v["steps"], v["save"])
    if v["steps"] > v["save"]:
        eng, opt = engine()
        eng.load_checkpoint(out)
        resumed = run(eng, opt, v["save"], v["steps"])
        assert eng.skipped_steps == 0
        if torch.distributed.get_rank() == 0:
            trace = dict(ds=config(v), world=dp, pipeline_stages=v["pipeline"], seq=SEQ, saved_after=v["save"], rows=rows, resumed=resumed)
            (out / "trace.json").write_text(json.dumps(trace, indent=1) + "\n")


def second_opinion(name, digest):
    """Checks that the output of zero_to_fp32 equals the state of the engine."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    known = json.loads((HERE / name / "expected.json").read_text())
    if known["stage"] == 0 or VARIANTS[name]["exclude"]:
        return
    try:
        state = get_fp32_state_dict_from_zero_checkpoint(HERE / name)
    except Exception as e:  # zero_to_fp32 does not support the files of BF16_Optimizer.
        print("no second opinion:", name, repr(e))
        return
    for p in known["parameters"]:
        for key in [p["name"], *p["aliases"]]:
            if key not in state:
                print("not in zero_to_fp32:", name, key)
                continue
            if p["weights"] != digest(state[key]):
                print("DIFFERS", name, key)
    print("second opinion:", name)


def main():
    if "RANK" in os.environ:
        return (worker if VARIANTS[sys.argv[1]]["pipeline"] == 1 else pipeline_worker)(sys.argv[1])
    prepare()
    names = sys.argv[1:] or list(VARIANTS)
    env = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    for i, name in enumerate(names):
        shutil.rmtree(HERE / name, ignore_errors=True)
        world = VARIANTS[name]["world"]
        run = subprocess.run(["torchrun", "--master-port", str(29700 + 40 * (os.getpid() % 40) + i), "--nproc-per-node", str(world), __file__, name],
                             env=env, capture_output=True, text=True)
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (HERE / name / script).unlink(missing_ok=True)
        said = [l for l in run.stdout.splitlines() if "second opinion" in l or "DIFFERS" in l or "not in zero" in l]
        print(name, "ok" if run.returncode == 0 else "FAILED\n" + run.stderr[-3000:], *said, flush=True)
    shutil.rmtree(HERE / "micro", ignore_errors=True)


if __name__ == "__main__":
    main()
