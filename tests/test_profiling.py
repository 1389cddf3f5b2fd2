"""profile=true: the time of a step, by parts of the model that add up to it."""

from types import SimpleNamespace

import pytest
from tiny import tiny, train

from logitless import profiling
from logitless.model import GPT, GPTConfig
from logitless.profiling import ELEMENTWISE, part_of

SHAPE = {"n_layers": 2, "n_heads": 4, "width": 256, "tied": False, "head_bias": False, "dropout": 0.0}
GELU = GPTConfig(**SHAPE, padded_vocab_size=8192, mlp="gelu")
SWIGLU = GPTConfig(**SHAPE, padded_vocab_size=8192, mlp="swiglu")
TOKENS = 96


def products(rows: int, columns: int) -> list[list[list[int]]]:
    """Shapes of the three products of a matrix [rows, columns] in training: of its input, and of both gradients."""
    return [
        [[TOKENS, columns], [columns, rows]],
        [[TOKENS, rows], [rows, columns]],
        [[rows, TOKENS], [TOKENS, columns]],
    ]


PARTS = {"attention": "attention's projections", "mlp": "MLP", "head": "head, loss"}


@pytest.mark.parametrize("model", [GELU, SWIGLU], ids=["gelu", "swiglu"])
def test_a_product_belongs_to_the_part_that_has_its_matrix(model):
    matrices = {name: p for name, p in GPT(model).named_parameters() if p.dim() == 2 and name != "embedding.weight"}
    assert len(matrices) == 5 * model.n_layers + 1
    for name, matrix in matrices.items():
        for shapes in products(*matrix.shape):
            part = part_of(["nvjet_tst_128x256", "aten::mm", "## Call CompiledFxGraph ##"], shapes, model)
            assert part == next(PARTS[word] for word in name.split(".") if word in PARTS), name


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["triton_poi_fused_add_mul_pow_sigmoid_0", "## Call CompiledFxGraph ##"], "MLP"),
        (["vectorized_elementwise_kernel", "aten::gelu"], "MLP"),
        (["triton_red_fused_add_mul_rms_norm_3", "## Call CompiledFxGraph ##"], ELEMENTWISE),
        (["cudnn_generated_fort_native_sdpa_sm90", "aten::_cudnn_attention_forward"], "attention"),
        (["flash_bwd_kernel", "aten::_scaled_dot_product_flash_attention_backward"], "attention"),
        (["nvjet_tst", "aten::mm", "logitless::linear_cross_entropy"], "head, loss"),
        (["softmax_warp_forward", "aten::_log_softmax"], "head, loss"),
        (["multi_tensor_apply_kernel", "aten::_fused_adamw_", "Optimizer.step#AdamW.step"], "optimizer, clipping"),
        (["Memcpy DtoD", "aten::copy_", "Optimizer.step#AdamW.step"], ELEMENTWISE),
        (["ncclDevKernel_ReduceScatter_Sum_bf16", "c10d::_reduce_scatter_base_"], "communication"),
        (["embedding_backward_kernel", "aten::embedding_dense_backward"], "embedding"),
    ],
)
def test_another_kernel_belongs_to_the_part_that_its_names_tell(names, part):
    assert part_of(names, None, GELU) == part


def test_a_kernel_that_the_profiler_lists_under_other_events_counts_once():
    """Those of a driver's call with an operator's number, and of what held up the operator."""
    kernel = SimpleNamespace(name="vectorized_elementwise_kernel", duration=5.0)
    listed = [("cudaStreamIsCapturing", 1), ("cuLaunchKernelEx", 2), ("aten::gelu", 1), ("Command Buffer Full", 1)]
    shared = {"cpu_parent": None, "input_shapes": []}
    events = [SimpleNamespace(name=kernel.name, id=2, kernels=[], **shared)]  # of the device, with its own number
    for name, number in [*listed, ("my::gelu", 2)]:
        events.append(SimpleNamespace(name=name, id=number, kernels=[kernel], **shared))
    assert profiling.microseconds(events, GELU) == {"MLP": 10.0}


@pytest.mark.parametrize("backend", ["naive", "fused"])
def test_the_parts_of_a_step_add_up_to_it(backend, tmp_path, monkeypatch):
    """The steps right before the first validation, whose time is not in it. Without `idle` to the operators' time."""
    seconds, operators = [], []
    now, microseconds = profiling.StepProfile._now, profiling.microseconds
    monkeypatch.setattr(profiling.StepProfile, "_now", lambda _, module: seconds.append(now(module)) or seconds[-1])
    monkeypatch.setattr(profiling, "microseconds", lambda *given: operators.extend(given[0]) or microseconds(*given))
    options = (f"loss={backend}", "profile=true", "max_steps=9", "val_every=7", "chunk=8", "accumulate=2")
    spent = train(tiny(tmp_path, *options), tmp_path / "run")["step_ms"]
    assert sum(spent.values()) == pytest.approx(1e3 * (seconds[1] - seconds[0]) / profiling.N_STEPS)
    own = sum(operator.self_cpu_time_total for operator in operators)
    assert sum(spent.values()) - spent["idle"] == pytest.approx(own / 1e3 / profiling.N_STEPS)
    assert spent.keys() == {*profiling.BY_NAME, "attention's projections", ELEMENTWISE, "idle"} - {"communication"}
    assert all(value > 0 for value in spent.values())


@pytest.mark.parametrize(
    ("first_step", "max_steps", "profiled"),
    [(0, 9, range(4, 9)), (0, 3, range(1, 3)), (0, 1, range(1)), (7, 20, range(8, 13)), (7, 10, range(8, 10))],
)
def test_the_first_step_of_a_run_is_not_profiled_unless_there_is_no_other(first_step, max_steps, profiled):
    """By how many steps are done before it."""
    profile = profiling.StepProfile(GELU, last_step=max_steps)
    profile.on_train_start(SimpleNamespace(global_step=first_step, max_steps=max_steps), None)
    assert [n_done for n_done in range(first_step, max_steps) if profile.covers(n_done)] == list(profiled)


def test_a_token_takes_6_operations_an_entry_of_a_matrix_and_half_of_the_attention():
    gpt = GPT(GELU)
    entries = 2 * (4 + 8) * 256**2 + 8192 * 256
    assert gpt.flops_per_token(128) == 6 * entries + 2 * 3 * (2 * 2 * 128 * 256) / 2
