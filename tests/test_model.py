import math
from functools import partial
from itertools import product

import pytest
import torch
from tiny import ROOT, compose

from logitless import losses
from logitless.model import GPT, GPTConfig, KeyValueCache, _gelu, _rotary_table, _rotate

MODELS = sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml"))
LOSSES = {"naive": losses.naive, "inplace": losses.inplace, "fused": partial(losses.fused, chunk=4)}
B, T, D, V = 2, 7, 24, 128


def make_gpt(seed: int = 0, **options) -> GPT:
    """A small GPT whose weights are large enough for every part to matter."""
    defaults = {"n_layers": 2, "n_heads": 3, "width": D, "padded_vocab_size": V, "mlp": "swiglu"}
    defaults |= {"tied": False, "head_bias": False, "dropout": 0.0}
    gpt = GPT(GPTConfig(**defaults | options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.normal_(1.0 if parameter.shape == (D,) else 0.0, 0.3, generator=generator)
    return gpt.eval()


def make_tokens(seed: int = 1, batch: int = B, length: int = T) -> torch.Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("mlp", "tied", "bias"), list(product(["swiglu", "gelu"], [True, False], [True, False])))
def test_hidden_and_logits_have_their_shapes_and_every_parameter_a_gradient(mlp, tied, bias):
    gpt = make_gpt(mlp=mlp, tied=tied, head_bias=bias)
    tokens = make_tokens()
    hidden = gpt(tokens)
    assert hidden.shape == (B, T, D)
    assert gpt.head.logits(hidden).shape == (B, T, V)
    sums = gpt.head(hidden, tokens, losses.naive)
    assert sums.loss.shape == sums.cross_entropy.shape == ()
    sums.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in gpt.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_the_head_gives_one_loss_and_one_set_of_logits(bias):
    gpt, labels = make_gpt(head_bias=bias), make_tokens(3)
    hidden = gpt(make_tokens())
    logits = gpt.head.logits(hidden).flatten(0, 1)
    right = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum").item()
    for loss in LOSSES.values():
        assert gpt.head(hidden, labels, loss).loss.item() == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("changed", range(T))
def test_a_token_changes_no_hidden_before_it_and_all_from_it_on(mlp, changed):
    gpt, tokens = make_gpt(mlp=mlp), make_tokens()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % V
    with torch.no_grad():
        change = (gpt(tokens) - gpt(other)).abs().amax(dim=-1)
    assert change[:, :changed].eq(0).all()
    assert change[:, changed:].gt(1e-4).all()


def test_the_sequences_of_a_batch_do_not_see_each_other():
    gpt, tokens = make_gpt(), make_tokens()
    with torch.no_grad():
        together, alone = gpt(tokens), torch.cat([gpt(tokens[:1]), gpt(tokens[1:])])
    torch.testing.assert_close(together, alone)


def test_the_order_of_earlier_tokens_matters():
    gpt, tokens = make_gpt(n_layers=1), make_tokens()
    swapped = tokens[:, [1, 0, *range(2, T)]]
    with torch.no_grad():
        assert (gpt(tokens) - gpt(swapped))[:, -1].abs().max() > 1e-4


def test_a_tied_weight_is_one_parameter_and_counted_once():
    tied, untied = make_gpt(tied=True), make_gpt(tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert untied.n_parameters() - tied.n_parameters() == V * D
    assert tied.n_parameters() == sum(t.numel() for name, t in tied.state_dict().items() if name != "head.weight")


def test_a_tied_weight_collects_the_gradients_of_both_its_uses():
    gradients = {}
    for tied in (True, False):
        gpt = make_gpt(tied=tied)
        with torch.no_grad():
            gpt.head.weight.copy_(gpt.embedding.weight)
            for parameter, twin in zip(gpt.blocks.parameters(), make_gpt(seed=7).blocks.parameters(), strict=True):
                parameter.copy_(twin)
            gpt.norm.weight.fill_(1.0)
        gpt.head(gpt(make_tokens()), make_tokens(3), losses.naive).loss.backward()
        gradients[tied] = gpt.embedding.weight.grad + (0 if tied else gpt.head.weight.grad)
    torch.testing.assert_close(gradients[True], gradients[False])


@pytest.mark.parametrize(("tied", "bias"), list(product([True, False], [True, False])))
def test_head_share_is_the_part_of_the_parameters_in_the_head(tied, bias):
    gpt = make_gpt(tied=tied, head_bias=bias)
    rest = sum(parameter.numel() for parameter in [*gpt.blocks.parameters(), *gpt.norm.parameters()])
    head = V * D + bias * V
    assert gpt.head_share() == pytest.approx(head / (rest + head + (0 if tied else V * D)))


def test_swiglu_and_gelu_cost_about_the_same():
    sizes = [sum(p.numel() for p in make_gpt(mlp=mlp, width=192).blocks.parameters()) for mlp in ("swiglu", "gelu")]
    assert sizes[0] == sizes[1]


def test_rotary_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, T, 2, 8, generator=generator)

    def scores(start: int) -> torch.Tensor:
        rotary = _rotary_table(start, start + T, 8, torch.device("cpu"))
        return products(_rotate(query, *rotary), _rotate(key, *rotary))

    def products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqhd, bkhd -> bhqk", query, key)

    torch.testing.assert_close(scores(0), scores(100), atol=1e-4, rtol=1e-4)
    assert (scores(0) - products(query, key)).abs().max() > 0.1  # the rotation does something


def test_rotation_keeps_dtype_and_length():
    x = torch.randn(1, T, 2, 8, generator=torch.Generator().manual_seed(0))
    rotated = _rotate(x.bfloat16(), *_rotary_table(3, 3 + T, 8, x.device))
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float().norm(dim=-1), x.norm(dim=-1), atol=0.05, rtol=0.02)


