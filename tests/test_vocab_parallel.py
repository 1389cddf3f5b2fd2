"""The loss of a vocabulary that is cut over 3 ranks, which share one process group, against one process in fp64."""

import socket
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from conftest import HAS_GPU
from heads import IGNORE, OBJECTIVES, assert_as_good_as_eager, assert_equal, eager, gold, make_head
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kernels import row_kernels, vocab_parallel
from kernels.reference import linear_cross_entropy_sums
from kernels.vocab_shard import VocabShard, embedding
from logitless import losses
from logitless.model import GPT, GPTConfig

WORLD, N, V, D = 3, 7, 34, 5  # 12, 12 and 10 classes
UPSTREAM = 0.37
SUMS = {
    "eager": vocab_parallel.eager_sums,
    "inplace": vocab_parallel.inplace_sums,
    "chunk 1": partial(vocab_parallel.chunked_sums, chunk=1),
    "chunk 8": partial(vocab_parallel.chunked_sums, chunk=8),  # 2 rows of each rank, at the end 1
    "chunk 100": partial(vocab_parallel.chunked_sums, chunk=100),
}
CASES = [
    (sums, objective, engine)
    for sums in SUMS
    for objective in OBJECTIVES
    for engine in ("plain", "triton")
    if engine == "plain" or (sums in ("inplace", "chunk 8") and not HAS_GPU)
]

WANTED = [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]


def head_of(objective: str) -> tuple:
    """hidden, weight, bias, labels of all ranks; a token of each rank is ignored."""
    hidden, weight, bias, labels = make_head(WORLD * N, V, D, bias=objective != "plain", scale=6.0)
    labels[[0, N, 3 * N - 1]] = IGNORE
    return hidden, weight, bias, labels


def upstream(sums: str) -> torch.Tensor:
    """[W]: may differ between ranks where backward makes the gradients."""
    return UPSTREAM * torch.ones(WORLD) if "chunk" in sums else UPSTREAM * torch.arange(1, 1 + WORLD)


def shares_of(shard: VocabShard, objective: str) -> list:
    """A rank's own part of the head, as leaves, and of the labels."""
    hidden, weight, bias, labels = head_of(objective)
    parts = shard.own(hidden), weight[shard.classes], None if bias is None else bias[shard.classes]
    return [None if part is None else part.clone().requires_grad_() for part in parts], shard.own(labels)


def sums_of_a_rank(shard: VocabShard, sums: str, objective: str) -> dict:
    (hidden, weight, bias), labels = shares_of(shard, objective)
    arguments = (hidden, weight, labels, OBJECTIVES[objective], shard)
    found = SUMS[sums](*arguments, bias=bias)
    (found.loss * upstream(sums)[dist.get_rank()]).backward()
    with torch.no_grad():
        validated = SUMS[sums](*arguments, bias=bias)
    facts = {"loss": found.loss.detach(), "cross_entropy": found.cross_entropy, "correct": validated.correct}
    torch.testing.assert_close(validated[:2], (facts["loss"], facts["cross_entropy"]))
    leaves = {"dhidden": hidden, "dweight": weight, "dbias": bias}
    return facts | {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}


