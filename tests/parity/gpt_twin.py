"""examples/05_gpt in PyTorch: continues from the weights and batches written by `05_gpt --dump DIR`, and prints the same lines.

usage: gpt_twin.py DIR

Runs in the Python that has torch. Dropout is 0, because the two draw different random numbers.
"""

import json
import os
import struct
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}


def read_safetensors(path):
    """Return the tensors by name, and the values saved with them."""
    with open(path, "rb") as file:
        data = bytearray(file.read())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    values = json.loads(header.pop("__metadata__")["lockstep"])["values"]
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(data[8 + length + begin : 8 + length + end], dtype=DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, values


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, layers, heads, tied):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, text):
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def losses_of(folder):
    weights, values = read_safetensors(os.path.join(folder, "model.safetensors"))
    batches = read_safetensors(os.path.join(folder, "batches.safetensors"))[0]["batches"]
    vocabulary, width = weights["tokens.weight"].shape
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    model = GPT(vocabulary, len(weights["positions.weight"]), width, layers, values["heads"], values["tied"])
    model.to(weights["tokens.weight"].dtype)
    model.load_state_dict(weights)

    optimizer = torch.optim.AdamW(model.parameters(), lr=values["lr"])
    for tokens in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if values["clip"] > 0:
            nn.utils.clip_grad_norm_(model.parameters(), values["clip"])
        optimizer.step()
        yield loss


def main():
    torch.set_num_threads(1)
    for step, loss in enumerate(losses_of(sys.argv[1]), 1):
        digits = 12 if loss.dtype == torch.float64 else 6
        print(f"step {step} loss {loss.item():.{digits}f}", flush=True)


if __name__ == "__main__":
    main()
