"""The meter of live tensors counts bytes exactly, and sees what each backend keeps alive."""

import gc
from functools import partial

import pytest
import torch
from tiny import BACKENDS
from torch import nn

from logitless import losses
from logitless.memory import GIB, CudaMeter, LiveTensorMeter, meter


@pytest.fixture
def empty_meter():
    with LiveTensorMeter(nn.Module()) as counted:
        yield counted


def test_a_tensor_counts_while_it_lives_and_in_the_peak_after(empty_meter):
    kept = torch.empty(1000)
    freed = torch.empty(500, dtype=torch.float64)
    assert empty_meter.bytes == empty_meter.peak == 8000
    del freed
    assert (empty_meter.bytes, empty_meter.peak) == (4000, 8000)
    empty_meter.reset()
    assert empty_meter.peaks() == {"peak_live_tensor_gib": 4000 / GIB}
    del kept
    assert (empty_meter.bytes, empty_meter.peak) == (0, 4000)


def test_a_view_counts_once_and_keeps_its_storage_alive(empty_meter):
    base = torch.empty(1000)
    views = [base.view(10, 100), base[:5], base.t(), base.detach()]
    assert empty_meter.bytes == 4000
    del base
    assert empty_meter.bytes == 4000
    views.clear()
    assert empty_meter.bytes == 0


def test_writing_in_place_or_into_a_buffer_counts_nothing(empty_meter):
    a, b = torch.ones(10, 10), torch.ones(10, 10)
    before = empty_meter.bytes
    empty_meter.reset()
    a.add_(b).relu_()
    a.zero_()
    torch.mm(b, b, out=a)
    assert (empty_meter.bytes, empty_meter.peak) == (before, before)


def test_what_a_custom_operator_frees_inside_itself_is_seen(empty_meter):
    @torch.library.custom_op("logitless_test::two_copies", mutates_args=())
    def two_copies(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        return y + 1

    x = torch.empty(1000)
    y = two_copies(x)
    assert (empty_meter.bytes, empty_meter.peak) == (8000, 12000)
    assert len(y) == 1000


def test_a_new_tensor_at_a_freed_address_counts_again(empty_meter):
    for _ in range(50):
        made = torch.empty(1000)
        assert empty_meter.bytes == 4000
        del made
    assert empty_meter.bytes == 0


def test_parameters_and_buffers_count_from_the_start_and_tied_ones_once():
    module = nn.ModuleDict({"a": nn.Linear(8, 16, bias=False), "b": nn.Linear(8, 16, bias=False)})
    module["b"].weight = module["a"].weight
    module.register_buffer("c", torch.zeros(3))
    assert LiveTensorMeter(module).bytes == 8 * 16 * 4 + 12


def test_the_peak_of_a_training_step_is_that_of_its_formula(empty_meter):
    """y = tanh(x), z = tanh(y): four tensors live at most, x, y, z and dy, then x, y, dy and dx."""
    n_bytes = 4 * 10_000
    x = torch.randn(10_000, requires_grad=True)
    empty_meter.reset()
    torch.tanh(torch.tanh(x)).sum().backward()
    assert empty_meter.peak == pytest.approx(4 * n_bytes, abs=16)
    gc.collect()
    assert empty_meter.bytes == pytest.approx(2 * n_bytes, abs=16)


def test_nothing_is_counted_outside_the_meter():
    counted = LiveTensorMeter(nn.Module())
    with counted:
        inside = torch.empty(10)
    outside = torch.empty(1000)
    assert counted.bytes == inside.nbytes
    assert outside.nbytes == 4000


def test_a_cpu_is_measured_by_live_tensors_and_a_gpu_by_its_allocator():
    assert isinstance(meter(nn.Module(), torch.device("cpu")), LiveTensorMeter)
    assert isinstance(meter(nn.Module(), torch.device("cuda", 0)), CudaMeter)


N, V, D, CHUNK = 1024, 1024, 4, 64
LOGITS = N * V * 4
BLOCK = 64 * V * 4  # the CPU path takes a softmax in blocks of 64 rows


def peak_above_inputs(backend: str) -> int:
    """Bytes of a forward and backward pass through a head alone, gradients included."""
    loss = getattr(losses, backend)
    if backend == "fused":
        loss = partial(loss, chunk=CHUNK)
    generator = torch.Generator().manual_seed(0)
    with LiveTensorMeter(nn.Module()) as counted:
        hidden = torch.randn(N, D, generator=generator).requires_grad_()
        weight = torch.randn(V, D, generator=generator).requires_grad_()
        labels = torch.randint(V, (N,), generator=generator)
        before = counted.bytes
        counted.reset()
        loss(hidden, weight, labels).loss.backward()
        return counted.peak - before


def test_naive_holds_three_tensors_of_logits():
    assert peak_above_inputs("naive") == pytest.approx(3 * LOGITS, rel=0.05)


def test_inplace_holds_one_tensor_of_logits_and_a_few_blocks():
    assert LOGITS < peak_above_inputs("inplace") < LOGITS + 4 * BLOCK


def test_fused_holds_one_chunk_of_logits_and_a_few_blocks():
    gradients = 4 * (N + V) * D
    assert CHUNK * V * 4 + gradients < peak_above_inputs("fused") < CHUNK * V * 4 + 4 * BLOCK + 4 * gradients


def test_backends_rank_by_memory():
    fused, inplace, naive = (peak_above_inputs(name) for name in ("fused", "inplace", "naive"))
    assert 2 * fused < inplace
    assert 2 * inplace < naive
    assert set(BACKENDS) >= {"fused", "inplace", "naive"}


def test_a_storage_that_grows_is_counted_again():
    meter = LiveTensorMeter(nn.Linear(1, 1, bias=False))
    with meter:
        before = meter.bytes
        grown = torch.empty(0)
        torch.ones(100, out=grown)
        assert meter.bytes - before == 400
        del grown
        assert meter.bytes == before


def test_a_sparse_gradient_counts_nothing_and_operators_that_are_not_custom_run_as_they_are(empty_meter):
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    library = torch.library.Library("logitless_test", "FRAGMENT")
    library.define("only_sparse(Tensor x) -> Tensor")
    library.impl("only_sparse", lambda x: torch.ones(1000), "SparseCPU")
    before = empty_meter.bytes
    ones = torch.ops.logitless_test.only_sparse(table.weight.grad)
    assert empty_meter.bytes - before == ones.nbytes == 4000
