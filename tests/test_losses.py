"""Sums of the backends beside their loss: right guesses, counted where no gradient is made, and their memory."""

import hydra
import pytest
import torch
from heads import IGNORE, OBJECTIVES
from tiny import BACKENDS, compose
from torch import Tensor

from kernels.reference import Objective
from logitless import losses
from logitless.memory import peak_bytes

N, V, D = 37, 34, 5
MIB = 2**20


def backend_of(name: str, objective: Objective):
    options = {"label_smoothing": objective.label_smoothing, "z_loss": objective.z_loss}
    keys = [f"{key}={value}" for key, value in (options | {"softcap": objective.softcap or "null"}).items()]
    return hydra.utils.instantiate(compose(f"loss={name}", "chunk=7", *keys).loss)


def tied_head() -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """hidden, weight, bias, labels, and how many of these are right.

    All are small integers, which every dtype adds up exactly, and classes v and v + V/2 have equal logits.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randint(-2, 3, shape, generator=generator) for shape in ((N, D), (V // 2, D), (V // 2,))
    )
    weight, bias = torch.cat([weight, weight]), torch.cat([bias, bias])
    logits = hidden @ weight.T + bias
    labels = torch.randint(V, (N,), generator=generator)
    labels[:20] = logits[:20].argmax(1)
    labels[10:20] = (labels[10:20] + V // 2) % V  # the other of two that are equal
    labels[[5, 15, 25]] = IGNORE
    n_right = sum(logits[i, label] == logits[i].max() for i, label in enumerate(labels.tolist()) if label != IGNORE)
    return hidden.float(), weight.float(), bias.float(), labels, int(n_right)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_counts_the_labels_that_no_other_logit_exceeds(engine, name, objective):
    hidden, weight, bias, labels, n_right = tied_head()
    assert 18 <= n_right < 30
    with torch.no_grad():
        sums = backend_of(name, objective)(hidden, weight, labels, bias=bias)
    assert (sums.correct.dtype, sums.correct.shape, sums.correct.item()) == (torch.float32, (), n_right)


@pytest.mark.parametrize("name", BACKENDS)
def test_bf16_logits_count_the_same(name):
    hidden, weight, bias, labels, n_right = tied_head()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sums = backend_of(name, OBJECTIVES["all"])(hidden, weight, labels, bias=bias)
    assert sums.correct.item() == n_right


@pytest.mark.parametrize("name", BACKENDS)
def test_training_counts_nothing_and_gives_the_same_sums(name):
    hidden, weight, bias, labels, _ = tied_head()
    backend = backend_of(name, OBJECTIVES["all"])
    training = backend(hidden.requires_grad_(), weight.requires_grad_(), labels, bias=bias)
    with torch.no_grad():
        validation = backend(hidden, weight, labels, bias=bias)
    assert training.correct is None
    torch.testing.assert_close(validation[:2], (training.loss.detach(), training.cross_entropy))


def test_a_bad_label_of_the_compiled_eager_path_is_not_right():
    hidden = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    with torch.no_grad():
        compiled = torch.compile(losses.naive, backend="aot_eager", fullgraph=True)
        assert compiled(hidden, torch.eye(3), torch.tensor([3, 1])).correct.item() == 1


@pytest.mark.parametrize(("name", "tensors"), [("naive", 2), ("inplace", 1)])
def test_counting_needs_no_tensor_of_logits_more(name, tensors):
    """The eager path has logits and log-softmax alive at once, and so had before it counted."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2048, 4, generator=generator), torch.randn(2048, 4, generator=generator)
    labels = torch.randint(2048, (2048,), generator=generator)
    logits_mib = 2048 * 2048 * 4 / MIB

    def validate() -> None:
        with torch.no_grad():
            getattr(losses, name)(hidden, weight, labels)

    assert peak_bytes(torch.device("cpu"), [validate]) / MIB == pytest.approx(tensors * logits_mib, rel=0.1)
