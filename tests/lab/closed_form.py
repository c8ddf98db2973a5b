"""What a training step of a decoder holds, by arithmetic: bytes by closed form.

    shape = Shape(layers=32, width=4096, inner=11_008, heads=32, kv_heads=32, words=32_000)
    peak_bytes(shape, Setting(amp=True), tokens=2048)

Sources: Rajbhandari et al., ZeRO (arXiv 1910.02054), for bytes a parameter; Korthikanti et al.
(arXiv 2205.05198) for the way of counting activations, here with attention that keeps no scores;
Micikevicius et al. (arXiv 1710.03740) and torch.amp for autocast; Zhao et al., FSDP (arXiv
2304.11277). What a GPU needs beside tensors, workspaces and gaps, is not in it.
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
    adapter     only adapters of this rank are trained, float32 on a frozen base of 16 bits
    ranks       shards of everything on so many ranks; then in 16 bits as FSDP2 computes in them
    """

    amp: bool = False
    checkpoint: bool = False
    pure: bool = False
    adapter: int = 0
    ranks: int = 1


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
    """All parameters, without adapters."""
    return shape.layers * block_parameters(shape) + root_parameters(shape)


def trained_parameters(shape: Shape, setting: Setting) -> int:
    """All parameters, or those of the adapters, from the width through the rank to `projected`."""
    if not setting.adapter:
        return parameters(shape)
    return shape.layers * setting.adapter * (shape.width + shape.projected)


def weight_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes of the weights: 4 a parameter, 2 in 16 bits; of adapters with their frozen base."""
    if setting.adapter:
        return FLOAT16 * parameters(shape) + FLOAT32 * trained_parameters(shape, setting)
    return _bytes_each(setting) * parameters(shape)


def gradient_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes of the gradients of what is trained. A gradient has the dtype of its weight."""
    return _bytes_each(setting) * trained_parameters(shape, setting)


def adam_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes of Adam's two moments, which have the dtype of the weights."""
    return 2 * _bytes_each(setting) * trained_parameters(shape, setting)


def adam_temporary_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes that Adam needs for a moment, with foreach: the square roots of all second moments."""
    return _bytes_each(setting) * trained_parameters(shape, setting)


def kept_by_block(shape: Shape, setting: Setting) -> int:
    """Bytes a token that one block keeps for its backward pass, each tensor once.

    The stream (float32 under autocast) before and after attention; then, in the dtype of the maps,

        q, k, v             `projected` numbers, for attention
        attention's output  `width` numbers, for attention itself and for the map behind it
        up                  `inner` numbers, for its activation (gated: gate, its SiLU, and up)

    and, only where weights of maps are trained, the inputs that these alone need: both normalised
    streams, and what goes into `down`. Autocast casts the second stream for `gate` and again for
    `up`. An adapter needs the first of these, and what is between its two maps. Float32 in any
    dtype: attention's logarithms (one a head), means and deviations (two a normalisation).
    """
    width, inner = shape.width, shape.inner
    numbers = shape.projected + width + (3 if shape.gated else 1) * inner
    if setting.adapter:
        numbers += width + setting.adapter
    else:
        casts = 2 if shape.gated and setting.amp else 1
        numbers += (1 + casts) * width + inner
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
    stream = tokens * shape.width * _stream_bytes(setting)
    if setting.checkpoint:
        return shape.layers * stream
    # The first stream of a frozen model has no gradient, so nothing needs it.
    unused = stream if setting.adapter else 0
    return shape.layers * tokens * kept_by_block(shape, setting) - unused


def cast_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes of autocast's 16-bit copies of all maps: one each, until the forward pass ends.

    Without checkpoints they are kept for the backward pass, with them only the head's.
    """
    if not setting.amp or setting.adapter:
        return 0  # a frozen base has 16 bits already
    tables = (shape.words if shape.gated else 0) + shape.longest
    return FLOAT16 * (parameters(shape) - tables * shape.width)


def moments(shape: Shape, setting: Setting, tokens: int) -> dict[str, int]:
    """Bytes alive at each moment of a step that can be its peak.

    Between the beginning and the end of the backward pass activations fall and gradients grow, both
    in even steps, so that one of the ends is highest. `forward` is its end: logits and
    log-probabilities in float32. `backward` begins with the gradients of both.
    """
    if setting.ranks > 1:
        return _moments_of_shards(shape, setting, tokens)
    owned = weight_bytes(shape, setting) + adam_bytes(shape, setting)
    gradients = gradient_bytes(shape, setting)
    waiting = activation_bytes(shape, setting, tokens) + last_stream_bytes(shape, setting, tokens)
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
        "optimizer": owned + gradients + adam_temporary_bytes(shape, setting),
    }


def last_stream_bytes(shape: Shape, setting: Setting, tokens: int) -> int:
    """Bytes of the stream behind the last block, and normalised, which the head's weights need."""
    normalised = 0 if setting.adapter else _map_bytes(setting)
    return tokens * shape.width * (_stream_bytes(setting) + normalised)


def peak_bytes(shape: Shape, setting: Setting, tokens: int) -> int:
    """The most bytes of a step on so many tokens."""
    return max(moments(shape, setting, tokens).values())


def _moments_of_shards(shape: Shape, setting: Setting, tokens: int) -> dict[str, int]:
    """One rank of FSDP2, each block a unit, in 16 bits and checkpointed.

    The root is whole from its first use to its gradients' reduction. In the backward pass one block
    is whole and the next on its way; gradients are 16 bits, and reduced in float32.
    """
    root, block = root_parameters(shape), block_parameters(shape)
    shard = FLOAT32 * parameters(shape) // setting.ranks
    owned = 3 * shard + FLOAT16 * root
    waiting = activation_bytes(shape, setting, tokens)
    head = 3 * tokens * FLOAT32 * shape.words + last_stream_bytes(shape, setting, tokens)
    inside = tokens * (kept_by_block(shape, setting) + passing_in_block(shape, setting))
    passing = (2 * FLOAT16 + FLOAT32) * block + FLOAT16 * shape.words * shape.width
    return {
        "backward": owned + waiting + max(head, inside + passing),
        "first block": owned + shard + inside + passing,
        "root reduced": owned + shard + (FLOAT16 + FLOAT32) * root,
        "optimizer": 3 * shard + 2 * shard,
    }


def _bytes_each(setting: Setting) -> int:
    return FLOAT16 if setting.pure else FLOAT32


def _map_bytes(setting: Setting) -> int:
    """Of a number that a map reads or writes."""
    narrow = setting.amp or setting.pure or setting.ranks > 1
    return FLOAT16 if narrow else FLOAT32


def _stream_bytes(setting: Setting) -> int:
    """Of a number that goes from block to block: autocast leaves the sum float32."""
    narrow = setting.pure or setting.adapter or setting.ranks > 1
    return FLOAT16 if narrow else FLOAT32
