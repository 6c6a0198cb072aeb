"""Compare optimizers, schedules, clipping, GradScaler and autocast with PyTorch's: every bit, over many seeds.

usage: train_test.py TRAIN_PROBE

Python generates the inputs and computes the expected results; train_probe computes the same in C++; the bytes are compared.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import torch

warnings.filterwarnings("ignore")
SHAPES = [(), (1,), (7,), (10, 1), (16,), (3, 5), (33,), (64, 33), (2, 3, 3, 3), (0,), (257,)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Cases:
    """The probe's input and its expected output."""

    def __init__(self):
        self.cases, self.inputs, self.expected, self.ends, self.length = [], [], [], [], 0

    def begin(self, **case):
        self.cases.append(case)
        self.ends.append(None)
        return case

    def give(self, tensor):
        self.inputs.append(raw(tensor))

    def expect(self, value):
        data = raw(value) if isinstance(value, torch.Tensor) else np.float64(value).tobytes()
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float64
        self.expected.append((data, dtype, len(self.cases) - 1))


def raw(tensor):
    tensor = tensor.detach().contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def describe(tensor):
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "strides": list(tensor.stride())}


def parameter(shape, dtype, draw):
    value = torch.randn(shape).to(dtype)
    if len(shape) == 4 and draw.random() < 0.5:
        value = value.to(memory_format=torch.channels_last)
    elif len(shape) == 2 and draw.random() < 0.3:
        value = value.t().contiguous().t()
    return value.requires_grad_()


def gradient(like, draw):
    value = torch.randn(like.shape)
    kind = draw.random()
    if kind < 0.1:
        value *= 1e-20  # So that the squares are denormals.
    elif kind < 0.15:
        value *= 1e15 if like.dtype in (torch.float32, torch.float64) else 10
    elif kind < 0.2:
        value *= 0
    elif kind < 0.23 and value.numel() > 3:
        value.view(-1)[draw.randrange(value.numel())] = draw.choice([math.inf, -math.inf, math.nan])
    result = torch.empty_like(like)  # Has the parameter's strides.
    return result.copy_(value.to(like.dtype)).detach()


def tensors(cases, case, draw, steps, absent=0.1, count=None, dtypes=DTYPES):
    """Return parameters, and a function that sets the gradients of a step."""
    chosen = draw.sample(SHAPES, count or draw.randint(2, 6))
    parameters = [parameter(shape, draw.choice(dtypes), draw) for shape in chosen]
    case["tensors"] = [describe(p) for p in parameters]
    case["present"] = [[draw.random() >= absent for _ in parameters] for _ in range(steps)]
    for p in parameters:
        cases.give(p)

    def set_gradients(step):
        for p, present in zip(parameters, case["present"][step]):
            p.grad = gradient(p.detach(), draw) if present else None
            if present:
                cases.give(p.grad)

    return parameters, set_gradients


def optimizer_case(cases, seed, name):
    draw = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    if name == "SGD":
        options = {"lr": draw.choice([1e-3, 0.1, 0.05]), "momentum": draw.choice([0, 0.9, 0.5]),
                   "dampening": draw.choice([0, 0, 0.1]), "weight_decay": draw.choice([0, 0.01, 0.3])}
        options["nesterov"] = options["momentum"] > 0 and options["dampening"] == 0 and draw.random() < 0.5
    else:
        options = {"lr": draw.choice([1e-3, 0.1, 3e-4]), "betas": draw.choice([[0.9, 0.999], [0.9, 0.95], [0.4, 0.9], [0.5, 0.99]]),
                   "eps": draw.choice([1e-8, 1e-8, 1e-3]), "weight_decay": draw.choice([0, 0.01, 0.3]),
                   "amsgrad": draw.random() < 0.3}
    options["maximize"] = draw.random() < 0.2
    case = cases.begin(what="optimizer", optimizer=name, options=options)
    parameters, set_gradients = tensors(cases, case, draw, draw.choice([3, 30, 60]))
    optimizer = getattr(torch.optim, name)(parameters, **{k: tuple(v) if k == "betas" else v for k, v in options.items()})
    for step in range(len(case["present"])):
        set_gradients(step)
        optimizer.step()
    for p in parameters:
        cases.expect(p)
        state = optimizer.state.get(p, {})
        for field in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"):
            if state.get(field) is not None:
                cases.expect(state[field])