def test_a_cache_gives_the_hidden_of_a_full_pass():
    gpt, tokens = make_gpt(), make_tokens()
    cache = KeyValueCache(gpt.config, B, T, tokens.device, torch.float32)
    with torch.no_grad():
        parts = [gpt(tokens[:, :3], cache), *(gpt(tokens[:, t : t + 1], cache) for t in range(3, T))]
        torch.testing.assert_close(torch.cat(parts, dim=1), gpt(tokens), atol=1e-5, rtol=1e-4)
    assert cache.length == T


def test_a_started_cache_refuses_more_than_one_token():
    gpt, tokens = make_gpt(), make_tokens()
    cache = KeyValueCache(gpt.config, B, T, tokens.device, torch.float32)
    with torch.no_grad():
        gpt(tokens[:, :3], cache)
    with pytest.raises(ValueError, match="a cache of 3 positions is continued by one token at a time, got 2"):
        gpt(tokens[:, 3:5], cache)


def test_dropout_acts_in_training_alone():
    gpt, tokens = make_gpt(dropout=0.5), make_tokens()
    assert torch.equal(gpt(tokens), gpt(tokens))
    gpt.train()
    assert not torch.equal(gpt(tokens), gpt(tokens))


def count_calls(gpt: GPT) -> list[int]:
    """The number of each block's calls, from now on."""
    calls = [0] * len(gpt.blocks)

    def count(block, inputs, layer: int) -> None:
        calls[layer] += 1

    for layer, block in enumerate(gpt.blocks):
        block.register_forward_pre_hook(partial(count, layer=layer))
    return calls


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", LOSSES)
def test_recomputing_the_blocks_changes_no_bit_of_loss_gradients_and_later_draws(backend, autocast):
    results = {}
    for checkpoint in (False, True):
        gpt = make_gpt(dropout=0.3, checkpoint=checkpoint).train()
        calls = count_calls(gpt)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, autocast):
            loss = gpt.head(gpt(make_tokens()), make_tokens(3), LOSSES[backend]).loss
        loss.backward()
        assert calls == [1 + checkpoint] * 2
        results[checkpoint] = [loss, *(parameter.grad for parameter in gpt.parameters()), torch.rand(3)]
    for kept, recomputed in zip(results[False], results[True], strict=True):
        assert torch.equal(kept, recomputed)


