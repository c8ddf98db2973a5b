"""GPT-2 of the transformers library, with random weights and three blocks."""

import logging
import os

import pytest
import torch

from kit.laws import draw
from specs.checkpointed_model.steps import Step

_WIDTH, _LENGTH = 32, 24
_SIZES = {"n_layer": 3, "n_embd": _WIDTH, "n_head": 2, "n_positions": _LENGTH, "vocab_size": 64}


class Stranger:
    """The model, its input, and `hidden`, an input of a block."""

    def __init__(self, device):
        library, configs = _module("modeling"), _module("configuration")
        # On cuda such attention is one operation that draws random numbers, and not to be kept.
        options = {**_SIZES, "attn_pdrop": 0.0 if device.type == "cuda" else 0.1}
        draw.seed(5)
        config = configs.GPT2Config(**options, bos_token_id=0, eos_token_id=0, use_cache=False)
        self.model, self.block_type = library.GPT2Model(config).to(device), library.GPT2Block
        self.blocks = list(self.model.train().h)
        self.x = draw.randint(64, (3, _LENGTH), device=device)
        self.hidden = draw.randn(3, _LENGTH, _WIDTH, device=device, requires_grad=True)
        self.hidden.grad = torch.zeros_like(self.hidden)

    def forward(self):
        return self.model(self.x).last_hidden_state


def stranger(train=True):
    """A step of such a model."""

    def build(run, prepare, device):
        found = Stranger(device)
        prepare(found.model, found.block_type)
        found.model.train(train)
        return Step(found.model, found.forward, [block.ln_1 for block in found.blocks])

    return build


def _module(kind):
    """The import takes over a second, so it waits for the first spec that needs it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return pytest.importorskip(f"transformers.models.gpt2.{kind}_gpt2")
