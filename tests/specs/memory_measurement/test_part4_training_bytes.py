"""The closed form, compared with published figures and with a real step."""

from __future__ import annotations

import pytest
import torch

from kit.laws import draw
from kit.laws.checks import check_bar, check_close, check_equal, check_raises
from kit.laws.toys import mlp


class TestPart4TrainingBytes:
    """Part 4: training_bytes - the closed form, before anything is built"""

    subject = "training_bytes"

    @pytest.mark.works
    @pytest.mark.parametrize(
        ("recipe", "each"),
        [("sgd", 8), ("sgd_momentum", 12), ("adam", 16), ("amp_adam", 16), ("master_adam", 16)],
    )
    def test_knows_the_bytes_a_parameter_of_each_recipe(self, answer, recipe, each):
        check_equal(
            answer.training_bytes(1_000_003, recipe),
            1_000_003 * each,
            f"bytes of 1,000,003 parameters under {recipe!r} ({each} each)",
            cause="AMP halves neither weights nor gradients; a master copy is one more fp32 weight",
        )

    @pytest.mark.exact
    @pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
    def test_has_the_figures_of_the_zero_paper(self, answer, stage, gigabytes):
        """7.5 billion parameters on 64 ranks (arXiv 1910.02054, figure 1)."""
        got = answer.training_bytes(7_500_000_000, "master_adam", zero_stage=stage, ranks=64)
        check_close(
            got / 1e9,
            gigabytes,
            f"GB a rank at stage {stage}",
            rtol=0,
            atol=0.05,
            cause="stage 1 divides the optimizer's 12, stage 2 the gradients' 2, stage 3 the rest",
        )

    @pytest.mark.exact
    def test_pads_shards_to_one_size(self, answer):
        """10 parameters on 4 ranks are 3 on each: 3 * 16, and stage 1 has 4 + 4 left whole."""
        got = [answer.training_bytes(10, "adam", zero_stage=s, ranks=4) for s in (1, 2, 3)]
        want = [10 * 8 + 3 * 8, 10 * 4 + 3 * 12, 3 * 16]
        cause = "a shard is ceil(n / ranks) parameters; bytes are divided, or rounded down"
        check_equal(got, want, "bytes of 10 parameters on 4 ranks at stages 1, 2, 3", cause=cause)

    @pytest.mark.exact
    def test_divides_nothing_unless_told_to(self, answer):
        """Stage 0 is whole on any number of ranks, and one rank is whole at any stage."""
        got = [answer.training_bytes(10, "adam", ranks=4)]
        got += [answer.training_bytes(10, "adam", zero_stage=stage) for stage in (1, 2, 3)]
        cause = "the defaults are stage 0 and one rank"
        check_equal(got, [160] * 4, "bytes with only ranks, or only a stage, given", cause=cause)

    @pytest.mark.exact
    def test_adds_adapters_to_frozen_weights(self, answer):
        """LoRA: 2 (or 1/2) a frozen parameter and 16 an adapter; stage 3 divides both."""
        got = [
            answer.training_bytes(1001, "lora_16bit", trainable=30),
            answer.training_bytes(1001, "lora_4bit", trainable=30),
            answer.training_bytes(1001, "lora_4bit", trainable=30, zero_stage=1, ranks=4),
            answer.training_bytes(1001, "lora_16bit", trainable=30, zero_stage=3, ranks=4),
        ]
        want = [2002 + 480, 501 + 480, 501 + 30 * 8 + 8 * 8, 251 * 2 + 8 * 16]
        cause = "frozen weights have no gradient and no moments; half a byte is rounded up"
        check_equal(got, want, "bytes of 1001 frozen and 30 adapter parameters", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("recipe", ["sgd", "sgd_momentum", "adam"])
    def test_is_what_a_trained_model_really_holds(self, answer, device, recipe):
        """The closed form against the tensors of a real step, less Adam's step counters."""
        model = mlp(9, 31, 4, device=device)
        optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
            "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p),
        }[recipe](model.parameters())
        model(draw.randn(2, 9, device=device)).sum().backward()
        optimizer.step()
        state = [t for s in optimizer.state.values() for t in s.values() if t is not None]
        held = [*model.parameters(), *[p.grad for p in model.parameters()]]
        held += [t for t in state if t.dim() > 0]
        n_params = sum(p.numel() for p in model.parameters())
        check_equal(
            answer.training_bytes(n_params, recipe),
            sum(t.nbytes for t in held),
            f"bytes that {recipe!r} holds after a step",
            cause="a term of weights + gradients + optimizer is missing",
        )

    @pytest.mark.saves
    def test_shows_what_each_stage_saves(self, answer, reference):
        """Of 16 bytes a stage leaves 4 + 12/N, 2 + 14/N and 16/N: no more than that."""
        n_params, ranks = 64_000_000, 8

        def of(module: object, stage: int) -> int:
            return module.training_bytes(n_params, "master_adam", zero_stage=stage, ranks=ranks)

        left = {1: (4, 12), 2: (2, 14), 3: (0, 16)}
        for stage, (whole, divided) in left.items():
            check_bar(
                f"state a rank, stage {stage} on 8 ranks",
                of(answer, stage),
                n_params * whole + n_params * divided // ranks,
                plain=of(answer, 0),
                reference=of(reference, stage),
                formula=f"{whole} + {divided}/8 bytes a parameter",
                cause="a part that this stage divides is kept whole on every rank",
            )

    @pytest.mark.survives
    def test_stays_exact_for_very_large_counts(self, answer):
        n_params = 10**17 + 1
        got = answer.training_bytes(n_params, "sgd", zero_stage=3, ranks=2)
        cause = "the arithmetic goes through floats, which have 53 bits"
        check_equal(
            got, 8 * (5 * 10**16 + 1), "bytes of 1e17 + 1 parameters on 2 ranks", cause=cause
        )

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("args", "options", "error", "value"),
        [
            pytest.param((10, "adamw8bit"), {}, ValueError, "adamw8bit", id="unknown_recipe"),
            pytest.param((-5, "adam"), {}, ValueError, "-5", id="negative"),
            pytest.param((7e9, "adam"), {}, TypeError, "7000000000.0", id="float"),
            pytest.param((True, "adam"), {}, TypeError, "True", id="bool"),
            pytest.param((10, "adam"), {"ranks": 0}, ValueError, "0", id="no_rank"),
            pytest.param((10, "adam"), {"ranks": 2.0}, TypeError, "2.0", id="float_ranks"),
            pytest.param((10, "adam"), {"zero_stage": 4}, ValueError, "4", id="stage_4"),
            pytest.param((10, "adam"), {"zero_stage": -1}, ValueError, "-1", id="stage_below_0"),
            pytest.param((10, "adam"), {"trainable": 77}, ValueError, "77", id="stray_adapters"),
            pytest.param((10, "lora_16bit"), {}, ValueError, "", id="no_adapters"),
            pytest.param((10, "adam"), {"trainable": 0}, ValueError, "", id="stray_zero"),
            pytest.param(
                (10, "lora_4bit"), {"trainable": 2.5}, TypeError, "2.5", id="half_adapters"
            ),
            pytest.param((10, "adam"), {"ranks": True}, TypeError, "True", id="bool_ranks"),
            pytest.param((10, "adam"), {"zero_stage": 1.0}, TypeError, "1.0", id="float_stage"),
            pytest.param((10, "adam"), {"zero_stage": True}, TypeError, "True", id="bool_stage"),
            pytest.param(
                (10, "lora_4bit"), {"trainable": -3}, ValueError, "-3", id="negative_adapters"
            ),
        ],
    )
    def test_refuses_bad_input(self, answer, args, options, error, value):
        words = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in options.items())])
        check_raises(
            lambda: answer.training_bytes(*args, **options),
            error,
            mentions=[value] if value else [],
            when=f"for training_bytes({words})",
        )

    @pytest.mark.survives
    def test_nought_is_a_count_and_half_bytes_are_exact(self, answer):
        cases = {
            (0, "adam"): ({}, 0),
            (100, "lora_16bit"): ({"trainable": 0}, 200),
            (1001, "lora_4bit"): ({"trainable": 30, "zero_stage": 3, "ranks": 4}, 126 + 128),
            (10**17 + 1, "lora_4bit"): ({"trainable": 0}, 5 * 10**16 + 1),
            (1000, "lora_16bit"): ({"trainable": 30, "zero_stage": 2, "ranks": 4}, 2000 + 216),
        }
        cause = "0 is taken for nothing given, a 4-bit shard is kept whole, or floats round"
        for args, (options, want) in cases.items():
            got = answer.training_bytes(*args, **options)
            check_equal(got, want, f"bytes of {args}, {options}", cause=cause)
