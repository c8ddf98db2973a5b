"""What a window and an epoch are tried in: each world is a change of a plain one."""

import itertools
import math
from collections import UserList
from contextlib import ExitStack

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw, twists
from kit.laws.precisions import default_dtype
from kit.laws.trace import Planted, PlantedInterrupt, Probe, World
from kit.laws.twists import fails, foreign, insert, option, put, refused, trained_before, unused
from kit.ranks.simulated import simulated_world


def epoch():
    """Seven micro-batches in windows of three: the last window has one."""
    world = regression(3, 5, 2, 4, 1, 6, 2)
    world.options, world.gamma = {"window": 3}, 0.5
    world.after.append(heard_schedule)
    return world


def heard_schedule(w):
    """A schedule can fail too, as one does that is at its end."""
    if w.scheduler is not None:
        step = w.scheduler.step
        w.scheduler.step = lambda: (w.visits("schedule"), step())


def regression(*sizes):
    """A small model, and micro-batches of so many samples; targets of number n lie around 2 n."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    batches = [(draw.randn(size, 7), draw.randn(size, 5) + 2 * n) for n, size in enumerate(sizes)]
    return World(model, batches, sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


def only(*numbers):
    """These micro-batches only."""
    return lambda w: put(batches=[w.batches[n] for n in numbers])(w)


def tag(*names):
    return lambda w: w.tags.update(names)


def note_afterwards(w, name, value):
    """Note what `value` gives when the call is over."""
    end = ExitStack()
    end.callback(lambda: w.notes.update({name: value()}))
    w.inside.append(lambda: end)


def sequences(w):
    """Samples are sequences of several lengths; output and target cannot change places."""
    shapes = ((3, 2), (1, 9), (2, 4), (2, 3), (4, 1), (1, 5), (2, 2))[: len(w.batches)]
    w.batches = [
        (draw.randn(*shape, 7), draw.randn(*shape, 5) + 2 * n) for n, shape in enumerate(shapes)
    ]
    w.loss = lambda out, y: ((out - y).square() * y.abs()).flatten(1).mean(1).mean()


def repeated(w):
    """The last pair three times, and not all in a row, in a sequence that is no list."""
    again = lambda b: put(batches=UserList([b[-1], *b, b[-1]]))  # noqa: E731
    w.after.append(lambda w: again(w.batches)(w))


def norm_first(w):
    """Behind a layer with a bias, that bias would have a gradient of rounding errors."""
    w.model.insert(0, nn.BatchNorm1d(7))
    w.batches = regression(3, 5, 2, 4, 3, 6, 2).batches


def pairs(w):
    """A tuple of micro-batches, in lists and named tuples in turn, as a DataLoader makes them."""
    makers = itertools.cycle([list, twists.Pair._make])
    w.after.append(lambda w: put(batches=(*(next(makers)(b) for b in w.batches),))(w))


def in_float64(w):
    """The model, and data that are numbers of its kind."""
    w.model.double()
    w.batches = [[t.double() if t.is_floating_point() else t for t in b] for b in w.batches]
    w.tags.add("float64")


def in_default_dtype(dtype):
    """The caller has another default dtype."""
    return lambda w: w.inside.append(lambda: default_dtype(dtype))


class OutOfMemory(torch.OutOfMemoryError):
    """As an allocator has it: known by its kind, or by its words."""

    def __str__(self):
        return "CUDA out of memory"


class PlantedValueError(ValueError):
    """As what is refused, and yet it comes from elsewhere."""

    words = "the ValueError that this scenario raises"


class Checkpointed(nn.Tanh):
    """Runs again in the backward pass, in the older way that libraries still have."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def gradients_with_the_data(w):
    """Data are made by backward passes, as adversarial examples are: they leave gradients."""

    def visit(place):
        for p in w.model.parameters() if place == "data" else ():
            p.grad = torch.ones_like(p)

    w.visits = visit


def kept_losses(w):
    """The loss keeps what it returns, as one that logs does."""
    inner, kept = w.loss, []

    def loss(*args):
        kept.append(inner(*args))
        return kept[-1]

    w.loss = loss
    note_afterwards(w, "losses that the loss function kept", lambda: [x.detach() for x in kept])


def inputs_with_a_parameter(w):
    """The inputs are made with a parameter that the optimizer holds."""
    shift = w.extra["prompt"] = nn.Parameter(torch.zeros(7))
    w.after.append(lambda w: put(batches=[(x + shift, y) for x, y in w.batches])(w))


def gradient_of_another(value=1.0, of_loss=False):
    """Model or loss has a parameter of another optimizer, which is in the middle of a window."""

    def twist(w):
        theirs = w.extra["theirs"] = nn.Parameter(torch.ones(3))
        if of_loss:
            w.loss_fn = nn.MSELoss()
        (w.loss_fn if of_loss else w.model).register_parameter("theirs", theirs)
        theirs.grad, w.foreign = torch.full((3,), value), (*w.foreign, "theirs")
        note_afterwards(w, "a gradient of another optimizer", lambda: theirs.grad)

    return twist


def rare(w):
    """One number is used for micro-batches of one sample only, as an expert may be."""
    used = w.model.rare = nn.Parameter(torch.tensor(2.0))
    used.grad = torch.tensor(1000.0)
    w.model.register_forward_hook(lambda _, args, out: out * used if len(out) == 1 else out)


def exchanged(w):
    """The last parameter takes the first one's place in its group, as a resized embedding does."""
    first, *_, last = dict(w.model.named_parameters())
    w.foreign, w.tags = (last,), {*w.tags, "foreign", "twice"}

    def exchange(optimizer, *_):
        optimizer.param_groups[0]["params"][0], w.foreign = w.leaves[last], (first,)
        optimizer.state.pop(w.leaves[first], None)

    w.after.append(lambda w: w.optimizer.register_step_post_hook(exchange))


