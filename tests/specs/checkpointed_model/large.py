"""A step through LargeModel and through its blocks one by one, and the bytes that it takes."""

import functools
import math
from functools import partial

import torch

from kit.laws import draw
from kit.laws.checks import check, check_bar
from kit.laws.scenarios import scenarios
from kit.memory.ruler import bytes_of, human, measure
from specs.checkpointed_model.steps import SHAPE, WIDTH, Step, compared, meaning, see


def large(
    layers=3,
    *,
    size=1,
    use=True,
    train=True,
    dropout=0.25,
    masks=0,  # so many of the first passes have one
    passes=1,
    grad=True,  # of x
    frozen=lambda name: False,  # whether the parameter of this name is frozen
    before=lambda model: None,  # prepares the model
    **step,
):
    """A LargeModel and a step."""

    def build(answer, device, is_answer):
        draw.seed(3)
        options = {"dropout": dropout}
        if not use:  # else the default is tried
            options["use_checkpoint"] = use
        if size > 1:
            options["segment_size"] = size
        model = answer.LargeModel(layers, WIDTH, **options).to(device)
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen(name))
        before(model.train(train))
        x = [draw.randn(*SHAPE, device=device, requires_grad=grad) for _ in range(passes)]
        given = [draw.rand(*SHAPE[:2], device=device) < 0.3 * (n + 1) for n in range(masks)]
        pairs = list(zip(x, [*given, *[None] * (passes - masks)], strict=True))

        def run(x, mask):
            if is_answer:
                return model(x, mask=mask)
            for block in model.layers:
                x = block(x, mask=mask)
            return x

        def forward():
            return [run(*pair) for pair in pairs]

        counted = [block.up for block in model.layers]
        return Step(model, forward, counted, x if grad else [], **step)

    return build


def stepped(model):
    """Make a step."""
    device = next(model.parameters()).device
    model(torch.ones(SHAPE, device=device, requires_grad=True)).sum().backward()
    model.zero_grad()


@scenarios("the step", meaning)
def as_without(answer, device, name, build, runs=2):
    """A step shows what it shows without checkpoints; `runs` is how often a block runs."""
    both = (see(build(answer, device, own), device) for own in (True, False))
    return compared(*both, runs)


# Bytes


def large_inputs(device):
    """An input much larger than the weights, with its gradient already allocated."""
    rows, length = (5, 64) if device.type == "cpu" else (16, 512)
    x = draw.randn(rows, length, WIDTH, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)
    return x


def one_input(x):
    """The bytes of one block's input, as the allocator rounds them."""
    return bytes_of(x.detach())


def whole_step(model, x, forward, retain=False):
    """A function that runs forward and backward and returns the loss; gradients are allocated."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step():
        loss = forward().float().square().mean()
        loss.backward(retain_graph=retain)
        return loss

    return step


def peak(model, x, forward, **options):
    """Bytes above the baseline."""
    step = whole_step(model, x, forward, **options)
    return measure(step, x.device, known=[model, x]).above_baseline


def check_nothing_left(model, x, forward):
    """Fail if more than the loss is held after a step."""
    __tracebackhide__ = True
    step = whole_step(model, x, forward)

    def then():
        loss = step()
        x.detach()  # bytes are read after each operation, here before garbage is collected
        return loss

    found = measure(then, x.device, known=[model, x])
    loss = bytes_of(x.new_zeros(()))
    more = max(found.timeline[-2] - found.baseline - loss, found.retained)
    cause = "something is kept in a list, on an object, or in a reference cycle"
    got = f"{more} bytes: {more / one_input(x):.1f} inputs"
    said = "0 bytes more than before the step, and nothing left to the garbage collector"
    check(more <= 0, expected=said, got=got, cause=cause)


def held(model, x, forward):
    """Bytes between the forward and the backward pass, the output included."""
    kept = []
    return measure(lambda: kept.append(forward()), x.device, known=[model, x]).retained


RETAINED = "a graph that is kept for a second backward pass"
FROZEN = "x without gradient, the first block frozen"


@functools.cache  # bytes are the same each time, so one measurement serves every spec
def of_model(reads, module, layers, size, device, case):
    """The bytes of a LargeModel, as `peak` or `held` reads them; size 0 is without checkpoints."""
    model = module.LargeModel(layers, WIDTH, use_checkpoint=size > 0, segment_size=size or 1)
    x = large_inputs(device)
    if case.startswith("x without gradient"):
        x = x.detach()
    for name, p in model.to(device).named_parameters():
        p.requires_grad_(not (case == FROZEN and name.startswith("layers.0.")))
    mask = draw.rand(*x.shape[:2], device=device) < 0.6 if case == "mask" else None

    def forward():
        with torch.autocast(device.type, torch.bfloat16, enabled=case == "autocast"):
            return model(x, mask=mask)

    retains = {"retain": True} if reads is peak and case == RETAINED else {}
    return reads(model, x, forward, **retains)


@functools.cache
def inside(module, device):
    """The peak of one plain block."""
    block, x = module.MemoryIntensiveBlock(WIDTH).to(device), large_inputs(device)
    return peak(block, x, lambda: block(x))


def check_limit(title, limit, formula, reads, answer, reference, *, cause, suspects=None):
    """Check bytes against a limit: `reads` takes a module, or None for a plain model."""
    __tracebackhide__ = True
    shown = {"plain": reads(None), "reference": reads(reference), "formula": formula}
    kept = "the insides of all blocks are alive at once, or stay alive after use"
    what = kept if RETAINED in title else "nothing is recomputed"
    suspects = {f"{what}: a plain model takes exactly that": shown["plain"]} | (suspects or {})
    check_bar(title, reads(answer), limit, cause=cause, suspects=suspects, **shown)


def check_model(reads, layers, size, case, inputs, words, answer, reference, device, cause=""):
    """The same for a LargeModel: the limit is `inputs`, and for `peak` one inside more."""
    __tracebackhide__ = True
    read = partial(of_model, reads, device=device, case=case)
    title, formula = f"held between the passes, {layers} blocks", f"({words}) inputs"
    one = one_input(large_inputs(device))
    limit, suspects, segments = inputs * one, {}, math.ceil(layers / size)
    between = of_model(held, answer, layers, size, device, case)
    if reads is peak:
        title, formula = f"peak above the baseline, {layers} blocks", f"{formula} + 1 inside"
        limit += inside(answer, device)
    if size > 1:
        title, unheeded = f"{title} by {size}", f"segment_size is ignored in this case: {case}"
        if between >= layers * one:
            suspects[unheeded] = lambda: read(answer, layers, 1)
    of = lambda m: read(m, layers, size) if m else read(answer, layers, 0)  # noqa: E731
    if reads is peak and of(answer) > limit:
        said = "in the backward pass the insides of several blocks are alive at once"
        if between > (segments + 1) * one:
            said = "the first run keeps more than its input"
        if size > 1 and between < segments * one:
            said = f"a segment has more than {size} blocks; the rest belongs in a smaller last one"
        suspects[f"{human(between)} is held between the passes: {said}"] = of(answer)
    given = (f"{title}, {case}", limit, formula, of, answer, reference)
    check_limit(*given, cause=cause, suspects=suspects)
