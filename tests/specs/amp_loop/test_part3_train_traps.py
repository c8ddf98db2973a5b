"""Many steps: data, failed saves and refused loads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kit.laws.checks import check, check_close, check_equal, check_raises
from kit.laws.snapshot import Snapshot
from kit.laws.toys import mlp, mse
from specs.amp_loop.runs import Run, Unsavable, batches


class TestPart3TrainTraps:
    """Part 3: train, save_checkpoint and load_checkpoint - many steps, stopped and resumed"""

    subject = "train"

    @pytest.mark.survives
    def test_takes_batches_one_at_a_time(self, answer, device):
        """The weights have moved n times when batch n + 1 is asked for; endless data is fine."""
        run = Run(torch.float32, device)
        run.model[1].p = 0.0
        seen = []

        def endless() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in itertools.chain(batches(3, device), itertools.repeat(None)):
                seen.append(run.model[0].weight.detach().clone())
                if batch is None:
                    return
                yield batch

        run.train(answer, endless())
        still = [n for n, (a, b) in enumerate(itertools.pairwise(seen), 1) if a.equal(b)]
        check(
            not still and len(seen) == 4,
            expected="a step between one batch and the next",
            got=f"none after batches {still}",
            cause="the batches are drained into a list before training",
        )

    @pytest.mark.survives
    def test_a_failed_save_leaves_the_checkpoint_before_it(self, answer, device, tmp_path):
        """The write fails in the middle, as a full disk or a kill would make it."""
        run, path = Run(torch.float32, device), tmp_path / "run.pt"
        run.train(answer, batches(2, device))
        answer.save_checkpoint(path, *run.parts)
        good = Snapshot(run.model, run.optimizer)
        run.train(answer, batches(1, device))
        run.model.register_buffer("breaks", Unsavable(torch.zeros(5, device=device)))
        check_raises(
            lambda: answer.save_checkpoint(path, *run.parts), OSError, when="from the disk"
        )
        del run.model.breaks
        files = [file.name for file in tmp_path.iterdir()]
        cause = "a partial file is left behind"
        check_equal(files, ["run.pt"], "files after the failed save", cause=cause)
        try:
            answer.load_checkpoint(path, *run.parts)
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            expected = "the checkpoint from before the failed save"
            cause = "the file is written in place: write beside it, then os.replace"
            check(False, expected=expected, got=got, cause=cause)
        good.check_unchanged("the failed save", cause="another state came back", gradients=False)

    @pytest.mark.survives
    @pytest.mark.parametrize("part", ["scaler", "scheduler"])
    @pytest.mark.parametrize("saved", [True, False], ids=["saved", "not_saved"])
    def test_refuses_to_load_what_was_not_saved(self, answer, device, tmp_path, part, saved):
        run, path = Run(torch.float16, device), tmp_path / "run.pt"
        run.train(answer, batches(2, device))
        parts = dict(zip(("model", "optimizer", "scaler", "scheduler"), run.parts, strict=True))
        answer.save_checkpoint(path, **(parts if saved else parts | {part: None}))
        run.train(answer, batches(1, device))
        before = Snapshot(run.model, run.optimizer)
        check_raises(
            lambda: answer.load_checkpoint(path, **(parts | {part: None} if saved else parts)),
            ValueError,
            mentions=[part],
            when=f"for a checkpoint {'with' if saved else 'without'} a {part}",
        )
        before.check_unchanged("the refused load", cause="the parts are checked too late")

    @pytest.mark.survives
    def test_hands_max_norm_on(self, answer, device):
        model = mlp(6, 2, device=device)
        before = model[0].weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        answer.train(model, batches(1, device), mse, optimizer, dtype=torch.float32, max_norm=0.001)
        moved = (model[0].weight.detach() - before).norm().item()
        cause = "train() takes max_norm and does not hand it on"
        check(moved < 0.002, expected="a step no longer than 0.001", got=moved, cause=cause)

    @pytest.mark.survives
    def test_the_scheduler_advances_without_a_scaler_too(self, answer, device):
        """Three steps, and two parameters: the rate halves three times."""
        model = mlp(6, 2, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        answer.train(
            model, batches(3, device), mse, optimizer, None, scheduler, dtype=torch.float32
        )
        cause = "the scheduler waits for a scaler, or counts something else than steps"
        check_close(scheduler.get_last_lr()[0], 0.5**4, "learning rate", cause=cause)

    @pytest.mark.survives
    def test_stops_at_a_bad_batch_and_keeps_the_steps_before_it(self, answer, device):
        model, twin = (mlp(6, 2, device=device) for _ in range(2))
        twin.load_state_dict(model.state_dict())
        good, empty = batches(1, device)[0], (torch.ones(0, 6), torch.ones(0, 2))
        answer.train(twin, [good], mse, torch.optim.SGD(twin.parameters()), dtype=torch.float32)
        check_raises(
            lambda: answer.train(
                model,
                [good, empty, good],
                mse,
                torch.optim.SGD(model.parameters()),
                dtype=torch.float32,
            ),
            ValueError,
            when="for an empty second batch",
        )
        cause = "bad batches are passed over, or looked for before the first step"
        got, want = model[0].weight.detach(), twin[0].weight.detach()
        check_equal(got, want, "weights after the one good step", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("error", [OSError, RuntimeError, KeyboardInterrupt])
    def test_a_failed_first_save_leaves_nothing(self, answer, device, tmp_path, error):
        """A full disk, torch's own writer, Ctrl-C; and a path given as a string."""
        run, path = Run(torch.float32, device), str(tmp_path / "run.pt")
        run.model.register_buffer("breaks", Unsavable(torch.zeros(5, device=device)))
        Unsavable.error = error
        try:
            answer.save_checkpoint(path, *run.parts)
        except NotImplementedError:
            raise
        except error:
            pass
        finally:
            Unsavable.error = OSError
        files = [file.name for file in tmp_path.iterdir()]
        cause = "half a file is left, which looks like a checkpoint or like litter"
        check_equal(files, [], f"files after {error.__name__} in the first save", cause=cause)

    @pytest.mark.survives
    def test_a_refused_load_changes_nothing(self, answer, device, tmp_path):
        run, path = Run(torch.float16, device), str(tmp_path / "run.pt")
        run.train(answer, batches(2, device))
        answer.save_checkpoint(path, *run.parts)
        other = Run(torch.float16, device)
        scale, random = other.scaler.state_dict(), torch.get_rng_state()
        check_raises(
            lambda: answer.load_checkpoint(path, other.model, other.optimizer, other.scaler),
            ValueError,
            mentions=["scheduler"],
            when="for a checkpoint with a scheduler, and none given",
        )
        cause = "parts are loaded while others are still to be checked"
        check_equal(other.scaler.state_dict(), scale, "scaler after the refused load", cause=cause)
        check_equal(torch.get_rng_state(), random, "random state after it", cause=cause)
