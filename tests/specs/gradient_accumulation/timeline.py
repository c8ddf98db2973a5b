"""One window as a picture: the activations of one micro-batch, not of the window."""

from torch.optim import Adam

from kit.laws import draw
from kit.laws.toys import mlp, mse
from kit.memory.account import account

TITLE = "A window of 8 micro-batches of 512 samples, 6 layers 256 wide"


def timeline(answer, reference, device):
    """The plain way is the whole window as one batch."""
    ways = {"plain": (reference, 1), "reference": (reference, 8), "yours": (answer, 8)}
    return {name: _window(*way, device) for name, way in ways.items()}


def _window(answer, count, device):
    model = mlp(*[256] * 7, device=device)
    data = (draw.randn(8 * 512, 256, device=device).chunk(count) for _ in range(2))
    window = [tuple(part.clone() for part in pair) for pair in zip(*data, strict=True)]
    optimizer = Adam(model.parameters(), foreach=True)

    def step():
        answer.accumulate(model, window, mse, optimizer)

    step()
    return account(step, device, model=model, optimizer=optimizer, known=window)
