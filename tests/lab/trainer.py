"""The flags of the transformers library's `Trainer`, and the references that do the same."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from kit.laws.toys import text_batches
from lab.measure import alternating, peak_of, ratio, solution
from lab.models import next_token, with_logits
from lab.notebook import Lab, needs

BATCH, STEPS = 8, 2
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"bf16": True},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "gradient_accumulation_steps=4": {"gradient_accumulation_steps": 4},
}
FLAGS["all three"] = {name: value for flag in FLAGS.values() for name, value in flag.items()}
Made = tuple[Callable[[], object], nn.Module]


def beside_trainer(lab: Lab) -> None:
    """A table: peak and time of two steps, by the library's flags and by the references."""
    needs("transformers", "accelerate")
    wanted = ("none", "all three") if lab.quick else FLAGS
    found = {
        name: lab.sample(f"Trainer {name}", partial(_measured, lab, FLAGS[name])) for name in wanted
    }

    def saved(one: dict[str, Any], whose: str) -> tuple[str, str]:
        size, most = (found["peaks"][whose] for found in (one, found["none"]))
        return f"{size / 2**20:,.1f}", f"{1 - size / most:.0%}"

    lab.table(
        f"The flags of transformers' Trainer and our references, {STEPS} steps of {BATCH} samples",
        ["flag", "Trainer's peak, MiB", "saved", "ours, MiB", "saved", "of the time", "spread"],
        [
            [name, *saved(one, "theirs"), *saved(one, "ours")]
            + [f"{part:.2f}" for part in ratio(one["seconds"]["ours"], one["seconds"]["theirs"])]
            for name, one in found.items()
        ],
    )
    lab.say(
        "Above the weights, AdamW's state among them. Trainer's time has its data loader in it, "
        "and what it makes anew at each call."
    )


def _measured(lab: Lab, flags: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of what the library would like to have: a GPU, a logger
        ways = {"theirs": partial(_theirs, lab, folder, flags), "ours": partial(_ours, lab, flags)}
        peaks = dict[str, int]()
        for name, way in ways.items():
            train, model = way()
            peaks[name] = peak_of(train, lab.device, [model])
            del train, model
        steps = {name: way()[0] for name, way in ways.items()}
        seconds = alternating(steps, lab.device, rounds=2 if lab.quick else 9, limit=lab.limit)
    return {"peaks": peaks, "seconds": seconds}


def _model(lab: Lab) -> tuple[nn.Module, list[Tensor]]:
    """GPT-2 without attention's dropout, and the tokens of each sample."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    on_gpu = lab.device.type == "cuda"
    length = 512 if on_gpu else 64 if lab.quick else 128
    layers, width = (2, 64) if lab.quick else (4, 128)
    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": 2, "vocab_size": 256}
    sizes |= {"n_positions": length, "bos_token_id": 0, "eos_token_id": 0}
    if on_gpu:
        sizes = {}
    model = GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, use_cache=False, **sizes)).train()
    model.loss_type = "ForCausalLM"  # as the library would guess, which it says aloud
    samples = [x for x, _ in text_batches(BATCH * STEPS, 1, length)]
    return model.to(lab.device), [sample[0] for sample in samples]


def _split(flags: dict[str, Any]) -> tuple[int, int]:
    """Micro-batches to a step, and samples in each."""
    window: int = flags.get("gradient_accumulation_steps", 1)
    return window, BATCH // window


def _theirs(lab: Lab, folder: str, flags: dict[str, Any]) -> Made:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model, samples = _model(lab)
    if flags.get("gradient_checkpointing"):
        flags = {**flags, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=_split(flags)[1],
        max_steps=STEPS,
        use_cpu=lab.device.type == "cpu",
        optim="adamw_torch",
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **flags,
    )
    data: Any = [{"input_ids": sample, "labels": sample} for sample in samples]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)  # the terminal is the lab's
    return trainer.train, model


def _ours(lab: Lab, flags: dict[str, Any]) -> Made:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model, samples = _model(lab)
    with_logits(model)
    if flags.get("gradient_checkpointing"):
        solution("checkpointed_model").checkpoint_blocks(model, GPT2Block)
    window, size = _split(flags)
    optimizer = AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    rows = torch.stack(samples).to(lab.device).split(size)

    def shifted(logits: Tensor, tokens: Tensor) -> Tensor:
        # As the library does: to cut the last logits off would copy the others.
        return next_token(logits, F.pad(tokens, (0, 1), value=-100)[:, 1:])

    train = partial(
        solution("gradient_accumulation").train_epoch,
        *(model, [(tokens, tokens) for tokens in rows], shifted, optimizer),
        window=window,
        dtype=torch.bfloat16 if flags.get("bf16") else torch.float32,
        max_norm=1.0,  # Trainer's default
    )
    return train, model
