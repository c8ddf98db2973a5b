"""The plain world of accumulate_tokens, and what it and accumulate_on_ranks are tried in."""

import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.trace import Probe, World
from kit.laws.twists import put
from specs.gradient_accumulation.scenarios import tag

CLASSES = 5
# Samples, length, labelled tokens: 12, 6, 3 and 1, and as many tokens without a label.
UNEQUAL = ((3, 4, 12), (2, 5, 6), (1, 9, 3), (4, 3, 1))


def labelled(shapes, ignore_index=-100, seed=5):
    """Micro-batches of (samples, length) with this number of labels at random places.

    Micro-batch n has tokens from n to n + 3 only, so that no two have similar gradients. Targets
    are a slice of a wider tensor, which view(-1) does not take.
    """
    generator = draw.generator(seed)
    classes = torch.tensor([label for label in range(CLASSES) if label != ignore_index])
    batches = []
    for number, (samples, length, labels) in enumerate(shapes):
        inputs = draw.randint(4, (samples, length), generator=generator) + number % 5
        targets = torch.full((samples * length,), ignore_index)
        places = torch.randperm(samples * length, generator=generator)[:labels]
        targets[places] = classes[draw.randint(len(classes), (labels,), generator=generator)]
        batches.append((inputs, F.pad(targets.view(samples, length), (1, 0))[:, 1:]))
    return batches


def language_model():
    """From (samples, length) to logits (samples, length, 5), each token by itself."""
    draw.seed(4)
    return nn.Sequential(nn.Embedding(8, 6), Probe(), nn.Tanh(), nn.Linear(6, CLASSES))


def tokens():
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    return World(language_model(), labelled(UNEQUAL), sgd=sgd)


def of(*shapes, ignore_index=-100):
    options = {"ignore_index": ignore_index}
    return lambda w: put(batches=labelled(shapes, ignore_index), options=options)(w)


def adapter(w):
    """A parameter outside the model is trained with it."""
    shift = w.extra["adapter"] = nn.Parameter(torch.zeros(CLASSES))
    shift.grad = torch.full_like(shift, 1000.0)
    w.model.register_forward_hook(lambda _, args, logits: logits + shift)


def giving(change):
    """The model gives other logits."""
    return lambda w: w.model.register_forward_hook(lambda _, args, logits: change(logits))


# They lie in memory as a convolution leaves them.
transposed = giving(lambda logits: logits.mT.contiguous().mT)
# As of a padding class: where its token is a target, the loss is infinite.
never_0 = giving(lambda logits: torch.cat([logits[..., :1] - torch.inf, logits[..., 1:]], -1))
# exp() of one overflows.
hundreds = giving(lambda logits: logits * 1000)


def in_sixteen_bits(dtype, cost):
    """The loss of a label is about `cost`, or small if it is the last class."""

    def twist(w):
        w.model.to(dtype)
        surprise = torch.tensor([-cost] * (CLASSES - 1) + [0.6], dtype=dtype)
        giving(lambda logits: logits + surprise.to(logits.device))(w)
        w.tags.add("16 bits")

    return twist


# Seven times 10,000 is infinite in float16.
IN_FLOAT16, IN_BFLOAT16 = in_sixteen_bits(torch.float16, 1e4), in_sixteen_bits(torch.bfloat16, 50.0)


def no_labels(at):
    """Micro-batch `at` of four has no label."""
    return of(*UNEQUAL[:at], (2, 3, 0), *UNEQUAL[at:3]), tag("no labels")


def rows(one, other):
    """Where the two rows of the model in the steps by hand have moved."""
    return torch.tensor([[one, -one], [-other, other]], dtype=torch.float32)


def ids(*shape):
    return torch.ones(shape, dtype=torch.int64)


BAD = [
    ("no samples", (ids(0, 3), ids(0, 3)), 0),
    ("a dimension more", (ids(2, 3), ids(2, 3, 1))),
    ("4 targets for 5 tokens in each row", (ids(2, 5), ids(2, 4)), (5, 4)),
    ("6 x 2 targets for 2 x 6 tokens", (ids(2, 6), ids(6, 2)), (2, 6)),
]
