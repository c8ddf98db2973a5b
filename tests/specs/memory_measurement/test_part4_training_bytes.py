"""The closed form, compared with published figures and with sums on the page."""

from functools import partial

import pytest

from kit.laws.checks import check_raises
from kit.laws.scenarios import scenarios

ZERO = "stage 1 divides the state, 2 also gradients, 3 also weights"


def call(answer, words):
    """The arguments as one writes them."""
    return eval(f"training_bytes({words})", {"training_bytes": answer.training_bytes})


@scenarios("bytes")
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
    @counts("stage 1 divides the optimizer's 12, 2 also the gradients' 2, 3 the rest; 0 nothing")
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
        yield "1001, 'lora_16bit', trainable=30, zero_stage=2, ranks=5", 2002 + 30 * 4 + 6 * 12
        yield "1000, 'lora_16bit', trainable=30, zero_stage=3, ranks=5", 200 * 2 + 6 * 16

    @pytest.mark.exact("training_bytes", "lora_4bit")
    @counts("a frozen weight takes half a byte, and the result is an int")
    def test_adds_adapters_to_4_bit_weights(self):
        yield "1000, 'lora_4bit', trainable=30", 500 + 30 * 16
        yield "1000, 'lora_4bit', trainable=30, zero_stage=2, ranks=5", 500 + 30 * 4 + 6 * 12

    @pytest.mark.survives("training_bytes", 1)
    @counts("bytes are divided, or a shard is rounded down")
    def test_pads_shards_to_one_size(self):
        """10 parameters on 4 ranks are 3 on each."""
        yield "10, 'adam', zero_stage=1, ranks=4", 10 * 8 + 3 * 8
        yield "10, 'adam', zero_stage=2, ranks=4", 10 * 4 + 3 * 12
        yield "1001, 'lora_16bit', trainable=30, zero_stage=1, ranks=4", 2002 + 30 * 8 + 8 * 8
        yield "3, 'sgd', zero_stage=3, ranks=64", 8

    @pytest.mark.survives("training_bytes", "Raises")
    def test_refuses_bad_input(self, answer):
        bad = {"-1, 'adam'": -1, "10, 'lora_4bit', trainable=-3": -3}
        bad |= {"10, 'lora_16bit'": ("trainable", None), "10, 'adam', trainable=77": 77}
        bad |= {f"10, {name!r}": name for name in ("adamw8bit", "Adam", "lora_8bit")}
        bad |= {f"10, 'adam', ranks={n}": n for n in (0, -2)}
        bad |= {f"10, 'adam', zero_stage={n}": n for n in (4, -1)}
        bad |= {"10, 'adam', trainable=0": ("trainable", 0)}
        for words, value in bad.items():
            run, when = partial(call, answer, words), f"for training_bytes({words})"
            check_raises(run, ValueError, mentions=[value], when=when)
