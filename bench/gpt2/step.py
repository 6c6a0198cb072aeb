"""One rank of bench_gpt2 in PyTorch: the same as step.cpp, with autocast to bfloat16, a fused AdamW and DistributedDataParallel on NCCL
(gloo without a GPU). "compile" applies torch.compile to the model inside it."""

import collections
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width, self.heads = shape["width"], shape["heads"]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(width, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width = shape["width"]
        self.tokens, self.positions = nn.Embedding(shape["vocabulary"], width), nn.Embedding(shape["context"], width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape["layers"]))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape["vocabulary"], bias=False)
        torch.manual_seed(2)  # Same initialisation as model.h.
        residual = 0.02 / (2 * shape["layers"]) ** 0.5
        for each in (self.tokens, self.positions):
            nn.init.normal_(each.weight, 0, 0.02)
        for block in self.blocks:
            for layer in (block.qkv, block.out, block.up, block.down):
                nn.init.normal_(layer.weight, 0, residual if layer in (block.out, block.down) else 0.02)
                nn.init.zeros_(layer.bias)
        self.head.weight = self.tokens.weight

    def forward(self, text, targets):
        x = self.tokens(text) + self.positions.weight[:text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main():
    name, batch, compiled = sys.argv[1], int(sys.argv[2]), "compile" in sys.argv[3:]
    shape = (dict(layers=2, heads=2, width=32, context=16, vocabulary=64) if name == "tiny"
             else dict(layers=12, heads=12, width=768, context=1024, vocabulary=50304))
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(1)
    text = torch.randint(shape["vocabulary"], (batch, shape["context"] + 1)).to(device)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model = Gpt2(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    ready = torch.compile(model) if compiled else model
    ddp = nn.parallel.DistributedDataParallel(ready, device_ids=[0] if cuda else None, gradient_as_bucket_view=True)
    settle = torch.cuda.synchronize if cuda else lambda: None
    loss = None

    def step(call):
        nonlocal loss
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = call(inputs, targets)
        loss.backward()
        optimizer.step()

    def kernels(steps):
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(steps):
                step(ddp)
            settle()
        rows = collections.defaultdict(lambda: [0.0, 0])
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                rows[event.name[:110]][0] += event.device_time_total / 1e3 / steps
                rows[event.name[:110]][1] += 1
        total = sum(ms for ms, _ in rows.values())
        print(f"kernels of a step: {total:.2f} ms in {sum(n for _, n in rows.values()) // steps} launches", file=sys.stderr)
        for row, (ms, n) in sorted(rows.items(), key=lambda item: -item[1][0]):
            if ms > 0.02:
                print(f"{ms:8.3f} ms {100 * ms / total:5.1f} %  {n / steps:6.1f} x  {row}", file=sys.stderr)
        return total

    print("ready", flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        steps = int(steps)
        if kind == "memory":
            answer = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0
        elif kind == "loss":
            answer = loss.item()
        elif kind == "kernels":
            answer = kernels(steps)
        else:
            settle()
            begin = time.perf_counter()
            for _ in range(steps):
                step(ddp if kind == "ddp" else ready)
            settle()
            answer = (time.perf_counter() - begin) / steps * 1e3
        print(answer, flush=True)
    os._exit(0)  # Do not wait for NCCL's threads.


if __name__ == "__main__":
    main()
