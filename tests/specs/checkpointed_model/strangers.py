"""GPT-2 of the transformers library, with random weights and three blocks."""

import logging
import os

import pytest

from kit.laws import draw
from specs.checkpointed_model.steps import Step


def stranger(train=True):
    """A step of such a model."""

    def build(run, prepare, device):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        # The import takes over a second, so it waits for the first spec that needs it.
        library = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
        options = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 24, "vocab_size": 64}
        # On cuda such attention is one operation that draws random numbers, and not to be kept.
        options["attn_pdrop"] = 0.0 if device.type == "cuda" else 0.1
        draw.seed(5)
        config = library.GPT2Config(**options, bos_token_id=0, eos_token_id=0, use_cache=False)
        model = library.GPT2Model(config).to(device)
        x = draw.randint(64, (3, 24), device=device)
        blocks = list(model.train().h)
        prepare(model, library.GPT2Block)
        model.train(train)
        return Step(model, lambda: model(x).last_hidden_state, [block.ln_1 for block in blocks])

    return build
