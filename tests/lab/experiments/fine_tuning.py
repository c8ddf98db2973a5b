"""L97's fine-tuning: full, LoRA, a 4-bit base with LoRA; and two ways to checkpoint a GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from kit.memory.stack import by_kind, stacked
from lab import draw, strangers
from lab.lora import adapt
from lab.measure import Made, books_at_full_size, rehearsed, solution
from lab.models import next_token, parameters_of, plain_step, source_batches, text
from lab.notebook import Lab, in_part, needs
from lab.trainer import beside_trainer

ORDER = 7
TITLE = "Fine-tuning"
QUESTION = "What do LoRA and a 4-bit base save of fine-tuning, and what do they do to the loss?"
SECONDS = {"quick": 60, "full": 110}
CLAIMS = ("l97-qlora", "l97-checkpoint-70")

GB = 1e9  # the article counts in these
# How each setting adapts the model, and who checkpoints it.
SETTINGS: dict[str, tuple[str, str]] = {
    "full": ("full", ""),
    "LoRA": ("LoRA", ""),
    "4-bit + LoRA": ("4-bit + LoRA", ""),
    "4-bit + LoRA, checkpointed": ("4-bit + LoRA", "ours"),
}


def prepare(built: strangers.Built, how: str, checkpoint: str, rank: int = 16) -> AdamW:
    """Adapt and checkpoint a model in place; the optimizer of what is left to train."""
    model, block = built
    if checkpoint == "ours":
        solution("checkpointed_model").checkpoint_blocks(model, block)
    elif checkpoint:
        # The library's `gradient_checkpointing_enable`, by its newer name where there is one.
        older = getattr(model, "gradient_checkpointing_enable", None)
        enable: Any = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False})
    if how != "full":
        adapt(model, block, rank=rank, alpha=2 * rank, four_bit=how == "4-bit + LoRA")
    model.train()
    # Fused: the foreach form's temporary copy of the weights would hide what is compared here.
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)


def make(
    build: Callable[[], strangers.Built],
    how: str,
    checkpoint: str,
    tokens: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> Made:
    """One step with tokens of shape (batch, length), on the default device."""
    model, block = build()
    batch = torch.zeros(tokens, dtype=torch.long)
    optimizer = prepare((model, block), how, checkpoint)
    step = partial(plain_step, model, (batch, batch), next_token, optimizer, dtype=dtype)
    return step, model, optimizer, [batch]


def run(lab: Lab) -> None:
    """Bytes and losses of the settings, 7B, two ways to checkpoint, and Trainer."""
    needs("transformers")
    _bytes(lab)
    _losses(lab)
    _seven(lab)
    _checkpoints(lab)
    beside_trainer(lab)


def _measured(lab: Lab, how: str, checkpoint: str) -> dict[str, Any]:
    """GPT-2 small, 4 x 512 tokens in float32."""
    trained = 0

    def made() -> Made:
        nonlocal trained
        parts = make(partial(strangers.gpt, 12, 768), how, checkpoint, (4, 512))
        trained = parameters_of(parts[1])
        return parts

    return {"kinds": by_kind(books_at_full_size(made, lab.device)), "trained": trained}


def _bytes(lab: Lab) -> None:
    found = {
        name: lab.sample(f"bytes {how} {by}", partial(_measured, lab, how, by))
        for name, (how, by) in SETTINGS.items()
    }
    total = {name: sum(one["kinds"].values()) for name, one in found.items()}
    how = "the allocator's" if lab.device.type == "cuda" else "by a dry run"
    lab.say(f"GPT-2 small, 4 x 512 tokens, float32, fused AdamW, LoRA of rank 16; {how}.")
    saved = {name: f"{1 - size / total['full']:.0%}" for name, size in total.items()}
    title = (
        f"LoRA saves {saved['LoRA']} of the peak, a 4-bit base with it "
        f"{saved['4-bit + LoRA']}; checkpointed too, {saved['4-bit + LoRA, checkpointed']}"
    )
    kinds = {name: one["kinds"] for name, one in found.items()}
    lab.bars("peaks", kinds, title, "Bytes at the peak of one step by kind, GPT-2 small.")
    lab.table(
        "Peak of one step, MiB",
        ["setting", "trained numbers", *draw.COLOURS, "peak", "saved"],
        [
            [name, f"{one['trained']:,}"]
            + [f"{one['kinds'].get(kind, 0) / 2**20:,.1f}" for kind in draw.COLOURS]
            + [f"{total[name] / 2**20:,.0f}", saved[name]]
            for name, one in found.items()
        ],
    )


def _trained(lab: Lab) -> dict[str, list[float]]:
    """A base trained on documentation, and then each setting's losses on source code."""
    on_gpu = lab.device.type == "cuda"
    layers, width, length, steps = (2, 64, 64, 40) if lab.quick else (2, 128, 64, 200)
    if on_gpu:
        layers, width, length, steps = 12, 768, 512, 60 if lab.quick else 300
    train_step = solution("amp_loop").train_step

    def fresh() -> strangers.Built:
        with lab.device:
            return strangers.gpt(layers, width, words=256, length=length)

    def learn(model: nn.Module, optimizer: Optimizer, batches: Any) -> list[float]:
        losses = []
        for x, y in batches:
            batch = (x.to(lab.device), y.to(lab.device))
            result = train_step(
                model, batch, next_token, optimizer, dtype=torch.float32, max_norm=1
            )
            losses.append(float(result.loss))
        return losses

    built = fresh()
    optimizer = prepare(built, "full", "")
    learn(built[0], optimizer, text(lab.device, 2 * steps, 8, length))
    base = built[0].state_dict()
    found = dict[str, list[float]]()
    for how in ("full", "LoRA", "4-bit + LoRA"):
        torch.manual_seed(1)  # the same batches for each
        batches = list(source_batches(steps, 8, length))
        model, block = fresh()
        model.load_state_dict(base)
        optimizer = prepare((model, block), how, "", rank=8)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 if how == "full" else 5e-3
        found[how] = learn(model, optimizer, batches)
    return found


