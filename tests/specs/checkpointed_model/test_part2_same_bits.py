"""The same bits with and without checkpoints: random numbers, precision, masks, frozen blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_equal
from specs.checkpointed_model.common import LAYERS, SIZES, WIDTH, back, check_same, inputs, step


def pair(answer, device: torch.device, size: int) -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights: one with segments of `size`, one without checkpoints."""
    options = {"dropout": 0.25}
    model = answer.LargeModel(LAYERS, WIDTH, segment_size=size, **options).to(device)
    plain = answer.LargeModel(LAYERS, WIDTH, use_checkpoint=False, **options).to(device)
    plain.load_state_dict(model.state_dict())
    return model, plain


_DROPS = (
    "the recomputation draws other random numbers (preserve_rng_state=False), runs a block twice,"
    " or runs another block than the forward pass did"
)


class TestPart2LargeModel:
    subject = "LargeModel"

    @pytest.mark.works
    @SIZES
    @pytest.mark.parametrize("grad", [True, False], ids=["x_with_gradient", "x_without"])
    def test_gives_the_same_output_and_gradients(self, answer, device, size, grad):
        """With dropout, and for an input that requires no gradient, as embeddings' ids have none.

        huggingface/transformers#26221: a reentrant checkpoint leaves parameters without gradients.
        """
        model, plain = pair(answer, device, size)
        x = inputs(device, grad=grad)
        leaves = [x] if grad else []
        got = step(model, lambda: model(x), *leaves, cause=_DROPS)
        check_same(got, step(plain, lambda: plain(x), *leaves), cause=_DROPS)
        cause = "the caller's input is made to require a gradient, to please the checkpoint"
        check_equal(x.requires_grad, grad, "x.requires_grad afterwards", cause=cause)

    @pytest.mark.exact
    @SIZES
    def test_leaves_the_random_stream_where_it_would_have_been(self, answer, device, size):
        """What is drawn after the backward pass is what a plain model would leave to draw."""
        model, plain = pair(answer, device, size)
        x = inputs(device)
        got, want = (step(m, lambda m=m: m(x)) for m in (model, plain))
        cause = "the random state is set for the recomputation and not put back after it"
        for name in (name for name in want if "random" in name):
            check_equal(got[name], want[name], name, cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("size", [1, 3], ids=["each_block", "segments_of_3"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_recomputes_in_the_precision_of_the_forward_pass(self, answer, device, size, dtype):
        """The backward pass is outside autocast, and what it recomputes must not be.

        pytorch/pytorch#71124: autocast came back, without its dtype.
        """
        model, plain = pair(answer, device, size)
        seen: list[torch.dtype] = []
        model.layers[2].up.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        x = inputs(device)

        def forward(module: nn.Module) -> Tensor:
            with torch.autocast(device.type, dtype):
                return module(x)

        cause = "the recomputation runs without autocast, or with its default dtype"
        got = step(model, lambda: forward(model), cause=cause)
        check_equal(set(seen), {dtype}, "dtypes in a block, recomputation included", cause=cause)
        check_same(got, step(plain, lambda: forward(plain)), cause=cause)

    @pytest.mark.exact
    @SIZES
    def test_a_mask_is_there_in_the_recomputation_too(self, answer, device, size):
        model, plain = pair(answer, device, size)
        x = inputs(device, grad=True)
        mask = draw.rand(3, 5, device=device) < 0.6
        cause = "the recomputation has no mask, or another one"
        got = step(model, lambda: model(x, mask=mask), x, cause=cause)
        check_equal(got["output"][~mask], x[~mask].detach(), "masked output", cause=cause)
        check_same(got, step(plain, lambda: plain(x, mask=mask), x), cause=cause)

    @pytest.mark.exact
    @SIZES
    def test_has_the_keys_of_the_blocks_alone(self, answer, device, size):
        """pytorch/pytorch#77224: a wrapper's prefix in every key keeps weights from being loaded
        into a model without checkpoints."""
        model = answer.LargeModel(LAYERS, WIDTH, segment_size=size).to(device)
        want = [
            f"layers.{number}.{child}.{name}"
            for number in range(LAYERS)
            for child in ("up", "down")
            for name in ("weight", "bias")
        ]
        cause = "blocks are wrapped in other modules, or registered under a second name"
        check_equal(sorted(model.state_dict()), sorted(want), "keys of state_dict()", cause=cause)

    @pytest.mark.survives
    @SIZES
    def test_bears_several_forward_passes_before_one_backward(self, answer, device, size):
        """Several micro-batches in one loss, or a siamese model: each pass has its own mask."""
        model, plain = pair(answer, device, size)
        batches = [inputs(device) for _ in range(3)]
        masks = [draw.rand(3, 5, device=device) < share for share in (0.6, 0.3, 0.8)]

        def forward(module: nn.Module) -> Tensor:
            pairs = zip(batches, masks, strict=True)
            return torch.cat([module(x, mask=mask) for x, mask in pairs])

        cause = "what the recomputation needs is kept on the model, where the next forward pass"
        cause += " overwrites it"
        got = step(model, lambda: forward(model), cause=cause)
        check_same(got, step(plain, lambda: forward(plain)), cause=cause)

    @pytest.mark.survives
    @SIZES
    @pytest.mark.parametrize("trained", ["all_but_the_first", "the_last", "the_first"])
    def test_trains_around_frozen_blocks(self, answer, device, size, trained):
        """Fine-tuning; the input requires no gradient. huggingface/transformers#23170."""
        model, plain = pair(answer, device, size)
        kept = {"all_but_the_first": range(1, LAYERS), "the_last": [LAYERS - 1], "the_first": [0]}
        for module in (model, plain):
            for number, block in enumerate(module.layers):
                block.requires_grad_(number in kept[trained])
        x = inputs(device)
        cause = "the checkpoints need an input or a block that requires a gradient"
        got = step(model, lambda: model(x), cause=cause)
        check_same(got, step(plain, lambda: plain(x)), cause=cause)
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        touched = [n for n in frozen if model.get_parameter(n).grad is not None]
        check(
            len(frozen) == 4 * (LAYERS - len(kept[trained])) and not touched,
            expected="frozen blocks that stay frozen, without gradients",
            got=f"gradients of {touched}, or requires_grad switched on",
            cause="requires_grad is changed to please the checkpoint",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("size", [1, 2], ids=["each_block", "segments_of_2"])
    def test_a_copy_is_a_model_of_its_own(self, answer, device, size):
        """facebookresearch/fairscale#816: a copy that goes on calling the original's blocks.

        The model has made a step before it is copied.
        """
        model = answer.LargeModel(3, WIDTH, dropout=0.0, segment_size=size).to(device)
        back(model(inputs(device)))
        model.zero_grad()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.5)
        plain = answer.LargeModel(3, WIDTH, dropout=0.0, use_checkpoint=False).to(device)
        plain.load_state_dict(twin.state_dict())
        x = inputs(device)
        output = twin(x)
        cause = (
            "something that was made in __init__, or in a first step, still holds the original's"
        )
        cause += " blocks"
        check_equal(output.detach(), plain(x).detach(), "output of the copy", cause=cause)
        back(output)
        check(
            all(p.grad is None for p in model.parameters())
            and all(p.grad is not None for p in twin.parameters()),
            expected="gradients on the copy, and none on the original",
            got="gradients on the original, or none on the copy",
            cause=cause,
        )
