"""The worlds that windows and epochs run in: each is a change of a plain one."""

import itertools

import torch
from torch import nn

from kit.laws import draw, twists
from kit.laws.toys import mse
from kit.laws.trace import PlantedInterrupt, Probe, World
from kit.laws.twists import fails, insert, option, put, refused, trained_before, unused


def epoch():
    """Seven micro-batches in windows of three: the last window has one."""
    world = regression(3, 5, 2, 4, 1, 6, 2)
    world.options, world.gamma = {"window": 3}, 0.5
    return world


def regression(*sizes):
    """A small model, and micro-batches of these sizes; the targets of number n lie around 2 n."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    batches = [(draw.randn(size, 7), draw.randn(size, 5) + 2 * n) for n, size in enumerate(sizes)]
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
    """Samples are sequences of unequal lengths; the loss is not symmetric in its arguments."""
    shapes = ((3, 2), (1, 9), (2, 4), (2, 3), (4, 1), (1, 5), (2, 2))[: len(w.batches)]
    w.batches = [
        (draw.randn(*shape, 7), draw.randn(*shape, 5) + 2 * n) for n, shape in enumerate(shapes)
    ]
    w.loss = lambda out, y: ((out - y).square() * y.abs()).flatten(1).mean(1).mean()


def repeated(w):
    """The last micro-batch comes three times, as the same tensors."""
    w.after.append(only(-1, 0, 1, -1, -1))


def in_float64(w):
    """Data too; results are float32 all the same."""
    w.model.double()
    w.batches = [(x.double(), y.double()) for x, y in w.batches]


def rare(w):
    """A parameter is used only for micro-batches of one sample, as an expert may be."""
    used = w.model.rare = nn.Parameter(torch.tensor(2.0))
    used.grad = torch.tensor(1000.0)
    w.model.register_forward_hook(lambda _, args, out: out * used if len(out) == 1 else out)


HALF = option(max_norm=0.5)

# Rows of several specs, as they yield them.
MODES = [
    ("dropout in train mode", insert(nn.Dropout)),
    ("one layer in eval mode", insert(nn.Dropout, layer_train=False)),
]
STEPS = [
    ("Adam", put(adam={"lr": 0.01}), trained_before),
    ("older gradients, and a group for each parameter", put(groups=True), trained_before),
]
LOSS = "a loss with parameters", twists.loss_with_parameters, trained_before
NO_GRADIENT = [
    ("a parameter without a gradient", unused),
    ("a parameter that one micro-batch uses", rare),
    ("a frozen parameter with an old gradient", twists.frozen, twists.stale),
]


def failing(**places):
    """Errors of two kinds, at this visit of the model, loss, backward pass, step or data."""
    kinds = {"out of memory": torch.OutOfMemoryError, "Ctrl-C": PlantedInterrupt}
    for (place, at), (kind, error) in itertools.product(places.items(), kinds.items()):
        yield f"{kind} in the {place} at {at}", trained_before, fails(place, at, error)


NOTHING = ("no micro-batch", *refused(lambda w: w.batches.clear(), mentions=[0]))


def bad(kinds, *places):
    """A bad micro-batch of each kind at each place."""

    def put_there(at, batch):
        def twist(w):
            w.batches[at], w.refused_at = batch, at // w.options.get("window", len(w.batches))

        return twist

    for at, (kind, batch, *mentions) in itertools.product(places, kinds):
        row = refused(put_there(at, batch), mentions=mentions)
        yield f"{kind}, as micro-batch {at + 1}", *row, tag("bad micro-batch")