def clip_case(cases, seed):
    draw = random.Random(f"clip {seed}")
    torch.manual_seed(seed)
    norm_type = draw.choice([2.0, 2.0, 1.0, 3.0, math.inf])
    case = cases.begin(what="clip", max_norm=draw.choice([0.1, 1.0, 100.0]), norm_type=norm_type if norm_type < math.inf else "inf")
    if draw.random() < 0.3:
        case["clip_value"] = 0.25
    parameters, set_gradients = tensors(cases, case, draw, 1, dtypes=[draw.choice([torch.float32, torch.float64, torch.bfloat16])])
    set_gradients(0)
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    if norm_type == math.inf and len(grads) < len([p for p in parameters if p.grad is not None]):
        case["norm_type"] = norm_type = 2.0  # The largest of nothing is undefined.
    if "clip_value" in case:
        torch.nn.utils.clip_grad_value_(parameters, 0.25)
    else:
        cases.expect(torch.nn.utils.clip_grad_norm_(parameters, case["max_norm"], norm_type))
    for p in parameters:
        if p.grad is not None:
            cases.expect(p.grad)


def scaler_case(cases, seed):
    draw = random.Random(f"scaler {seed}")
    torch.manual_seed(seed)
    case = cases.begin(what="scaler", init_scale=2.0 ** draw.randint(-3, 16), growth_interval=draw.randint(1, 4))
    parameters, set_gradients = tensors(cases, case, draw, 12, absent=0, dtypes=[torch.float32, torch.float64])
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=case["init_scale"], growth_interval=case["growth_interval"])
    for step in range(12):
        set_gradients(step)
        cases.expect(scaler.scale(torch.full((), 0.3)))
        if step % 2 == 0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        cases.expect(scaler.get_scale())
        for p in parameters:
            cases.expect(p)
    for _, value in sorted(scaler.state_dict().items()):
        cases.expect(value)


def autocast_case(cases, seed):
    torch.manual_seed(seed)
    to = random.Random(seed).choice([torch.bfloat16, torch.float16])
    case = cases.begin(what="autocast", to=str(to).removeprefix("torch."))
    x, w, b, v = (torch.randn(shape).requires_grad_() for shape in ((8, 12), (16, 12), (16,), (16, 5)))
    case["tensors"] = [describe(t) for t in (x, w, b, v)]
    for t in (x, w, b, v):
        cases.give(t)
    with torch.autocast("cpu", to):
        hidden = torch.relu(torch.nn.functional.linear(x, w, b))
        hidden = torch.nn.functional.layer_norm(hidden, (16,))
        result = torch.softmax(torch.matmul(hidden, v), -1)
    cases.expect(result.float())
    result.sum().backward()
    for t in (x, w, b, v):
        cases.expect(t.grad)


def make_schedule(optimizer, o):
    kind, given = o["kind"], {k: v for k, v in o.items() if k != "kind"}
    if kind == "LambdaLR":
        given["lr_lambda"] = lambda step: 1.0 / float(1 + step)
    return getattr(torch.optim.lr_scheduler, kind)(optimizer, **given)


