"""The losses where autograd does not keep saved tensors as they are: activation checkpointing, saved-tensor hooks."""

from dataclasses import asdict

import pytest
import torch
from heads import OBJECTIVES, assert_equal, eager_mean, every_loss, fused, leaves_of
from torch.utils.checkpoint import checkpoint


def checkpointed(loss, use_reentrant: bool):
    return lambda *tensors: checkpoint(loss, *tensors, use_reentrant=use_reentrant)


def compiled(loss):
    torch.compiler.reset()  # or the losses of other tests count as recompilations
    return torch.compile(loss, backend="aot_eager", fullgraph=True)


def hooked(loss, pack, unpack):
    def under_hooks(*tensors):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss(*tensors)

    return under_hooks


WRAPPERS = {
    "reentrant checkpoint": lambda loss: checkpointed(loss, use_reentrant=True),
    "checkpoint": lambda loss: checkpointed(loss, use_reentrant=False),
    "compiled checkpoint": lambda loss: compiled(checkpointed(loss, use_reentrant=False)),
    "checkpoint of compiled": lambda loss: checkpointed(compiled(loss), use_reentrant=False),
    "identity hooks": lambda loss: hooked(loss, lambda x: x, lambda x: x),
    "copying hooks": lambda loss: hooked(loss, lambda x: x.detach().clone(), lambda x: x.clone()),  # as offloading does
    "numpy hooks": lambda loss: hooked(loss, lambda x: x.detach().numpy().copy(), torch.from_numpy),
}
# Where one graph serves both backwards; elsewhere each backward finds gradients of its own, or scales a copy.
ONE_GRAPH = ["checkpoint", "identity hooks", "copying hooks", "numpy hooks"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@every_loss
def test_gradients_are_right_and_a_second_backward_is_right_or_raises(loss, wrapper):
    hidden, weight, labels = leaves_of()
    objective = OBJECTIVES["all"]
    options = asdict(objective)
    value = WRAPPERS[wrapper](lambda *tensors: loss(*tensors, **options))(hidden, weight, labels)
    for upstream in (0.37, 2.0):
        hidden.grad = weight.grad = None
        if upstream == 2.0 and loss is fused and wrapper in ONE_GRAPH:
            with pytest.raises(RuntimeError, match="first backward"):
                value.backward(torch.tensor(upstream))
            continue
        value.backward(torch.tensor(upstream), retain_graph=True)
        ours = {"loss": value, "dhidden": hidden.grad, "dweight": weight.grad}
        assert_equal(ours, eager_mean(hidden, weight, labels, objective, upstream=upstream))