def error_of(function) -> str:
    try:
        function()
    except (RuntimeError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def errors_of_a_rank(shard: VocabShard, sums: str) -> dict:
    (hidden, weight, _), labels = shares_of(shard, "plain")

    def call(hidden=hidden, weight=weight, labels=labels):
        return SUMS[sums](hidden, weight, labels, OBJECTIVES["plain"], shard).loss

    loss = call()
    loss.backward(retain_graph=True)
    return {
        "second": error_of(loss.backward),
        "double": error_of(partial(call().backward, create_graph=True)),
        "label": error_of(partial(call, labels=torch.full_like(labels, V))),
        "weight": error_of(partial(call, weight=weight[1:])),
    }


def offset_losses(shard: VocabShard, sums: str, offset: float) -> torch.Tensor:
    """Of small integers, so that the logits are exact."""
    hidden, weight, _, labels = (t if t is None else t.round() for t in make_head(WORLD * N, V, D))
    bias = torch.full((len(weight),), offset)[shard.classes]
    tensors = shard.own(hidden), weight[shard.classes], shard.own(labels)
    return SUMS[sums](*tensors, OBJECTIVES["smoothing"], shard, bias=bias).loss


def gradients_asked_for(shard: VocabShard, sums: str, wanted: tuple[bool, ...]) -> list:
    leaves, labels = shares_of(shard, "all")
    for leaf, is_wanted in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(is_wanted)
    hidden, weight, bias = leaves
    (SUMS[sums](hidden, weight, labels, OBJECTIVES["all"], shard, bias=bias).loss * UPSTREAM).backward()
    return [leaf.grad for leaf in leaves]


def right_guesses(shard: VocabShard, sums: str) -> torch.Tensor:
    """Of 64 tokens whose labels are the likeliest class; small integers make some other classes as likely."""
    hidden, weight, _, _ = (t if t is None else t.round() for t in make_head(WORLD * 64, V, D, scale=1.5))
    labels = (hidden @ weight.T).argmax(dim=1)
    tensors = shard.own(hidden), weight[shard.classes], shard.own(labels)
    with torch.no_grad():
        return SUMS[sums](*tensors, OBJECTIVES["plain"], shard).correct


def embedded(shard: VocabShard) -> dict:
    hidden, weight, _, _ = head_of("plain")
    tokens = torch.arange(WORLD * N).view(WORLD * N, 1) * 5 % V
    leaf = weight[shard.classes].clone().requires_grad_()
    rows = embedding(shard.own(tokens), leaf, shard)
    (rows[:, 0] * shard.own(hidden)).sum().backward()
    return {"rows": rows.detach(), "dweight": leaf.grad}


class Shapes(TorchDispatchMode):
    """The shapes of all that operators return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        tensors = (leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor))
        self.seen |= {tuple(leaf.shape) for leaf in tensors if not isinstance(leaf, DTensor)}
        return result


def shapes_of_a_step(is_tied: bool) -> set[tuple[int, ...]]:
    """Of forward and backward, where an own micro-batch has N tokens."""
    shape = {"n_layers": 1, "n_heads": 2, "width": 8, "padded_vocab_size": V, "mlp": "gelu"}
    gpt = GPT(GPTConfig(**shape, tied=is_tied, head_bias=True, dropout=0.0))
    mesh = init_device_mesh("cpu", (WORLD,))
    of_vocabulary = gpt.cut_vocabulary(mesh)
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, ignored_params=of_vocabulary)
    tokens = torch.arange(N)[None]
    with Shapes() as shapes:
        gpt.head(gpt(tokens), tokens, partial(losses.fused, chunk=8)).loss.backward()
    assert gpt.head.weight.grad.to_local().shape == gpt.head.weight.to_local().shape
    return shapes.seen


def be_rank(rank: int, port: int, folder) -> None:
    torch.set_num_threads(1)
    options = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, **options)
    shard = VocabShard(dist.group.WORLD, V)
    found = {}
    for case in CASES:
        row_kernels.runs_triton = lambda tensor, engine=case[2]: engine == "triton"
        found[case] = sums_of_a_rank(shard, *case[:2])
    row_kernels.runs_triton = lambda tensor: False
    for sums in SUMS:
        with torch.autocast("cpu", torch.bfloat16):
            found[sums, "autocast"] = sums_of_a_rank(shard, sums, "all")
        found[sums, "errors"] = errors_of_a_rank(shard, sums)
        found[sums, "offset"] = [offset_losses(shard, sums, offset) for offset in (0.0, 2.0**20)]
        found[sums, "right"] = right_guesses(shard, sums)
    for wanted in WANTED:
        found["wanted", wanted] = gradients_asked_for(shard, "chunk 8", wanted)
    found["embedding"] = embedded(shard)
    found["shapes"] = {is_tied: shapes_of_a_step(is_tied) for is_tied in (True, False)}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(be_rank, (port, folder), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def joined(ranks: list[dict]) -> dict:
    """Numbers added, tensors of all ranks put together."""
    values = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return {name: sum(parts) if parts[0].dim() == 0 else torch.cat(parts) for name, parts in values.items()}


def of_one_process(run, sums: str, objective: str) -> dict:
    """Gradients by the convention: dhidden of the sum of the ranks' losses, dweight and dbias of their mean."""
    hidden, weight, bias, labels = head_of(objective)
    right = {}
    for rank, factor in enumerate(upstream(sums).tolist()):
        own = torch.full_like(labels, IGNORE)
        own[rank * N : (rank + 1) * N] = labels[rank * N : (rank + 1) * N]
        for name, value in run(hidden, weight, bias, own, OBJECTIVES[objective], factor).items():
            value = value / WORLD if name in ("dweight", "dbias") else value
            right[name] = right.get(name, 0.0) + value
    return right


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_sums_and_gradients_are_those_of_one_process(case, of_ranks):
    sums, objective, _ = case
    found = joined([rank[case] for rank in of_ranks])
    hidden, weight, bias, labels = head_of(objective)
    with torch.no_grad():
        right = linear_cross_entropy_sums(hidden, weight, labels, OBJECTIVES[objective], bias=bias)
    assert 0 < right.correct < N * WORLD - 3
    assert found.pop("correct") == right.correct
    torch.testing.assert_close(found.pop("cross_entropy"), right.cross_entropy)
    assert_equal(found, of_one_process(gold, sums, objective))


@pytest.mark.parametrize("sums", SUMS)
def test_autocast_is_as_good_as_eager(sums, of_ranks):
    found = joined([rank[sums, "autocast"] for rank in of_ranks])
    del found["correct"], found["cross_entropy"]
    with torch.autocast("cpu", torch.bfloat16):
        yardstick = of_one_process(eager, sums, "all")
    assert_as_good_as_eager(found, yardstick, of_one_process(gold, sums, "all"), 2**-9)


@pytest.mark.parametrize("sums", SUMS)
def test_a_common_offset_cancels(sums, of_ranks):
    for rank in of_ranks:
        without, with_offset = rank[sums, "offset"]
        torch.testing.assert_close(with_offset, without)


@pytest.mark.parametrize("sums", SUMS)
def test_labels_that_no_other_logit_exceeds_are_right(sums, of_ranks):
    assert [rank[sums, "right"].item() for rank in of_ranks] == [64.0] * WORLD


@pytest.mark.parametrize("sums", SUMS)
def test_what_is_wrong_is_an_error_on_every_rank(sums, of_ranks):
    for rank in of_ranks:
        errors = rank[sums, "errors"]
        assert errors["label"].startswith("IndexError: label 34 is out of range for a vocabulary of 34")
        assert errors["weight"].startswith("ValueError: expected hidden [N, D] and 1"), errors
        assert "no second derivative" in errors["double"]
        second = {"eager": "none", "inplace": "RuntimeError: one of the variables needed"}
        assert errors["second"].startswith(second.get(sums, "RuntimeError: linear_cross_entropy hands its gradients"))


@pytest.mark.parametrize("wanted", WANTED)
def test_gradients_come_exactly_where_they_are_asked_for(wanted, of_ranks):
    for rank in of_ranks:
        right = rank["wanted", (True, True, True)]
        for gradient, value, is_wanted in zip(rank["wanted", wanted], right, wanted, strict=True):
            assert gradient.equal(value) if is_wanted else gradient is None


def test_an_embedding_that_is_cut_is_an_embedding(of_ranks):
    hidden, weight, _, _ = head_of("plain")
    leaf = weight.clone().requires_grad_()
    rows = torch.nn.functional.embedding(torch.arange(WORLD * N).view(WORLD * N, 1) * 5 % V, leaf)
    (rows[:, 0] * hidden).sum().backward()
    found = joined([rank["embedding"] for rank in of_ranks])
    assert found["rows"].equal(rows)
    torch.testing.assert_close(found["dweight"], leaf.grad / WORLD)


@pytest.mark.parametrize("is_tied", [True, False])
def test_no_rank_holds_the_head_or_more_logits_than_a_chunk(is_tied, of_ranks):
    for rank, found in enumerate(of_ranks):
        shapes, n_own = found["shapes"][is_tied], (12, 12, 10)[rank]
        assert {(n_own, 8), (6, n_own), (3, n_own)} <= shapes
        of_all = {shape for shape in shapes if V in shape}
        assert not of_all if is_tied else of_all == {(V, 8)}  # an embedding of its own is FSDP's
        rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] in (n_own, 16)]
        assert max(rows) <= 8


def test_fewer_classes_than_all_ranks_could_share_are_refused():
    VocabShard(SimpleNamespace(size=lambda: 8), 64)
    with pytest.raises(ValueError, match="64 classes cannot be cut over 12 ranks: with 6 each the last has none"):
        VocabShard(SimpleNamespace(size=lambda: 12), 64)
