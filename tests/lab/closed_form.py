"""What a training step of a decoder holds, by arithmetic: bytes by closed form.

    shape = Shape(layers=32, width=4096, inner=11_008, heads=32, kv_heads=32, words=32_000)
    peak_bytes(shape, Setting(amp=True), tokens=2048)

Sources: Rajbhandari et al., ZeRO (arXiv 1910.02054), for bytes a parameter; Korthikanti et al.
(arXiv 2205.05198) for the way of counting activations, here with attention that keeps no scores;
Micikevicius et al. (arXiv 1710.03740) and torch.amp for autocast. What a GPU needs beside
tensors, workspaces and gaps, is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32, FLOAT16 = 4, 2  # bytes of a number


@dataclass(frozen=True)
class Shape:
    """A decoder. `longest` 0: its positions are no parameters.

    A gated one has three maps in its feed-forward part, no biases, and a head that is no embedding.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    words: int
    longest: int = 0

    @property
    def gated(self) -> bool:
        """Whether it is made as Llama is, and not as GPT-2."""
        return not self.longest

    @property
    def head(self) -> int:
        """The width of an attention head."""
        return self.width // self.heads

    @property
    def projected(self) -> int:
        """Queries, keys and values of one token, in numbers."""
        return (self.heads + 2 * self.kv_heads) * self.head


@dataclass(frozen=True)
class Setting:
    """How it is trained: float32 with Adam, unless something else is said.

    amp         autocast in 16 bits
    checkpoint  each block is recomputed in the backward pass
    pure        weights, gradients and Adam's moments have 16 bits
    """

    amp: bool = False
    checkpoint: bool = False
    pure: bool = False


def block_parameters(shape: Shape) -> int:
    """Parameters of one block: four maps of attention, two or three more, two normalisations."""
    width, inner = shape.width, shape.inner
    maps = width * shape.projected + width * width + (3 if shape.gated else 2) * width * inner
    biases = 0 if shape.gated else shape.projected + width + inner + width
    return maps + biases + (2 if shape.gated else 4) * width


def root_parameters(shape: Shape) -> int:
    """Parameters outside the blocks: embeddings, the last normalisation, a gated one's head."""
    tables = shape.words * (2 if shape.gated else 1) + shape.longest
    return tables * shape.width + (1 if shape.gated else 2) * shape.width


def parameters(shape: Shape) -> int:
    """All parameters."""
    return shape.layers * block_parameters(shape) + root_parameters(shape)


def state_bytes(shape: Shape, setting: Setting) -> dict[str, int]:
    """Bytes of weights, gradients and Adam's two moments, all of the same dtype."""
    weights = (FLOAT16 if setting.pure else FLOAT32) * parameters(shape)
    return {"weights": weights, "gradients": weights, "optimizer state": 2 * weights}


def kept_by_block(shape: Shape, setting: Setting) -> int:
    """Bytes a token that one block keeps for its backward pass, each tensor once.

    The stream (float32 under autocast) before and after attention; then, in the dtype of the maps,

        q, k, v             `projected` numbers, for attention
        attention's output  `width` numbers, for attention itself and for the map behind it
        up                  `inner` numbers, for its activation (gated: gate, its SiLU, and up)

    and the inputs that weights of maps need: both normalised streams, and what goes into `down`.
    Autocast casts the second stream for `gate` and again for `up`. Float32 in any dtype:
    attention's logarithms (one a head), means and deviations (two a normalisation).
    """
    width, inner = shape.width, shape.inner
    casts = 2 if shape.gated and setting.amp else 1
    numbers = shape.projected + (2 + casts) * width + (4 if shape.gated else 2) * inner
    floats = FLOAT32 * (shape.heads + 4)
    return 2 * width * _stream_bytes(setting) + numbers * _map_bytes(setting) + floats


def passing_in_block(shape: Shape, setting: Setting) -> int:
    """Bytes a token that a block's backward pass makes at its highest.

    The gradients of what goes into `up`'s activation (gated: also of the gate), and of the stream.
    """
    gradients = (2 if shape.gated else 1) * shape.inner * _map_bytes(setting)
    return gradients + shape.width * _stream_bytes(setting)


def activation_bytes(shape: Shape, setting: Setting, tokens: int) -> int:
    """Bytes that the blocks keep between the passes: a checkpointed one keeps its input alone."""
    if setting.checkpoint:
        return shape.layers * tokens * shape.width * _stream_bytes(setting)
    return shape.layers * tokens * kept_by_block(shape, setting)


def cast_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes of autocast's 16-bit copies of all maps: one each, until the forward pass ends.

    Without checkpoints they are kept for the backward pass, with them only the head's.
    """
    if not setting.amp:
        return 0
    tables = (shape.words if shape.gated else 0) + shape.longest
    return FLOAT16 * (parameters(shape) - tables * shape.width)


def moments(shape: Shape, setting: Setting, tokens: int) -> dict[str, int]:
    """Bytes alive at each moment of a step that can be its peak.

    Between the beginning and the end of the backward pass activations fall and gradients grow, both
    in even steps, so that one of the ends is highest. `forward` is its end: logits and
    log-probabilities in float32. `backward` begins with the gradients of both.
    """
    states = state_bytes(shape, setting)
    gradients = states["gradients"]
    owned = states["weights"] + states["optimizer state"]
    # The stream behind the last block, and normalised, which the head's weights need.
    last = tokens * shape.width * (_stream_bytes(setting) + _map_bytes(setting))
    waiting = activation_bytes(shape, setting, tokens) + last
    logits = tokens * FLOAT32 * shape.words
    casts = cast_bytes(shape, setting)
    # A checkpointed block casts its own once more, so only the head's is kept.
    of_head = min(casts, FLOAT16 * shape.words * shape.width)
    casts_kept = of_head if setting.checkpoint else casts
    block = tokens * (kept_by_block(shape, setting) + passing_in_block(shape, setting))
    again = block if setting.checkpoint else 0  # what is computed once more
    return {
        "forward": owned + waiting + casts + 2 * logits,
        "backward": owned + waiting + casts_kept + max(3 * logits, again),
        "first block": owned + gradients + block,
        # With foreach Adam makes the square roots of all second moments.
        "optimizer": owned + 2 * gradients,
    }


def peak_bytes(shape: Shape, setting: Setting, tokens: int) -> int:
    """The most bytes of a step on so many tokens."""
    return max(moments(shape, setting, tokens).values())


def _map_bytes(setting: Setting) -> int:
    """Of a number that a map reads or writes."""
    return FLOAT16 if setting.amp or setting.pure else FLOAT32


def _stream_bytes(setting: Setting) -> int:
    """Of a number that goes from block to block: autocast leaves the sum float32."""
    return FLOAT16 if setting.pure else FLOAT32
