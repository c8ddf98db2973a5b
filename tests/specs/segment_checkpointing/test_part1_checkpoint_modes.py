"""A checkpoint without gradients, and ways to ask for them other than backward()."""

import pytest
import torch
from torch import nn

from kit.laws import draw
from specs.segment_checkpointing import worlds as w


class TestPart1Modes:
    @pytest.mark.survives("checkpoint", "no_grad")
    @w.as_plain("no_grad() and inference_mode() are not asked for")
    def test_without_gradients_it_is_the_plain_call(self):
        model = w.probed(nn.Linear(5, 5), nn.Dropout(0.5))
        with torch.inference_mode():
            x = w.data(3, 5)
            refused = lambda c: c(lambda a, xs: {"y": model(a.add_(xs[0]))}, x * 1, [x])["y"]  # noqa: E731
            yield "inference_mode", lambda c: c(model, x)
            yield "inference_mode, a dict of an argument changed by a tensor in a list", refused
        with torch.no_grad():
            yield "no_grad", lambda c: c(model, x)
            yield "no_grad, a dict of an argument changed by a tensor in a list", refused

    @pytest.mark.survives("checkpoint", 6)
    @pytest.mark.filterwarnings("ignore:Using backward")
    @pytest.mark.parametrize(
        "how", ["grad", "grad_of_a_parameter", "inputs", "inputs_of_a_used_graph", "create_graph"]
    )
    def test_refuses_what_would_lose_gradients(self, answer, device, how):
        """grad() may change no .grad, but a backward() inside would; and a second derivative would
        lack the part from inside."""
        model, x = w.probed(nn.Linear(7, 5)).to(device), draw.randn(11, 7, device=device)
        leaves = [x.requires_grad_(), *model.parameters()]

        def ask(call):
            loss = call(model, x).sum() + (x**3).sum()
            if how == "inputs_of_a_used_graph":
                loss.backward(retain_graph=True)
            if how.startswith("inputs"):
                loss.backward(inputs=[x])
            elif how == "create_graph":
                loss.backward(create_graph=True)
                first, x.grad = x.grad, None
                first.square().sum().backward()
            else:
                of = x if how == "grad" else model[0].weight
                of.grad = torch.autograd.grad(loss, of)[0]

        cause = "backward() inside reaches all parameters: grad() and inputs= need a refusal"
        if how == "create_graph":
            cause = "the second run's gradients have no graph, and create_graph=True goes unnoticed"
        w.check_right_or_refused(ask, w.plain_call, answer.checkpoint, leaves, cause)