def no_elements(w):
    """A parameter without elements has a gradient without elements."""
    none = w.extra["none"] = nn.Parameter(torch.ones(0))
    w.model.register_forward_hook(lambda _, args, out: out + none.sum())


def not_finite(w):
    """The losses of two micro-batches, each by another column of its targets."""
    w.batches[1][1][:, 0], w.batches[2][1][:, 1] = math.inf, math.nan


def zero_gradients(w):
    """Every gradient is zero, which is not the same as none."""
    w.model.register_forward_hook(lambda _, args, out: out * 0)


def transposed_weights(w):
    """Weights, and so their gradients, lie in memory by columns."""
    for p in w.model.parameters():
        p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data


def loss_in_mode(train):
    """The loss is a module in this mode, and the model is in the other."""
    return lambda w: (w.model.train(not train), put(loss_fn=nn.MSELoss().train(train))(w))


def runs_before_the_step(w):
    """A hook of the optimizer runs the model under autocast, as one that logs does."""

    def hook(*_):
        with torch.autocast(w.device.type, torch.bfloat16):
            w.model(w.batches[0][0])

    w.after.append(lambda w: w.optimizer.register_step_pre_hook(hook))


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
    ("learning rate 0", put(sgd={"lr": 0.0, "momentum": 0.9})),
]


def in_a_job(w):
    """This process is one of four ranks, and nobody has asked for what the others have."""
    w.inside.append(lambda: simulated_world(4, w.device))


UNUSUAL = [
    ("one rank of four", in_a_job),
    ("a model in float64", in_float64, trained_before),
    ("a default dtype of float64", in_default_dtype(torch.float64)),
    ("other modes of torch than usual", twists.in_unusual_modes),
    ("pairs in lists and named tuples", pairs),
    ("a reentrant checkpoint", insert(Checkpointed)),
    ("gradients of zero, and weight decay", zero_gradients, trained_before),
]
LOSSES = [
    ("a loss with parameters", twists.loss_with_parameters, trained_before),
    ("inputs made with a parameter", inputs_with_a_parameter),
    ("a loss in eval mode, a model in train mode", loss_in_mode(False)),
    ("a loss in train mode, a model in eval mode", loss_in_mode(True)),
    ("a loss that is logged", kept_losses),
    ("a loss that is one of 1,000 numbers", twists.loss_among_others),
    (
        "a loss of 0, and below, with a gradient",
        put(loss=lambda out, y: (out - out.detach()).mean() - len(out) // 2),
    ),
    ("an infinite loss, and one of NaN", not_finite),
]
LOSS_OF_ANOTHER = (
    "a loss whose parameters another optimizer holds",
    gradient_of_another(of_loss=True),
)
FUSED = put(sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "fused": True})
NO_GRADIENT = [
    ("a parameter without a gradient", unused),
    ("a parameter without a gradient, a fused optimizer", unused, FUSED),
    ("a parameter that one micro-batch uses", rare),
]
FOREIGN = [
    ("a frozen parameter", twists.frozen, twists.stale, tag("frozen")),
    ("a foreign parameter", foreign, tag("foreign")),
    ("a frozen backbone, which is foreign", twists.backbone, tag("foreign", "frozen")),
    ("a gradient that another optimizer will step on", unused, gradient_of_another()),
    ("a parameter that takes another's place after the window before", exchanged),
]
IN_AUTOCAST = twists.inside_autocast(torch.bfloat16), tag("the caller's autocast")
AUTOCAST = [
    ("inside the caller's autocast", *IN_AUTOCAST),
    (
        "with autocast off, inside the caller's autocast",
        *IN_AUTOCAST,
        lambda w: w.inside.append(lambda: torch.autocast(w.device.type, enabled=False)),
    ),
    ("in autocast, and a hook runs the model before the step", *IN_AUTOCAST, runs_before_the_step),
    ("one micro-batch, inside the caller's autocast", *IN_AUTOCAST, only(0)),
]


def failing(**places):
    """Errors of all kinds, at such a visit of model, loss, backward pass, step or data."""
    kinds = {"an error": Planted, "Ctrl-C": PlantedInterrupt, "out of memory": OutOfMemory}
    kinds["a ValueError"] = PlantedValueError
    for (place, at), (kind, error) in itertools.product(places.items(), kinds.items()):
        yield f"{kind} in the {place} at {at}", trained_before, fails(place, at, error)


ERRORS = [
    *failing(model=3, backward=2, step=1),
    ("Ctrl-C in the step, and the next call", fails("step", 1, PlantedInterrupt), tag("retried")),
    (
        "a foreign parameter, and the model fails",
        *(foreign, gradient_of_another(), fails("model", 2), tag("foreign")),
    ),
]
NO_PAIRS = [
    ("no samples", (torch.ones(0, 7), torch.ones(0, 5)), 0),
    ("6 inputs and 1 target", (torch.ones(6, 7), torch.ones(1, 5)), 6, 1),
    ("1 input and 6 targets", (torch.ones(1, 7), torch.ones(6, 5)), 1, 6),
    ("three tensors", (torch.ones(2, 7), torch.ones(2, 5), torch.ones(2))),
    ("one tensor of two rows", torch.ones(2, 7)),
    ("a dict of two tensors", {"inputs": torch.ones(2, 7), "labels": torch.ones(2, 5)}),
]


def spoiled(w):
    """The list of the window before, where a micro-batch is now another, a bad one."""

    def visit(place):
        if place == "next window":
            inputs, targets = w.batches[1]
            w.batches[1] = inputs, torch.cat([targets, targets])

    w.visits, w.tags = visit, {*w.tags, "twice", "bad micro-batch"}


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
