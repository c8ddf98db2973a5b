"""The closed form, compared with published figures and with sums on the page."""

from __future__ import annotations

import pytest

from kit.laws.checks import check_close, check_raises
from kit.laws.scenarios import check_scenarios


def call(answer, words):
    return eval(f"training_bytes({words})", {"training_bytes": answer.training_bytes})


def check_bytes(answer, cases, cause):
    """`cases` are the arguments as one writes them, and the bytes."""
    __tracebackhide__ = True
    law = {f"training_bytes({words})": case for case in cases.items() for words in case[:1]}
    check_scenarios(answer, lambda a, case: (call(a, case[0]), case[1]), law, "bytes", cause=cause)


def check_recipe(answer, recipe, each, cause):
    """Whole, and divided: 1,001,000 parameters on 8 ranks are 125,125 on each."""
    __tracebackhide__ = True
    cases = {f"1_000_003, {recipe!r}": 1_000_003 * sum(each)}
    for stage in (1, 2, 3):
        whole, divided = sum(each[: 3 - stage]), sum(each[3 - stage :])
        words = f"1_001_000, {recipe!r}, zero_stage={stage}, ranks=8"
        cases[words] = 1_001_000 * whole + 125_125 * divided
    check_bytes(answer, cases, cause)


class TestPart4TrainingBytes:
    """Part 4: training_bytes - the closed form, before anything is built"""

    subject = "training_bytes"

    @pytest.mark.works("training_bytes", "sgd")
    def test_knows_sgd(self, answer):
        check_recipe(answer, "sgd", (4, 4, 0), "plain SGD keeps no state")

    @pytest.mark.works("training_bytes", "sgd_momentum")
    def test_knows_momentum(self, answer):
        check_recipe(answer, "sgd_momentum", (4, 4, 4), "momentum is one more copy")

    @pytest.mark.works("training_bytes", "adam")
    def test_knows_adam(self, answer):
        check_recipe(answer, "adam", (4, 4, 8), "Adam keeps two fp32 moments")

    @pytest.mark.works("training_bytes", "amp_adam")
    def test_knows_autocast(self, answer):
        check_recipe(answer, "amp_adam", (4, 4, 8), "autocast keeps fp32 weights and gradients")

    @pytest.mark.works("training_bytes", "master_adam")
    def test_knows_master_weights(self, answer):
        cause = "the optimizer has a master copy of 4 and two moments of 4"
        check_recipe(answer, "master_adam", (2, 2, 12), cause)

    @pytest.mark.exact("training_bytes", "zero")
    @pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
    def test_has_the_figures_of_the_zero_paper(self, answer, stage, gigabytes):
        """7.5 billion parameters on 64 ranks (arXiv 1910.02054, figure 1)."""
        got = answer.training_bytes(7_500_000_000, "master_adam", zero_stage=stage, ranks=64) / 1e9
        cause = "stage 1 divides the optimizer's 12, stage 2 the gradients' 2, stage 3 the rest"
        what = f"GB a rank at stage {stage}"
        check_close(got, gigabytes, what, rtol=0, atol=0.05, cause=cause)

    @pytest.mark.exact("training_bytes", "zero_stage")
    def test_divides_nothing_unless_told_to(self, answer):
        calls = ["ranks=4", "zero_stage=1", "zero_stage=2", "zero_stage=3"]
        cases = {f"10, 'adam', {words}": 160 for words in calls}
        check_bytes(answer, cases, "the defaults are stage 0 and one rank")

    @pytest.mark.exact("training_bytes", "lora_16bit")
    def test_adds_adapters_to_16_bit_weights(self, answer):
        cases = {
            "1001, 'lora_16bit', trainable=30": 2002 + 30 * 16,
            "1001, 'lora_16bit', trainable=30, zero_stage=1, ranks=4": 2002 + 30 * 8 + 8 * 8,
            "1001, 'lora_16bit', trainable=30, zero_stage=2, ranks=4": 2002 + 30 * 4 + 8 * 12,
        }
        check_bytes(answer, cases, "frozen weights have no gradient and no moments, adapters have")

    @pytest.mark.exact("training_bytes", "lora_4bit")
    def test_adds_adapters_to_4_bit_weights(self, answer):
        cases = {
            "1000, 'lora_4bit', trainable=30": 500 + 30 * 16,
            "1000, 'lora_4bit', trainable=30, zero_stage=2, ranks=4": 500 + 30 * 4 + 8 * 12,
        }
        check_bytes(answer, cases, "a frozen weight takes half a byte")

    @pytest.mark.survives("training_bytes", 1)
    def test_pads_shards_to_one_size(self, answer):
        """10 parameters on 4 ranks are 3 on each."""
        cases = {
            "10, 'adam', zero_stage=1, ranks=4": 10 * 8 + 3 * 8,
            "10, 'adam', zero_stage=2, ranks=4": 10 * 4 + 3 * 12,
            "10, 'adam', zero_stage=3, ranks=4": 3 * 16,
            "3, 'sgd', zero_stage=3, ranks=64": 8,
        }
        check_bytes(answer, cases, "bytes are divided, or a shard is rounded down")

    @pytest.mark.survives("training_bytes", 2)
    def test_divides_frozen_weights_at_stage_3(self, answer):
        cases = {
            "1001, 'lora_16bit', trainable=30, zero_stage=3, ranks=4": 251 * 2 + 8 * 16,
            "1001, 'lora_4bit', trainable=30, zero_stage=3, ranks=4": 126 + 8 * 16,
        }
        check_bytes(answer, cases, "a frozen shard is kept whole, or its bytes are divided")

    @pytest.mark.survives("training_bytes", 3)
    def test_stays_exact(self, answer):
        cases = {
            "1001, 'lora_4bit', trainable=30": 501 + 480,
            "10**17 + 1, 'sgd', zero_stage=3, ranks=2": 8 * (5 * 10**16 + 1),
            "10**17 + 1, 'lora_4bit', trainable=0": 5 * 10**16 + 1,
            "1, 'lora_16bit', trainable=10**17 + 1": 2 + 16 * (10**17 + 1),
        }
        check_bytes(answer, cases, "half a byte is dropped, or floats with their 53 bits round")

    @pytest.mark.survives("training_bytes", 4)
    def test_takes_0_for_a_count(self, answer):
        cases = {
            "0, 'adam'": 0,
            "100, 'lora_16bit', trainable=0": 200,
            "0, 'lora_4bit', trainable=3, zero_stage=3, ranks=2": 32,
        }
        check_bytes(answer, cases, "0 is taken for nothing given")

    @pytest.mark.survives("training_bytes", 5)
    def test_refuses_a_float(self, answer):
        bad = {
            "7e9, 'adam'": 7e9,
            "10, 'adam', ranks=2.0": 2.0,
            "10, 'adam', zero_stage=1.0": 1.0,
            "10, 'lora_4bit', trainable=2.5": 2.5,
        }
        for words, value in bad.items():
            when = f"for training_bytes({words})"
            check_raises(lambda w=words: call(answer, w), TypeError, mentions=[value], when=when)

    @pytest.mark.survives("training_bytes", "Raises")
    def test_refuses_bad_input(self, answer):
        bad = {
            "10, 'adamw8bit'": "adamw8bit",
            "-5, 'adam'": -5,
            "10, 'lora_4bit', trainable=-3": -3,
            "10, 'adam', ranks=0": 0,
            "10, 'adam', ranks=-2": -2,
            "10, 'adam', zero_stage=4": 4,
            "10, 'adam', zero_stage=-1": -1,
            "10, 'adam', trainable=77": 77,
            "10, 'adam', trainable=0": 0,
            "10, 'lora_16bit'": None,
        }
        for words, value in bad.items():
            when = f"for training_bytes({words})"
            check_raises(lambda w=words: call(answer, w), ValueError, mentions=[value], when=when)