def test_without_gradients_nothing_is_prepared_for_recomputing(monkeypatch):
    monkeypatch.setattr("logitless.model.checkpoint", None)
    gpt, tokens = make_gpt(checkpoint=True), make_tokens()
    cache = KeyValueCache(gpt.config, B, T, tokens.device, torch.float32)
    with torch.no_grad():
        assert torch.equal(gpt(tokens, cache), make_gpt()(tokens))
    with pytest.raises(TypeError, match="not callable"):
        gpt(tokens)


def test_a_fresh_model_predicts_every_token_alike():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(4, 4, 128, 8192, "swiglu", True, False, 0.0))
    tokens = torch.randint(8192, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = gpt.head(gpt(tokens[:, :-1]), tokens[:, 1:], losses.naive).loss / tokens[:, 1:].numel()
    assert abs(float(loss) - math.log(8192)) < 0.2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 25}, r"model\.width=25 must be an even multiple of model\.n_heads=3"),
        ({"width": 27}, r"model\.width=27 must be an even multiple"),  # heads of 9: no two halves to rotate
        ({"mlp": "relu"}, r"model\.mlp=relu must be swiglu or gelu"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_gpt(**wrong)


@pytest.mark.parametrize(("name", "smallest", "largest"), [("small", 122e6, 126e6), ("medium", 345e6, 360e6)])
def test_the_named_sizes_are_those_of_gpt2(name, smallest, largest):
    config = GPTConfig(**compose(f"model={name}").model)
    with torch.device("meta"):
        assert smallest < GPT(config).n_parameters() < largest


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_every_model_has_four_chunks_or_more(name):
    config = compose(f"model={name}")
    assert config.batch_size * config.seq_len >= 4 * config.chunk


@pytest.mark.parametrize("backend", LOSSES)
def test_under_autocast_the_stream_takes_half_the_bytes_and_gradients_come_back_in_fp32(backend):
    """Against fp32: eps of bf16 is 2**-8, and a gradient is a sum of many rounded numbers."""
    gpt, tokens, labels = make_gpt(), make_tokens(), make_tokens(3)
    seen = []
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    gradients, sums = {}, {}
    for autocast in (False, True):
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16, autocast):
            hidden = gpt(tokens)
            sums[autocast] = gpt.head(hidden, labels, LOSSES[backend]).loss
        dtype = torch.bfloat16 if autocast else torch.float32
        assert [*seen, hidden.dtype] == [dtype] * 5
        gradients[autocast] = torch.autograd.grad(sums[autocast], list(gpt.parameters()))
    assert sums[True].item() == pytest.approx(sums[False].item(), rel=0.02)
    for exact, rounded in zip(gradients[False], gradients[True], strict=True):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 16 * 2**-8 * exact.norm()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_gelu_is_that_of_gpt2(is_compiled):
    """With its gradient; by its definition in fp64."""
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    gelu = torch.compile(_gelu, backend="eager", fullgraph=True) if is_compiled else _gelu
    defined = x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
    (gradient,), (of_defined,) = (torch.autograd.grad(y.sum(), x) for y in (gelu(x), defined))
    torch.testing.assert_close(gelu(x), defined)
    torch.testing.assert_close(gradient, of_defined)


def test_the_norm_is_torchs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, D, generator=generator)
    norm, torchs = make_gpt().norm, torch.nn.RMSNorm(D)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    torchs.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), torchs(x))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = norm(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), torchs(x), rtol=0.02, atol=0.02)
