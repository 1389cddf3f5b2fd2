"""compile=true: the same training, by parts of which all blocks share a graph, whatever ran before in the process."""

import functools

import pytest
import torch
from tiny import BACKENDS, read_curve, read_record, tiny, train
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from logitless.model import GPT, GPTConfig
from logitless.model import _rotary_table as rotary_table

OPTIONS = ("model.n_layers=4", "compile=true")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def eager_graphs(monkeypatch):
    """Traces as ever, but runs the graphs as they are: generating code takes seconds a graph."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_run_is_the_eager_one(checkpoint, inductor, tmp_path):
    """A validation of one sequence among those of two, and generation, compile no graph of their own."""
    torch.compiler.reset()
    runs = {}
    for flag in ("true", "false"):
        before = graphs()
        options = (*OPTIONS, f"compile={flag}", f"model.checkpoint={checkpoint}", "max_steps=3", "chunk=5")
        record = train(tiny(tmp_path, *options), tmp_path / flag)
        assert record["status"] == "ok"
        assert (graphs() > before) == (flag == "true")
        runs[flag] = record
    for curve in ("train/loss", "grad_norm", "val/loss"):
        assert read_curve(tmp_path / "true", curve) == pytest.approx(read_curve(tmp_path / "false", curve), rel=1e-5)
    assert "peak_live_tensor_gib" in runs["false"]
    assert not [name for name in runs["true"] if "peak" in name], "of code that no meter sees into"


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_share_a_graph_for_training_and_one_for_validation(backend, eager_graphs, tmp_path):
    torch.compiler.reset()
    before = graphs()
    options = (f"loss={backend}", "model.dropout=0.1", "max_steps=3", "val_every=2")  # validates after training too
    train(tiny(tmp_path, *OPTIONS, *options), tmp_path / "run")
    assert graphs() == before + 4
    assert read_record(tmp_path / "run")["sample"]


def test_the_tenth_length_in_a_process_is_compiled_like_the_first(eager_graphs, tmp_path):
    """More graphs than the limit of recompilations (8), which ends in an error here, and in eager code elsewhere."""
    n_graphs = []
    for length in range(8, 28, 2):
        before = graphs()
        train(tiny(tmp_path, *OPTIONS, f"seq_len={length}", "max_steps=1"), tmp_path / str(length))
        n_graphs.append(graphs() - before)
    assert n_graphs == [4] * 10


def test_ddp_cuts_no_graph(monkeypatch):
    """As it would where a block has more than a MiB of parameters."""
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    gpt = GPT(GPTConfig(2, 2, 256, 64, "gelu", tied=True, head_bias=False, dropout=0.0))
    gpt.compile_parts(torch.device("cpu"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        DistributedDataParallel(gpt)(torch.zeros(1, 4, dtype=torch.int64))
    finally:
        torch.distributed.destroy_process_group()
    assert len(compiled) == 2, "block and norm"


@pytest.mark.parametrize(("mlp", "widths"), [("gelu", 12), ("swiglu", 8 + 16 / 3)])
def test_a_compiled_block_keeps_its_input_and_what_its_matrices_give(mlp, widths, inductor):
    """Of what is activated, nothing; of queries, keys and values, no more than attention needs."""
    torch.compiler.reset()
    n_layers, width, shape = 2, 192, (8, 64)
    gpt = GPT(GPTConfig(n_layers, 3, width, 64, mlp, tied=True, head_bias=False, dropout=0.0))
    gpt.compile_parts(torch.device("cpu"))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(*shape, width, requires_grad=True)
    rotary = rotary_table(0, shape[1], width // 3, x.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer, block in enumerate(gpt.blocks):
            x = block(x, rotary, None, layer)
    assert sum(kept.values()) / (n_layers * x.nbytes) == pytest.approx(widths, abs=0.1)
