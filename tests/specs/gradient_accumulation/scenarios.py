"""What a window and an epoch are tried in: each world is a change of a plain one."""

import itertools
import math

import torch
from torch import nn

from kit.laws import draw, twists
from kit.laws.toys import mse
from kit.laws.trace import Planted, PlantedInterrupt, Probe, World
from kit.laws.twists import fails, foreign, insert, option, put, refused, trained_before, unused


def epoch():
    """Seven micro-batches in windows of three: the last window has one."""
    world = regression(3, 5, 2, 4, 1, 6, 2)
    world.options, world.gamma = {"window": 3}, 0.5
    world.after.append(_watch_the_schedule)
    return world


def _watch_the_schedule(w):
    """It is a place where errors come from, too."""
    if w.scheduler:
        rates = w.scheduler.get_lr
        w.scheduler.get_lr = lambda: w.visits("schedule") or rates()


def regression(*sizes):
    """A small model, and micro-batches of so many samples; targets of number n lie around 2 n.

    They are tuples and lists in turn.
    """
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    pairs = [(draw.randn(size, 7), draw.randn(size, 5) + 2 * n) for n, size in enumerate(sizes)]
    batches = [[*pair] if n % 2 else pair for n, pair in enumerate(pairs)]
    return World(model, batches, sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


def steps_by_hand(answer, device, **options):
    """Loss and norm of each window and the weight, for w = 1, x = 1, y = 0, -1, -0.75; results."""
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 1.0)
    optimizer, one = torch.optim.SGD(model.parameters(), lr=0.25), torch.ones(1, 1, device=device)
    batches = [(one, 0 * one), (one, -one), (one, -0.75 * one)]
    results = answer.train_epoch(model, batches, mse, optimizer, window=2, **options)
    numbers = [float(number) for result in results for number in result[:2]]
    return [*numbers, model.weight.item()], results


def only(*numbers):
    """These micro-batches only."""
    return lambda w: put(batches=[w.batches[n] for n in numbers])(w)


def tag(*names):
    return lambda w: w.tags.update(names)


def sequences(w):
    """Samples are sequences of several lengths; output and target cannot change places."""
    shapes = ((3, 2), (1, 9), (2, 4), (2, 3), (4, 1), (1, 5), (2, 2))[: len(w.batches)]
    w.batches = [
        (draw.randn(*shape, 7), draw.randn(*shape, 5) + 2 * n) for n, shape in enumerate(shapes)
    ]
    w.loss = lambda out, y: ((out - y).square() * y.abs()).flatten(1).mean(1).mean()


def repeated(w):
    """The last pair three times, and not all in a row; it has names."""

    def again(w):
        pair = twists.Pair(*w.batches[-1])
        w.batches = [pair, *w.batches[:-1], pair, pair]

    w.after.append(again)


def gradient_of_another(value=1.0):
    """The model has a parameter of another optimizer, which is in the middle of a window."""

    def twist(w):
        theirs = w.model.theirs = nn.Parameter(torch.ones(3))
        theirs.grad, w.foreign = torch.full((3,), value), (*w.foreign, "theirs")

    return twist


def rare(w):
    """One number is used for micro-batches of one sample only, as an expert may be."""
    used = w.model.rare = nn.Parameter(torch.tensor(2.0))
    used.grad = torch.tensor(1000.0)
    w.model.register_forward_hook(lambda _, args, out: out * used if len(out) == 1 else out)


def not_finite(w):
    """The losses of two micro-batches, each by another column of its targets."""
    w.batches[1][1][:, 0], w.batches[2][1][:, 1] = math.inf, math.nan


HALF = option(max_norm=0.5)

# Rows of several specs, as they yield them.
MODES = [
    ("dropout in train mode", insert(nn.Dropout)),
    ("dropout in eval mode", insert(nn.Dropout, train=False)),
    ("one layer in eval mode", insert(nn.Dropout, layer_train=False)),
]
STEPS = [
    ("Adam", put(adam={"lr": 0.01}), trained_before),
    ("older gradients, and a group for each parameter", put(groups=True), trained_before),
]
LOSSES = [
    ("a loss with parameters", twists.loss_with_parameters, trained_before),
    ("an infinite loss, and one of NaN", not_finite),
]
FUSED = put(sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "fused": True})
NO_GRADIENT = [
    ("a parameter without a gradient", unused),
    ("a parameter without a gradient, a fused optimizer", unused, FUSED),
    ("a parameter that one micro-batch uses", rare),
]
FOREIGN = [
    ("a frozen and a foreign parameter", twists.frozen, foreign, twists.stale, tag("foreign")),
    ("a gradient that another optimizer will step on", gradient_of_another()),
]
IN_AUTOCAST = twists.inside_autocast(torch.bfloat16), tag("the caller's autocast")


def failing(**places):
    """Errors of three kinds, at such a visit of model, loss, backward, step, schedule or data."""
    kinds = {"an error": Planted, "Ctrl-C": PlantedInterrupt}
    kinds["out of memory"] = torch.OutOfMemoryError
    for (place, at), (kind, error) in itertools.product(places.items(), kinds.items()):
        yield f"{kind} in the {place} at {at}", trained_before, fails(place, at, error)


ERRORS = [*failing(model=3, backward=2, step=1)]
NO_PAIRS = [
    ("no samples", (torch.ones(0, 7), torch.ones(0, 5)), 0),
    ("6 inputs and 1 target", (torch.ones(6, 7), torch.ones(1, 5)), 6, 1),
    ("three tensors", (torch.ones(2, 7), torch.ones(2, 5), torch.ones(2))),
    ("one tensor of two rows", torch.ones(2, 7)),
    ("a dict of two tensors", {"inputs": torch.ones(2, 7), "labels": torch.ones(2, 5)}),
]
NOTHING = ("no micro-batch", *refused(lambda w: w.batches.clear(), mentions=[0]))


def bad(kinds, *places):
    """A bad micro-batch of each kind, at these places in turn."""

    def put_there(at, batch):
        def twist(w):
            w.batches[at], w.refused_at = batch, at // w.options.get("window", len(w.batches))

        return twist

    for (kind, batch, *mentions), at in zip(kinds, itertools.cycle(places), strict=False):
        row = refused(put_there(at, batch), mentions=mentions)
        yield f"{kind}, as micro-batch {at + 1}", *row, tag("bad micro-batch")