def schedule_case(cases, seed):
    draw = random.Random(f"schedule {seed}")
    steps = draw.choice([10, 100, 500])
    case = cases.begin(what="schedule", lrs=[draw.uniform(1e-4, 1), draw.uniform(1e-4, 1)], steps=steps)
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.Adam([{"params": [a], "lr": case["lrs"][0]}, {"params": [b], "lr": case["lrs"][1]}])
    if seed % 5 == 0:
        case["one_cycle"] = {"max_lr": draw.uniform(0.01, 1), "total_steps": steps, "pct_start": draw.uniform(0.1, 0.6),
                             "anneal_strategy": draw.choice(["cos", "linear"]), "three_phase": draw.random() < 0.3}
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **case["one_cycle"])
    else:
        def one():
            total = draw.randint(1, 60)
            return draw.choice([
                {"kind": "ConstantLR", "factor": draw.uniform(0.01, 1), "total_iters": total},
                {"kind": "LinearLR", "start_factor": draw.uniform(0.001, 1), "end_factor": draw.uniform(0, 1), "total_iters": total},
                {"kind": "CosineAnnealingLR", "T_max": total, "eta_min": draw.choice([0.0, 1e-5])},
                {"kind": "ExponentialLR", "gamma": draw.uniform(0.5, 1)},
                {"kind": "LambdaLR"}])
        count = draw.choice([1, 1, 2, 3])
        case["schedules"] = [one() for _ in range(count)]
        case["milestones"] = sorted(draw.randint(1, steps) for _ in range(count - 1))
        made = [make_schedule(optimizer, o) for o in case["schedules"]]
        scheduler = made[0] if count == 1 else torch.optim.lr_scheduler.SequentialLR(optimizer, made, case["milestones"])
    for step in range(steps + 1):
        for group in optimizer.param_groups:
            cases.expect(group["lr"])
            cases.expect(group["betas"][0])
        if step < steps:
            scheduler.step()


def same(a, b, dtype):
    """Compare every bit, but treat all NaNs as equal."""
    if a == b:
        return True
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x, y = (torch.frombuffer(bytearray(each), dtype=dtype) for each in (a, b))
    equal = (x.view(integers) == y.view(integers)) | (x.isnan() & y.isnan())
    return bool(equal.all())


def first_difference(a, b, dtype):
    if len(a) != len(b):
        return f"{len(b)} bytes instead of {len(a)}"
    x, y = (torch.frombuffer(bytearray(each), dtype=dtype) for each in (a, b))
    at = int(((x != y) & ~(x.isnan() & y.isnan())).nonzero()[0])
    return f"{y[at].item()!r} instead of {x[at].item()!r} ({dtype}, element {at} of {len(x)})"


def compare(cases, probe, environment):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "cases.json"), "w", encoding="utf-8") as file:
            json.dump(cases.cases, file)
        with open(os.path.join(folder, "in.bin"), "wb") as file:
            file.writelines(cases.inputs)
        subprocess.run([probe, folder], check=True, env={**os.environ, **environment}, timeout=500)
        with open(os.path.join(folder, "out.bin"), "rb") as file:
            got = file.read()
    at, wrong = 0, {}
    for data, dtype, case in cases.expected:
        if not same(data, got[at:at + len(data)], dtype):
            wrong.setdefault(case, []).append(first_difference(data, got[at:at + len(data)], dtype))
        at += len(data)
    for case, places in list(wrong.items())[:5]:
        print(f"{len(places)} results differ, such as {places[0]}: {json.dumps(cases.cases[case])[:1000]}")
    if wrong:
        raise SystemExit(f"failed: {len(wrong)} of {len(cases.cases)} cases differ")
    if at != len(got):
        raise SystemExit(f"failed: {len(got)} bytes came, {at} were expected")
    kinds = {}
    for case in cases.cases:
        name = case.get("optimizer", case["what"])
        kinds[name] = kinds.get(name, 0) + 1
    print(f"{torch.backends.cpu.get_cpu_capability()}: {len(cases.expected)} results of {len(cases.cases)} cases are the same to the bit: "
          + ", ".join(f"{count} {name}" for name, count in kinds.items()))


def main():
    probe, seeds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 50
    torch.set_num_threads(1)
    cases = Cases()
    for seed in range(seeds):
        for name in ("Adam", "AdamW", "SGD"):
            optimizer_case(cases, seed, name)
        clip_case(cases, seed)
        scaler_case(cases, seed)
        schedule_case(cases, seed)
        if seed % 5 == 0:
            autocast_case(cases, seed)
    compare(cases, probe, {"OMP_NUM_THREADS": "1"})
    if "ATEN_CPU_CAPABILITY" not in os.environ:  # LibTorch's other kernels.
        for capability in ("avx2", "default"):
            subprocess.run([sys.executable, "-B", __file__, probe, "10"], check=True,
                           env={**os.environ, "ATEN_CPU_CAPABILITY": capability})


if __name__ == "__main__":
    main()
