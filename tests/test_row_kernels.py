"""What the row kernels can do beyond cross_entropy: entropies of rows, and gradients of slabs of the vocabulary."""

import math
from itertools import pairwise

import pytest
import torch
from conftest import HAS_GPU
from heads import IGNORE, OBJECTIVES, eager_rows, random_logits, relative_error
from torch import Tensor

from kernels import row_kernels
from kernels.reference import Objective, Rows

N = 11
CUTS = {
    "97 at 40 and 41": (0, 40, 41, 97),
    "97 at 1": (0, 1, 97),
    "97 whole": (0, 97),
    "2500 in more than one tile": (0, 7, 1031, 2499, 2500),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
cuts = pytest.mark.parametrize("edges", CUTS.values(), ids=CUTS)
bad_labels = pytest.mark.parametrize("bad", [-1, -2, 97, 2**31, 2**32 + 40, -(2**32) + 40])


def confident(logits: Tensor, labels: Tensor) -> Tensor:
    logits[torch.arange(N), labels] += torch.linspace(0, 60, N)
    return logits


def beginning_with_minus_infinity(logits: Tensor, labels: Tensor) -> Tensor:
    logits[:, : logits.shape[1] * 9 // 10] = -float("inf")
    return logits


def with_holes(logits: Tensor, labels: Tensor) -> Tensor:
    logits[:, ::3] = -float("inf")
    return logits


CORNERS = {
    "flat": lambda logits, labels: logits,
    "rising, every tile with new maxima": lambda logits, labels: logits.sort(1).values,
    "falling": lambda logits, labels: logits.sort(1, descending=True).values,
    "confident": confident,
    "beginning with minus infinity": beginning_with_minus_infinity,
    "minus infinity in every group": with_holes,
    "common offset": lambda logits, labels: logits + torch.linspace(-3000, 3000, N)[:, None],
}
GRADIENT_CORNERS = ["flat", "confident", "beginning with minus infinity", "common offset"]


def entropies_of(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    entropies = torch.full(labels.shape, 7.0)
    row_kernels.forward_rows(logits, labels, objective, Rows.empty(len(labels), logits.device), entropies)
    return entropies


def gold_entropies(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    z = logits.double()
    if objective.softcap is not None:
        z = objective.softcap * torch.tanh(z / objective.softcap)
    return torch.special.entr(z.softmax(1)).sum(1).masked_fill(labels == objective.ignore_index, 0.0)


# Entropies


@every_objective
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("vocab", [3, 97, 2500])
def test_entropies_equal_fp64(engine, vocab, corner, objective):
    logits, labels = random_logits(N, vocab)
    logits = CORNERS[corner](logits, labels)
    labels[[2, 7]] = IGNORE
    right = gold_entropies(logits, labels, objective)
    torch.testing.assert_close(entropies_of(logits, labels, objective).double(), right, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("vocab", [1, 15, 16, 97, 2500])
def test_a_uniform_row_has_entropy_ln_v_and_a_one_hot_row_none(engine, vocab):
    logits = torch.full((2, vocab), -7.5)
    logits[1, : vocab - 1] = -float("inf")
    uniform, one_hot = entropies_of(logits, torch.full((2,), vocab - 1), Objective()).tolist()
    assert uniform == pytest.approx(math.log(vocab), rel=1e-6)
    assert one_hot == 0


@pytest.mark.parametrize("offset", [1024.0, -1024.0])
def test_a_constant_added_to_all_logits_changes_no_bit_of_the_entropies(engine, offset):
    logits, labels = random_logits(N, 2500)
    logits = (logits * 256).round() / 256  # exact with the offset, too
    moved = logits + offset
    assert torch.equal(moved - offset, logits)
    assert torch.equal(*(entropies_of(tensor, labels, Objective()) for tensor in (logits, moved)))


@every_objective
def test_asking_for_entropies_changes_no_bit_of_anything_else(engine, objective):
    logits, labels = random_logits(N, 2500)
    labels[2] = IGNORE
    before, with_entropies, without = logits.clone(), *(Rows.empty(N, logits.device) for _ in range(2))
    row_kernels.forward_rows(logits, labels, objective, with_entropies, torch.empty(N))
    row_kernels.forward_rows(logits, labels, objective, without)
    assert all(map(torch.equal, with_entropies, without))
    assert torch.equal(logits, before)


def test_an_ignored_row_of_nan_has_entropy_zero(engine):
    logits, labels = random_logits(3, 97)
    logits[1, ::2], labels[1] = float("nan"), IGNORE
    entropies = entropies_of(logits, labels, Objective())
    assert entropies[1] == 0
    assert (entropies[[0, 2]] > 0).all()


@pytest.mark.skipif(HAS_GPU, reason="the interpreter reads memory of a CPU")
@bad_labels
def test_a_bad_label_makes_the_entropy_nan(bad, monkeypatch):
    """In the kernel: its twin raises before that, see test_guards.py."""
    monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor: True)
    logits, labels = random_logits(3, 97)
    labels[1] = bad
    assert entropies_of(logits, labels, Objective()).isnan().tolist() == [False, True, False]


# Slabs


def labels_around(edges: tuple[int, ...]) -> Tensor:
    """Labels [N]: before, at and behind the edges of the slabs, two further ones, and an ignored one."""
    vocab, inner = edges[-1], edges[1]
    near = [0, vocab - 1, *(min(max(inner + i, 0), vocab - 1) for i in range(-3, 3)), vocab // 2, vocab // 3]
    return torch.tensor([*near, IGNORE])


def backward(logits: Tensor, labels: Tensor, objective: Objective, statistics: dict, dlogits: Tensor, **slab) -> Tensor:
    row_kernels.backward_rows(logits, labels, objective, **statistics, dlogits=dlogits, **slab)
    return dlogits


def statistics_of(logits: Tensor, labels: Tensor, objective: Objective) -> dict[str, Tensor]:
    """What a backward is given besides logits and labels, for an upstream gradient of both signs."""
    rows = Rows.empty(len(labels), logits.device)
    row_kernels.forward_rows(logits, torch.zeros_like(labels), objective, rows)  # no label has a part in statistics
    return {"row_max": rows.row_max, "log_sum": rows.log_sum, "dlosses": torch.linspace(-1.03, 2, len(labels))}


def slabs_of(logits: Tensor, labels: Tensor, objective: Objective, statistics: dict, edges: tuple[int, ...]):
    """Yields the gradient over each slab, written over a copy of its logits."""
    for first, end in pairwise(edges):
        slab = logits[:, first:end].clone()
        yield backward(slab, labels, objective, statistics, slab, first_class=first, vocab=edges[-1])


@every_objective
@pytest.mark.parametrize("corner", GRADIENT_CORNERS)
@cuts
def test_slabs_concatenate_to_the_whole_gradient(engine, edges, corner, objective):
    logits, labels = random_logits(N, edges[-1])[0], labels_around(edges)
    logits = CORNERS[corner](logits, labels.clamp(min=0))
    statistics = statistics_of(logits, labels, objective)
    whole = backward(logits, labels, objective, statistics, torch.empty_like(logits))
    slabs = torch.cat(list(slabs_of(logits, labels, objective, statistics, edges)), 1)
    if engine == "triton":  # PyTorch's tanh rounds differently at the end of a row
        assert torch.equal(slabs, whole)

    exact = logits.double().requires_grad_()
    losses = eager_rows(exact, labels, objective)
    (right,) = torch.autograd.grad(losses, exact, statistics["dlosses"].double())
    assert relative_error(slabs, right) < 1e-6
    assert (slabs[-1] == 0).all()


@every_objective
def test_a_slab_within_larger_buffers_touches_nothing_else(engine, objective):
    edges = (0, 40, 77, 97)
    logits, labels = random_logits(N, 97)[0], labels_around(edges)
    before, statistics = logits.clone(), statistics_of(logits, labels, objective)
    slabs = list(slabs_of(logits, labels, objective, statistics, edges))
    dlogits = torch.full((N, 97), 12352.0)
    backward(logits[:, 40:77], labels, objective, statistics, dlogits[:, 40:77], first_class=40, vocab=97)
    torch.testing.assert_close(dlogits[:, 40:77], slabs[1])
    assert (dlogits[:, :40] == 12352).all()
    assert (dlogits[:, 77:] == 12352).all()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("label", [0, 38, 39, 41, 47, 96])
def test_a_row_whose_label_is_in_another_slab_counts_and_has_no_label_here(engine, label):
    """39 and 38 lie at columns -1 and -2 of a slab that begins at 40, and 41 behind one of a single column."""
    logits, labels = random_logits(4, 97)[0], torch.full((4,), label)
    statistics = statistics_of(logits, labels, Objective())
    slab = logits[:, 40:41].clone()
    backward(slab, labels, Objective(), statistics, slab, first_class=40, vocab=97)
    right = logits.double().softmax(1)[:, 40:41] * statistics["dlosses"][:, None]
    assert relative_error(slab, right) < 1e-6


@bad_labels
@every_objective
def test_a_bad_label_gives_gradient_zero_in_every_slab(engine, objective, bad):
    edges = (0, 40, 41, 97)
    logits, labels = random_logits(N, 97)[0], labels_around(edges)
    labels[4] = bad
    statistics = statistics_of(logits, labels, objective)
    for slab in slabs_of(logits, labels, objective, statistics, edges):
        assert ((slab == 0).all(1) == torch.tensor([i in (4, N - 1) for i in range(N)])).all()


def test_ignore_index_is_a_label_of_the_whole_vocabulary(engine):
    """Label 80 is column 40 of a slab that begins at 40, and label 40 its column 0."""
    logits, labels = random_logits(3, 97)[0], torch.tensor([40, 80, 0])
    objective = Objective(ignore_index=40)
    statistics = statistics_of(logits, labels, objective)
    slabs = list(slabs_of(logits, labels, objective, statistics, (0, 40, 97)))
    assert [(slab == 0).all(1).tolist() for slab in slabs] == [[True, False, False]] * 2
    whole = backward(logits, labels, objective, statistics, torch.empty_like(logits))
    torch.testing.assert_close(torch.cat(slabs, 1), whole)


@pytest.mark.parametrize(
    "slab", [{"first_class": 1}, {"first_class": 91, "vocab": 97}, {"first_class": -1}, {"vocab": 6}]
)
def test_a_slab_that_leaves_the_vocabulary_is_refused(engine, slab):
    logits, labels = random_logits(3, 7)
    statistics = statistics_of(logits, labels, Objective())
    with pytest.raises(AssertionError, match="7"):
        backward(logits, labels, Objective(), statistics, logits, **slab)
