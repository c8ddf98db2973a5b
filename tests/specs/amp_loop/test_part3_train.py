"""Many steps: batches, schedule, real text, and a run that stops and resumes."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR

from kit.laws import draw, twists
from kit.laws.bars import bar
from kit.laws.checks import ERRORS, check, check_equal, check_raises
from kit.laws.failures import FAILURES, failing, folders_apart
from kit.laws.precisions import scaler_for
from kit.laws.scalers import SCALERS
from kit.laws.toys import Block, mlp, mse, text_batches
from kit.laws.trace import World, kept
from kit.laws.twists import fails, gradient, option, put
from kit.memory.ruler import measure
from specs.amp_loop.laws import RUN, train


def run(precision, device):
    """A run with dropout, batch norm, Adam, a scale and a schedule."""
    draw.seed(11)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 2))
    model[0].eval()  # seen by whoever sets the mode of the whole model
    model[3].bias.requires_grad_(False)
    batches = [(draw.randn(n, 6), draw.randn(n, 2)) for n in (5, 3, 4, 2, 6, 3)]
    world = World(model, batches, adam={"lr": 0.02})
    twists.in_precision(precision)(world)
    if precision == "fp16":
        world.scaler = {"init_scale": 256.0, "growth_interval": 2}
        batches[1][1][0, 0] = math.inf
    world.ready(device)
    world.scheduler = StepLR(world.optimizer, step_size=2, gamma=0.5)
    world.optimizer.param_groups[0]["lr"] = 0.015  # by hand: the schedule continues from it
    return world


def go_on(world, first, last=None):
    """Train on these batches with the oracle; the losses, and the state afterwards."""
    every, world.batches = world.batches, world.batches[first:last]
    losses = [result.loss.item() for result in train(world)]
    world.batches = every
    return {**state_of(world), "losses": losses}


def state_of(w):
    """All that a load may change."""
    schedule = w.scheduler.state_dict() if w.scheduler else None
    state = {**w.now(), "model": kept(w.model.state_dict()), "schedule": schedule}
    del state["kept gradients"]
    return state


def parts(w):
    return w.model, w.optimizer, w.grad_scaler, w.scheduler


# Runs that a checkpoint of `run` does not fit.
OTHERS = {
    "one more layer": lambda w: w.model.append(nn.Linear(2, 2).to(w.device)),
    "five parameters": lambda w: vars(w).update(optimizer=Adam([*w.leaves.values()][:5])),
    "another schedule": lambda w: vars(w).update(scheduler=LambdaLR(w.optimizer, [lambda n: 1])),
}


class TestPart3Train:
    @pytest.mark.works("train", "batches")
    @RUN.spec("fp32", "bf16", "fp16")
    def test_takes_a_step_for_each_batch(self):
        yield ("a plain run",)
        yield "no batches", lambda w: w.batches.clear()
        yield "dropout in eval mode", twists.insert(lambda: nn.Dropout(0.5), train=False)
        yield "no schedule", put(gamma=None)
        yield "clipped", option(max_norm=0.5)

    @pytest.mark.exact("train", "scheduler")
    @RUN.spec("fp16")
    def test_the_schedule_follows_the_steps_that_were_taken(self):
        loss = put(loss=lambda out, y: mse(out, y) + math.inf)
        yield "infinite losses with finite gradients", loss
        for number, scaler in ((1, "with a scale that stays"), (4, "of a fused optimizer")):
            name = f"an overflow at batch {number}, a scaler {scaler}"
            yield name, gradient(math.inf, number), SCALERS[scaler]

    @pytest.mark.exact("train_step", "dtype")
    def test_learns_real_text_as_well_as_float32(self, answer, device):
        """50 steps of a byte-level transformer: losses within 0.1 % of float32.

        Over all steps and the last ten, with 21 seeds: at most 0.033 % and 0.053 % (bfloat16),
        0.005 % and 0.007 % (float16); with bfloat16 weights at least 0.19 % and 0.23 %.
        """

        def losses(dtype):
            draw.seed(1)
            model = nn.Sequential(nn.Embedding(256, 24), Block(24, 3), nn.Linear(24, 256))
            optimizer = Adam(model.to(device).parameters(), lr=0.003)
            batches = text_batches(50, batch=2, length=9)
            batches = ((x.to(device), y.to(device)) for x, y in batches)
            loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
            # A larger scale would overflow at first, and learn from fewer batches.
            scaler = scaler_for(dtype, device, init_scale=1024.0)
            steps = answer.train(model, batches, loss, optimizer, scaler, dtype=dtype, max_norm=1.0)
            return torch.stack([step.loss for step in steps]).cpu()

        full = losses(torch.float32)
        last = full[-10:].mean().item()
        check(last < 4, expected="a loss below 4 (ln 256 = 5.5)", got=last, cause="no learning")
        for dtype in (torch.bfloat16, torch.float16):
            apart = (losses(dtype) - full).abs()
            off = max(apart.mean() / full.mean(), apart[-10:].mean() / last).item()
            check(
                off < 0.001,
                expected=f"{dtype} losses that differ from float32 by less than 0.1 % on average",
                got=f"{off:.3%}",
                cause="gradients underflow or are clipped while scaled, or weights are 16-bit",
            )

    @pytest.mark.exact("load_checkpoint", "resume")
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_resumes_at_any_step_to_the_same_bits(self, answer, device, tmp_path, precision):
        """Six steps, stopped at some step; then loaded into a new run, and into the old one."""
        whole, path = go_on(run(precision, device), 0), tmp_path / "run.pt"
        for stop in (0, 3, 4) if precision == "fp16" else (3,):
            first = run(precision, device)
            go_on(first, 0, stop)
            saved = state_of(first)
            answer.save_checkpoint(path, *parts(first))
            go_on(first, stop)
            want = whole | {"losses": whole["losses"][stop:]}
            new = run(precision, device)
            for second, where in ((new, "a new run"), (first, "the run that went on")):
                second.model[3].bias.data.add_(1)  # a frozen weight differs
                answer.load_checkpoint(path, *parts(second))
                what, now = f"a stop at step {stop}, loaded into {where}", state_of(second)
                told = {"the load does not restore this": now}
                check_equal(now, saved, f"the run right after {what}", cause="", suspects=told)
                cause = "the load restores this, and later steps change what was loaded"
                check_equal(go_on(second, stop), want, what, cause=cause)

    @pytest.mark.saves("train", "memory")
    @bar(
        "peak of twelve steps above the baseline",
        "1.05 x the peak of two steps; plain keeps ten more batches",
        "batches are all fetched first or kept, or something else of every step is kept",
    )
    def test_memory_does_not_grow_with_the_number_of_steps(self, device, reference):
        def peak(module, steps=12):
            model = mlp(16, 512, 16, device=device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            ones = partial(torch.ones, 256, 16, device=device)
            data = ((ones(), ones()) for _ in range(steps))
            call = lambda: module.train(model, data, mse, optimizer, dtype=torch.float32)  # noqa: E731
            return measure(call, device, known=[model, optimizer]).above_baseline

        two = peak(reference, 2)
        return peak, 1.05 * two, two + 10 * 2 * 256 * 16 * 4

    @pytest.mark.survives("train", "untouched")
    @RUN.spec("fp32", "fp16")
    def test_an_error_ends_the_run(self):
        yield "the model fails at the third batch", fails("model", 3)
        yield "the third batch cannot be read", fails("batch", 3)

    @pytest.mark.survives("save_checkpoint", "saved")
    def test_a_save_changes_nothing(self, answer, device, tmp_path, monkeypatch):
        """Not even the random state; the path is a string without a folder."""
        world = run("fp16", device)
        go_on(world, 0, 3)
        before = world.now()
        monkeypatch.chdir(tmp_path)
        answer.save_checkpoint("run.pt", *parts(world))
        check_equal(world.now(), before, "the run after a save", cause="the save changes the run")

    @pytest.mark.survives("save_checkpoint", 1)
    def test_a_failed_save_leaves_the_file_from_before(self, answer, device, tmp_path):
        """The disk is full, pickling fails, Ctrl-C, or the rename fails."""
        world, path = run("fp16", device), tmp_path / "run.pt"
        with folders_apart():
            answer.save_checkpoint(path, *parts(world))
        whole = path.read_bytes()
        go_on(world, 0, 2)
        cause = "half a file is left, or the old one is damaged: write a second file, then rename"
        for was, failure in product(({"run.pt": "whole"}, {}), FAILURES):
            path.write_bytes(whole) if was else path.unlink(missing_ok=True)
            with failing(failure, world.model, len(whole)):
                answer.save_checkpoint(path, *parts(world))
            kinds = {True: "whole", False: "half"}
            files = {f.name: kinds[f.read_bytes() == whole] for f in tmp_path.iterdir()}
            room = f"room for {failure} quarters of the file"
            how = room if isinstance(failure, int) else getattr(failure, "__name__", failure)
            what = f"the folder after a failed {'later' if was else 'first'} save ({how})"
            left = "its temporary file is left: remove it, whatever ends the save"
            is_left = files.items() > was.items() and files.keys() - was.keys() != {"run.pt"}
            check_equal(files, was, what, cause=cause, suspects={left: files} if is_left else {})

    @pytest.mark.survives("load_checkpoint", "Raises")
    def test_refuses_to_load_into_another_run(self, answer, device, tmp_path):
        """Whichever part refuses, the other parts are as before."""
        same = put()
        cases = [(same, twist, name) for name, twist in OTHERS.items()]
        for name in ("scaler", "scheduler"):
            lacks = put(**{name.replace("scaler", "grad_scaler"): None})
            cases.append((same, lacks, f"no {name}, as the checkpoint has", name))
            cases.append((lacks, same, f"a {name} that was not saved", name))
        for before_save, before_load, difference, *words in cases:
            saved, world = run("fp16", device), run("fp16", device)
            go_on(saved, 0, 3)
            before_save(saved)
            answer.save_checkpoint(path := tmp_path / "run.pt", *parts(saved))
            answer.load_checkpoint(path, *parts(saved))  # which it fits
            go_on(world, 0, 1)
            before_load(world)
            before = state_of(world)
            load = partial(answer.load_checkpoint, path, *parts(world))
            errors = ValueError if words else Exception
            when, cause = f"where the run has {difference}", "it is not checked, or strict=False"
            check_raises(load, errors, mentions=words, when=when, cause=cause)
            cause = "a part was loaded before another refused, or half: a module copies what fits"
            what = f"the run with {difference} after the refused load"
            check_equal(state_of(world), before, what, cause=cause, clause=ERRORS)
