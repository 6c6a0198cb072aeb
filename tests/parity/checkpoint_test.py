"""Check that Lockstep's checkpoints and Python's safetensors can read each other's files.

usage: checkpoint_test.py CHECKPOINT_PROBE
"""

import json
import os
import subprocess
import sys
import tempfile

import torch

try:
    import safetensors
    import safetensors.torch
except ImportError:
    print("skipped: this Python has no package safetensors")
    sys.exit(77)


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


def model():
    made = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    made[3].to(torch.bfloat16)
    made.register_buffer("flags", torch.tensor([True, False, True]))
    made.register_buffer("counts", torch.tensor([1, -2, 3], dtype=torch.int16))
    return made


def raw(module):
    values = [p for _, p in module.named_parameters()] + [b for _, b in module.named_buffers()]
    return b"".join(v.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for v in values)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def main():
    probe = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, bytes_file = (os.path.join(folder, name) for name in ("ours.safetensors", "theirs.safetensors", "raw"))

        subprocess.run([probe, "write", ours, bytes_file], check=True, timeout=200)
        tensors = safetensors.torch.load_file(ours)
        loaded = model()
        named = {name: tensor for name, tensor in tensors.items() if not name.startswith(("optimizer/", "rng/"))}
        loaded.load_state_dict(named, strict=True)
        check(sorted(named) == sorted(loaded.state_dict()), f"the names are Python's: {sorted(named)}")
        expected = {name: tensor for name, tensor in loaded.state_dict().items()}
        check(raw_by_name(expected) == raw_by_name(named), "the model's bytes")
        check(raw(loaded) == read(bytes_file), "the bytes that C++ has in memory")
        with safetensors.safe_open(ours, framework="pt") as opened:
            metadata = opened.metadata()
        check(metadata["format"] == "pt", "transformers rejects files whose metadata does not name PyTorch")
        manifest = json.loads(metadata["lockstep"])
        check(manifest["values"] == {"epoch": 3, "note": "from C++"}, f"the values: {manifest['values']}")
        check(manifest["optimizer"]["kind"] == "AdamW", "the optimizer's kind")
        group = manifest["optimizer"]["groups"][0]
        check(group["options"]["betas"] == [0.9, 0.95], f"its options: {group['options']}")
        check(group["parameters"] == [name for name, _ in loaded.named_parameters()], "its parameters")
        check(manifest["optimizer"]["counts"]["0.weight"] == {"step": 3}, "its steps")
        check(manifest["states"]["scheduler"][0]["last_epoch"] == 3, "the scheduler's state")
        # Load the state into Python's optimizer, and the generator's state into Python's generator.
        optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.1)
        for p, (name, _) in zip(loaded.parameters(), loaded.named_parameters()):
            optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": tensors[f"optimizer/{name}/exp_avg"],
                                  "exp_avg_sq": tensors[f"optimizer/{name}/exp_avg_sq"]}
            check(optimizer.state[p]["exp_avg"].shape == p.shape, f"the moments of {name}")
            p.grad = torch.ones_like(p)
        optimizer.step()
        torch.set_rng_state(tensors["rng/0/0"])

        torch.manual_seed(8)
        source = model()
        with torch.no_grad():
            for tensor in source.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape))
        safetensors.torch.save_file(source.state_dict(), theirs, metadata={"format": "pt"})
        subprocess.run([probe, "read", theirs, bytes_file], check=True, timeout=200)
        check(raw(source) == read(bytes_file), "what Python wrote, as C++ reads it")
        damaged = os.path.join(folder, "damaged.safetensors")
        with open(damaged, "wb") as file:
            file.write(read(theirs)[:-1])
        refused = subprocess.run([probe, "read", damaged, bytes_file], capture_output=True, text=True, timeout=200)
        check(refused.returncode != 0 and damaged in refused.stderr, f"a damaged file is named: {refused.stderr[-300:]}")
    print("both read each other's files")


def raw_by_name(tensors):
    return {name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()
