"""The closed form, compared with published figures and with sums on the page."""

from functools import partial

import pytest

from kit.laws.checks import check_raises
from kit.laws.scenarios import scenarios

ZERO = "stage 1 divides the state, 2 also gradients, 3 also weights"


def call(answer, words):
    """The arguments as one writes them."""
    return eval(f"training_bytes({words})", {"training_bytes": answer.training_bytes})


def rounded(got, want):
    if got != want and abs(got - want) * 2**50 < want:
        return "floats are in it, without odd numbers above 2**53; or half bytes are rounded down"
    return "a byte too few: shards and half bytes are rounded up" if got == want - 1 else None


@scenarios("bytes", rounded)
def counts(answer, device, words, want):
    return call(answer, words), want


def recipe(name, weights, gradients, optimizer):
    """Whole, and divided: 1,001,000 parameters on 8 ranks are 125,125 on each."""
    n, shard = 1_001_000, 125_125
    yield f"{n}, {name!r}", n * (weights + gradients + optimizer)
    divided = f"{n}, {name!r}, ranks=8, zero_stage="
    yield f"{divided}1", n * (weights + gradients) + shard * optimizer
    yield f"{divided}2", n * weights + shard * (gradients + optimizer)
    yield f"{divided}3", shard * (weights + gradients + optimizer)


def check_refusals(answer, error, cases):
    for words, value in cases.items():
        when = f"for training_bytes({words})"
        check_raises(partial(call, answer, words), error, mentions=[value], when=when)


class TestPart4TrainingBytes:
    @pytest.mark.works("training_bytes", "sgd")
    @counts(f"plain SGD keeps no state; {ZERO}")
    def test_knows_sgd(self):
        yield from recipe("sgd", 4, 4, 0)

    @pytest.mark.works("training_bytes", "sgd_momentum")
    @counts(f"momentum is one more copy; {ZERO}")
    def test_knows_momentum(self):
        yield from recipe("sgd_momentum", 4, 4, 4)

    @pytest.mark.works("training_bytes", "adam")
    @counts(f"Adam keeps two fp32 moments; {ZERO}")
    def test_knows_adam(self):
        yield from recipe("adam", 4, 4, 8)

    @pytest.mark.works("training_bytes", "amp_adam")
    @counts(f"autocast keeps fp32 weights and gradients; {ZERO}")
    def test_knows_autocast(self):
        yield from recipe("amp_adam", 4, 4, 8)

    @pytest.mark.works("training_bytes", "master_adam")
    @counts(f"the state is a master copy of 4 and two moments of 4; {ZERO}")
    def test_knows_master_weights(self):
        yield from recipe("master_adam", 2, 2, 12)

    @pytest.mark.exact("training_bytes", "zero")
    @counts("stage 1 divides the optimizer's 12, 2 the gradients' 2, 3 the rest; 0 pads nothing")
    def test_has_the_figures_of_the_zero_paper(self):
        """120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054, figure 1)."""
        for stage, want in enumerate((120 * 10**9, 31_406_250_000, 16_640_625_000, 1_875_000_000)):
            yield f"7_500_000_000, 'master_adam', zero_stage={stage}, ranks=64", want

        yield "10, 'adam', ranks=4", 160
        yield "10, 'adam', zero_stage=3", 160

    @pytest.mark.exact("training_bytes", "lora_16bit")
    @counts("adapters alone have gradients and moments")
    def test_adds_adapters_to_16_bit_weights(self):
        yield "1001, 'lora_16bit', trainable=30", 2002 + 30 * 16
        yield "1001, 'lora_16bit', trainable=30, zero_stage=1, ranks=5", 2002 + 30 * 8 + 6 * 8
        yield "1001, 'lora_16bit', trainable=30, zero_stage=2, ranks=5", 2002 + 30 * 4 + 6 * 12

    @pytest.mark.exact("training_bytes", "lora_4bit")
    @counts("a frozen weight takes half a byte")
    def test_adds_adapters_to_4_bit_weights(self):
        yield "1000, 'lora_4bit', trainable=30", 500 + 30 * 16
        yield "1000, 'lora_4bit', trainable=30, zero_stage=2, ranks=5", 500 + 30 * 4 + 6 * 12

    @pytest.mark.survives("training_bytes", 1)
    @counts("bytes are divided; or a shard is rounded down, kept whole, or padded with another")
    def test_pads_shards_to_one_size(self):
        """10 parameters on 4 ranks are 3 on each."""
        yield "10, 'adam', zero_stage=1, ranks=4", 10 * 8 + 3 * 8
        yield "10, 'adam', zero_stage=2, ranks=4", 10 * 4 + 3 * 12
        yield "1001, 'lora_16bit', trainable=30, zero_stage=1, ranks=4", 2002 + 30 * 8 + 8 * 8
        yield "3, 'sgd', zero_stage=3, ranks=64", 8
        yield "1001, 'lora_16bit', trainable=3, zero_stage=3, ranks=4", 251 * 2 + 16
        yield "1001, 'lora_4bit', trainable=30, zero_stage=3, ranks=4", 126 + 8 * 16

    @pytest.mark.survives("training_bytes", 2)
    @counts("half a byte is dropped, or floats with their 53 bits round")
    def test_stays_exact(self):
        yield "10**17 + 1, 'sgd', zero_stage=3, ranks=2", 8 * (5 * 10**16 + 1)
        yield "10**17 + 1, 'lora_4bit', trainable=0", 5 * 10**16 + 1

    @pytest.mark.survives("training_bytes", 3)
    @counts("0 is taken for nothing given")
    def test_takes_0_for_a_count(self):
        yield "100, 'lora_16bit', trainable=0", 200
        yield "0, 'lora_4bit', trainable=3, zero_stage=3, ranks=2", 32

    @pytest.mark.survives("training_bytes", 4)
    def test_refuses_floats(self, answer):
        bad = {"7e9, 'adam'": 7e9, "2.5, 'sgd'": 2.5, "10, 'adam', ranks=2.0": 2.0}
        bad |= {"10, 'adam', zero_stage=1.0": 1.0, "10, 'lora_4bit', trainable=0.0": 0.0}
        check_refusals(answer, TypeError, {words: (n, "float") for words, n in bad.items()})

    @pytest.mark.survives("training_bytes", "Raises")
    def test_refuses_bad_input(self, answer):
        bad = {"-5, 'adam'": -5, "-6, 'lora_4bit', trainable=1": -6}
        bad |= {"10, 'lora_4bit', trainable=-3": -3, "10, 'lora_16bit'": ("trainable", None)}
        bad |= {f"10, {name!r}": name for name in ("adamw8bit", "Adam", "sgd-momentum", None)}
        bad |= {f"10, {name!r}, trainable=1": name for name in ("lora", "lora_8bit")}
        bad |= {f"10, 'adam', ranks={n}": n for n in (0, -2)}
        bad |= {f"10, 'adam', zero_stage={n}": n for n in (4, -1)}
        bad |= {f"10, 'adam', trainable={n}": n for n in (77, 0)}
        check_refusals(answer, ValueError, bad)
