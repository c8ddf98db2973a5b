"""Makes a CUDA device ready before any clock runs and before any byte is counted.

Whoever uses a GPU first pays for its context, for cuBLAS's workspaces (one in each thread, and
backward has its own) and for every kernel that is loaded at its first call: seconds, and megabytes,
that are no answer's.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.laws.toys import Block
from kit.private_torch import set_allocator_settings


def prepare(device: torch.device) -> None:
    """Set the arithmetic and the allocator that the specs count on, and warm everything up."""
    # Images switch TF32 on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE): 10 bits instead of 23.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    _split_blocks_exactly()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _train(device, dtype)
    torch.cuda.synchronize(device)


def ends_the_gpu(error: BaseException) -> bool:
    """Whether this process cannot use its GPU any more: each later call raises the same."""
    return "device-side assert" in str(error)


def _split_blocks_exactly() -> None:
    # Without this the allocator hands out, and counts, a free block above 1 MiB whole where up to
    # 1 MiB more was free than was asked for: the same step would read differently.
    set_allocator_settings("expandable_segments:True")


def _train(device: torch.device, dtype: torch.dtype) -> None:
    """Two steps with about everything that katas are made of."""
    model = nn.Sequential(
        nn.Embedding(11, 64), Block(64, heads=2), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 11)
    ).to(device)
    norm = nn.Sequential(nn.Conv1d(5, 5, 3), nn.BatchNorm1d(5), nn.ReLU()).to(device)
    parameters = [*model.parameters(), *norm.parameters()]
    optimizers = [torch.optim.Adam(parameters), torch.optim.SGD(parameters, momentum=0.9)]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    tokens = torch.arange(5 * 32, device=device).view(5, 32) % 11
    for optimizer in optimizers:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            # A checkpoint's second run is a forward pass in the thread of the backward pass.
            logits = checkpoint(model, tokens, use_reentrant=False)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss = loss + norm(logits.float()[:, :5]).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