def _losses(lab: Lab) -> None:
    found = lab.sample("losses", lambda: _trained(lab))
    tens = {
        how: [sum(losses[at : at + 10]) / 10 for at in range(0, len(losses), 10)]
        for how, losses in found.items()
    }
    count = len(tens["full"])
    figure, (axes,) = draw.figure(height=3.0)
    draw.lines(axes, [10.0 * number + 5 for number in range(count)], tens)
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    last = {how: values[-1] for how, values in tens.items()}
    alt = "Loss on Python source, means of 10 steps, of a base trained on documentation."
    title = (
        f"Fine-tuned for {10 * count} steps, full ends at a loss of {last['full']:.2f}, LoRA at "
        f"{last['LoRA']:.2f}, on a 4-bit base at {last['4-bit + LoRA']:.2f}"
    )
    lab.plot("losses", figure, title, alt)


def _checkpoints(lab: Lab) -> None:
    peaks = dict[str, int]()
    for by in ("", "transformers", "ours"):
        found = lab.sample(f"bytes full {by}", partial(_measured, lab, "full", by))
        peaks[by or "none"] = sum(found["kinds"].values())
    lab.table(
        "Full fine-tuning: transformers' gradient_checkpointing_enable and our checkpoint_blocks",
        ["checkpointed by", "peak, MiB", "saved"],
        [
            [name, f"{size / 2**20:,.1f}", f"{1 - size / peaks['none']:.0%}"]
            for name, size in peaks.items()
        ],
    )


def _seven_billion(how: str, checkpoint: str, layers: int) -> dict[str, int]:
    """LLaMA 7B in bfloat16, Adam's state too; 6 x 512 tokens are some 20 GB of activations."""
    four_bit = how == "4-bit + LoRA"
    dtype = torch.bfloat16 if four_bit else torch.float32  # without autocast it is all bfloat16
    build = partial(strangers.llama, layers)
    books = rehearsed(partial(make, build, how, checkpoint, (6, 512), dtype))
    rows = stacked(books)
    most = max(row["activations"] + row["temporary"] for row in rows)
    weights = by_kind(books)["weights"]
    return {"weights": weights, "peak": books.peak, "activations": most}


def _seven(lab: Lab) -> None:
    def sample(how: str, checkpoint: str, layers: int) -> dict[str, int]:
        name = f"7B {how} {checkpoint} {layers}"
        return lab.sample(name, partial(_seven_billion, how, checkpoint, layers))

    def whole(how: str, checkpoint: str) -> dict[str, int]:
        if not lab.quick:
            return sample(how, checkpoint, 32)
        # Layers are alike, so 2 and 4 of them lie on a line with all 32.
        few, more = (sample(how, checkpoint, number) for number in (2, 4))
        return {key: few[key] + (more[key] - few[key]) * 15 for key in few}

    plain, checkpointed = whole("full", ""), whole("full", "ours")
    weights, peak = (whole("4-bit + LoRA", "ours")[key] for key in ("weights", "peak"))
    line = ", by a line through 2 and 4 layers" if lab.quick else ""
    lab.table(
        f"LLaMA 7B, Adam's state too in bfloat16, 6 x 512 tokens, GB{line}",
        ["checkpointed", "activations, at most", "peak"],
        [
            [name, f"{one['activations'] / GB:.2f}", f"{one['peak'] / GB:.2f}"]
            for name, one in (("no", plain), ("yes", checkpointed))
        ],
    )
    lab.say(
        "LLaMA 7B, with a 4-bit base, LoRA of rank 16 and checkpoints, under "
        f"autocast{line}: {weights / GB:.1f} GB weights, embeddings and head in bfloat16 among "
        f"them, {peak / GB:.1f} GB at the peak."
    )
    _claims(lab, weights / GB, peak / GB, plain, checkpointed)


def _claims(lab: Lab, weights: float, peak: float, plain: Any, checkpointed: Any) -> None:
    lab.claim(
        "l97-qlora",
        f"{weights:.1f} GB weights, {peak:.1f} GB in all",
        verdict=in_part([weights <= 3.5 * 1.1, peak <= 13.5]),
        when="a batch of 6 x 512 tokens; scales, embeddings and head come on top of 4 bits",
    )
    of = {kind: 1 - checkpointed[kind] / plain[kind] for kind in ("activations", "peak")}
    amounts = {k: f"{plain[k] / GB:.1f} GB to {checkpointed[k] / GB:.1f} GB" for k in of}
    lab.claim(
        "l97-checkpoint-70",
        f"{of['activations']:.0%} of the activations ({amounts['activations']}), {of['peak']:.0%} "
        f"of the peak ({amounts['peak']})",
        verdict=in_part([of["activations"] >= 0.65, of["peak"] >= 0.5]),
        when="full fine-tuning of 7B; of the peak more only where activations outweigh the rest",
    )
