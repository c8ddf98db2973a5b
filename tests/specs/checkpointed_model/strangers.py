"""GPT-2 and ViT of the transformers library, with random weights and four blocks."""

import logging
import os

import pytest
import torch

from kit.laws import draw
from specs.checkpointed_model.steps import Step

_LAYERS = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 48, "vocab_size": 64}
_GPT2 = {**_LAYERS, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
_SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "image_size": 48}
_VIT = {**_SIZES, "intermediate_size": 128, "patch_size": 8, "hidden_dropout_prob": 0.1}


class Stranger:
    """A model, its input, and `hidden`, an input of a block."""

    def __init__(self, name, device):
        library = [_module(name, kind) for kind in ("modeling", "configuration")]
        prefix, options, child = {
            "gpt2": ("GPT2", {**_GPT2, "attn_pdrop": 0.1}, "ln_1"),
            "vit": ("ViT", {**_VIT, "attention_probs_dropout_prob": 0.1}, "layernorm_before"),
        }[name]
        # On cuda such attention is one operation that draws random numbers, and not to be kept.
        options |= {
            k: 0.0 for k in options if device.type == "cuda" and "att" in k and "num" not in k
        }
        draw.seed(5)
        config = getattr(library[1], f"{prefix}Config")(**options)
        self.model = getattr(library[0], f"{prefix}Model")(config).to(device).train()
        self.block_type = getattr(library[0], f"{prefix}{'Block' if name == 'gpt2' else 'Layer'}")
        self.blocks = [m for m in self.model.modules() if isinstance(m, self.block_type)]
        self.counted = [getattr(block, child) for block in self.blocks]
        pictures = (draw.randn(3, 3, 48, 48, device=device), 37)
        self.x, length = {"gpt2": (draw.randint(64, (3, 48), device=device), 48)}.get(
            name, pictures
        )
        self.hidden = draw.randn(3, length, 32, device=device, requires_grad=True)
        self.hidden.grad = torch.zeros_like(self.hidden)

    def forward(self):
        return self.model(self.x).last_hidden_state


def stranger(name, train=True):
    """A step of such a model."""

    def build(run, prepare, device):
        found = Stranger(name, device)
        prepare(found.model, found.block_type)
        found.model.train(train)
        return Step(found.model, found.forward, found.counted)

    return build


def _module(name, kind):
    """The import takes over a second, so it waits for the first spec that needs it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return pytest.importorskip(f"transformers.models.{name}.{kind}_{name}")
