"""Every numeric claim of the five articles, in our words: where it was made, and what it says.

An experiment names the claims that it measures (CLAIMS) and sets a result beside each.
"""

from __future__ import annotations

from typing import NamedTuple

ARTICLES = {
    "Q9": "Question 9: a memory-efficient training algorithm",
    "ZOMI": "CODE 02: memory optimisation by gradient checkpointing",
    "MEDIUM": "How to increase training performance through memory optimization",
    "L97": "Lesson 97: gradient checkpointing and mixed precision",
    "LAB": "Lab 1.4: training optimization basics",
}


class Claim(NamedTuple):
    """`article` is a key of ARTICLES, `where` its section."""

    article: str
    where: str
    text: str


CLAIMS = {
    "q9-amp-half": Claim(
        "Q9",
        "1. Mixed precision",
        "AMP halves parameters, gradients and activations; about 50 % of memory",
    ),
    "q9-amp-twice": Claim("Q9", "1. Mixed precision", "float16 doubles the speed on tensor cores"),
    "q9-checkpoint-70": Claim("Q9", "Summary", "checkpointing saves about 70 % of memory"),
    "q9-checkpoint-time": Claim(
        "Q9", "2. Checkpointing", "checkpointing makes training 20 to 30 % slower"
    ),
    "q9-checkpoint-depth": Claim(
        "Q9", "2. Checkpointing", "what checkpointing saves grows in proportion to depth"
    ),
    "q9-zero1": Claim("Q9", "3. Sharding", "ZeRO-1 needs 4 times less memory (75 %)"),
    "q9-zero2": Claim("Q9", "3. Sharding", "ZeRO-2 needs 8 times less memory (87.5 %)"),
    "q9-zero3": Claim(
        "Q9",
        "3. Sharding",
        "ZeRO-3 needs N times less memory, so N GPUs train a model N times as large",
    ),
    "q9-zero-free": Claim("Q9", "Summary", "ZeRO-1 and ZeRO-2 cost no time"),
    "zomi-root": Claim(
        "ZOMI", "2. Principle", "a checkpoint every sqrt(L) layers needs O(sqrt(L)) memory"
    ),
    "zomi-twice": Claim(
        "ZOMI", "2. Principle", "every forward pass is then computed twice: twice the computation"
    ),
    "zomi-rate": Claim(
        "ZOMI", "2. Principle", "memory saved is 1 - sqrt(L)/L, computation added is 2 sqrt(L)/L"
    ),
    "medium-batch": Claim(
        "MEDIUM", "GPU experiments", "AMP raises the largest batch moderately, checkpointing a lot"
    ),
    "medium-speed": Claim(
        "MEDIUM", "GPU experiments", "AMP raises throughput a lot, checkpointing lowers it slightly"
    ),
    "medium-zero-traffic": Claim(
        "MEDIUM", "ZeRO", "ZeRO-3 needs about 50 % more communication than data parallelism"
    ),
    "medium-zero-linear": Claim(
        "MEDIUM", "ZeRO", "ZeRO-3 saves memory linearly with the number of GPUs"
    ),
    "medium-padding": Claim(
        "MEDIUM",
        "TPU experiments",
        "sizes of 64 where the hardware pads to 128 waste a factor of 2",
    ),
    "l97-76gb": Claim(
        "L97",
        "Introduction",
        "7B: 14 GB weights, 14 GB gradients, 28 GB optimizer state, 20 GB activations: 76 GB",
    ),
    "l97-checkpoint-70": Claim(
        "L97",
        "Checkpointing",
        "checkpointing saves 70 % of activations (20 GB to 6 GB), 50 to 70 % of memory",
    ),
    "l97-checkpoint-time": Claim(
        "L97", "Checkpointing", "checkpointing takes 10 to 20 % more time"
    ),
    "l97-amp": Claim(
        "L97",
        "Mixed precision",
        "float16 halves memory (76 GB to 38 GB) and is 2 to 3 times as fast",
    ),
    "l97-loss": Claim(
        "L97", "Mixed precision", "the final model differs by less than 0.5 % from float32's"
    ),
    "l97-qlora": Claim(
        "L97",
        "QLoRA",
        "a 4-bit base with checkpointing and LoRA: 3.5 GB weights, 13.5 GB in all for 7B",
    ),
    "lab-amp": Claim(
        "LAB",
        "Mixed precision",
        "AMP takes GPT-2 small from 8 to 4.5 GB at 2.1 to 2.2 times the speed",
    ),
    "lab-accumulation": Claim(
        "LAB", "Overview", "accumulation needs no more memory and takes 5 % more time"
    ),
    "lab-checkpoint": Claim(
        "LAB",
        "Notebook 3",
        "checkpointing saves 42 % of the peak (30 to 50 %) for 25 % more time (20 to 30 %)",
    ),
    "lab-both": Claim(
        "LAB",
        "Combined",
        "AMP, accumulation and checkpointing save 65 to 70 % at about the same time",
    ),
}
