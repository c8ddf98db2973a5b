"""A plan, and a picture of a step, for the tiny kata."""

# mean() of 0 ... values - 1, in GiB, is what "shards" holds.
PLAN = """\
from kit.memory.plan import Plan, Row

SIZES = {"values": 49, "ranks": 1_000}


def plan(answer, **sizes):
    if sizes["values"] % 2 == 0:
        raise ValueError(f"values must be odd, not {sizes['values']}")
    held = int(answer.mean([float(n) for n in range(sizes["values"])]) * 2**30)
    kinds = {"shards": held, "optimizer state": 0, "gradients": 0, "unsharded": 0}
    more = {"communication": 0, "activations": 2**30}
    rows = [
        Row("one configuration with many words", {**kinds, **more}, held + 2**30, "3 gathers"),
        Row("exactly", {"shards": 40 * 2**30}, 40 * 2**30),
    ]
    if sizes["ranks"] == 1:
        rows.append(Row("alone", {"shards": 40 * 2**30}, 40 * 2**30))
    title = f"{sizes['values']} values on {sizes['ranks']:,} ranks"
    return Plan(title, rows, ["A note."])
"""

# The peak is 64 KiB for each unit of mean([1.0, 3.0]), beside a gradient and a weight of 512 bytes.
TIMELINE = """\
import torch

from kit.memory.account import account

TITLE = "One step of nothing"


def timeline(answer, reference, device):
    ways = {"plain": 4.0, "reference": reference.mean([1.0, 3.0]), "yours": answer.mean([1.0, 3.0])}
    return {name: held(int(size), device) for name, size in ways.items()}


def held(size, device):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x = torch.ones(size * 2**14, 1)
        model(x).sum().backward()

    return account(step, device, model=model, optimizer=optimizer)
"""
