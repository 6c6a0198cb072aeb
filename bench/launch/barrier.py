"""Started by bench_launch under torchrun: runs one barrier."""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
