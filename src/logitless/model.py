"""A small GPT of today: pre-norm RMSNorm, rotary positions, causal SDPA, SwiGLU or GELU MLP, tied or untied head.

`GPT` maps tokens [B, T] to hidden [B, T, D]; its `head` owns the lm-head weight [V, D] and calls the loss inside its
own forward, so that whatever wraps modules (autocast, hooks, sharding, compilation) sees the call.

RMSNorm: Zhang and Sennrich 2019. Rotary positions: Su et al. 2021. SwiGLU: Shazeer 2020. Init: GPT-2, 2019.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from kernels import vocab_shard
from kernels.reference import LossSums
from kernels.vocab_shard import VocabShard
from logitless.footprint_parts import inner_width, up_width
from logitless.losses import LossBackend


@dataclass(frozen=True)
class GPTConfig:
    """The knobs of conf/model/*.yaml, once `padded_vocab_size` is known."""

    n_layers: int
    n_heads: int
    width: int
    padded_vocab_size: int
    mlp: str
    tied: bool
    head_bias: bool
    dropout: float
    checkpoint: bool = False

    def __post_init__(self):
        if self.width % (2 * self.n_heads):
            raise ValueError(f"model.width={self.width} must be an even multiple of model.n_heads={self.n_heads}")
        if self.mlp not in ("swiglu", "gelu"):
            raise ValueError(f"model.mlp={self.mlp} must be swiglu or gelu")


def padded_vocab_size(asked: int | None, tokenizer_size: int) -> int:
    """V of the model: `asked`, or the next multiple of 64 that holds the tokenizer's ids.

    Raises:
        ValueError: `asked` is smaller than the tokenizer's vocabulary.
    """
    needed = -(-tokenizer_size // 64) * 64
    if asked is None:
        return needed
    if asked < tokenizer_size:
        raise ValueError(
            f"model.padded_vocab_size={asked} is smaller than the tokenizer's vocabulary of {tokenizer_size}: "
            f"use {needed} or more, or null"
        )
    return asked


class KeyValueCache:
    """Keys and values of all layers for the first `length` positions of B sequences: L x 2 x [B, H, T_max, D/H].

    For use under no_grad: it is written in place.
    """

    def __init__(self, config: GPTConfig, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layers, 2, batch_size, config.n_heads, max_len, config.width // config.n_heads)
        self.layers = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends [B, H, T, D/H] to a layer; returns all of its keys and values so far."""
        end = self.length + key.shape[2]
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]


class Head(nn.Module):
    """The lm-head: hidden to losses in training, hidden to logits in generation."""

    def __init__(self, width: int, vocab: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None
        self.shard: VocabShard | None = None  # of a vocabulary that is cut over ranks

    def forward(self, hidden: Tensor, labels: Tensor, loss: LossBackend) -> LossSums:
        """Loss sums of hidden [B, T, D] against labels [B, T]."""
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if self.shard is None:
            return loss(hidden, self.weight, labels, bias=self.bias)
        bias = None if self.bias is None else self.bias.to_local()
        return loss(hidden, self.weight.to_local(), labels, bias=bias, shard=self.shard)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V], for generation."""
        return F.linear(hidden, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        # The values apart: as a part of one tensor of all three, of which autograd keeps no other, they would hold it.
        self.query_key = nn.Linear(config.width, 2 * config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None, layer: int) -> Tensor:
        batch, length, width = x.shape
        query, key = self.query_key(x).view(batch, length, 2, self.n_heads, -1).unbind(2)
        query, key = _rotate(query, *rotary), _rotate(key, *rotary)
        value = self.value(x).view(batch, length, self.n_heads, -1)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if cache is not None:
            key, value = cache.update(layer, key, value)
        # With a cache there is one new token, which sees everything, or a whole prompt, which starts the cache.
        is_causal = length > 1
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = nn.Linear(config.width, up_width(config), bias=False)
        # [in, out], not a Linear's [out, in]: on an H200 two of its three products take cuBLAS 6% less time so.
        self.down = nn.Parameter(torch.empty(inner_width(config), config.width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if not torch.is_grad_enabled():
            return self._down(inner)
        # Activated once more in backward, which is a cheap pass: else a block would keep its largest tensor twice.
        return checkpoint(self._down, inner, use_reentrant=False, preserve_rng_state=False)

    def _down(self, inner: Tensor) -> Tensor:
        """The activation and `down`; of these, backward repeats the activation only."""
        if not self.gated:
            return _gelu(inner) @ self.down
        gate, value = inner.chunk(2, dim=-1)
        return (F.silu(gate) * value) @ self.down


class RMSNorm(nn.RMSNorm):
    """Statistics in fp32; weight and result in x's dtype, also under autocast, whose own result would be in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Embedding(nn.Embedding):
    """Gives rows in the dtype of autocast, or of the weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _in_autocast_dtype(super().forward(tokens))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None, layer: int) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, cache, layer))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.padded_vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.width)
        self.head = Head(config.width, config.padded_vocab_size, bias=config.head_bias)
        self._init_weights()
        if config.tied:
            self.head.weight = self.embedding.weight

    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream is smaller, so that its variance does not grow with depth.
                depth = 2 * self.config.n_layers if name.endswith(("out.weight", "down")) else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def cut_vocabulary(self, mesh: DeviceMesh) -> set[nn.Parameter]:
        """Leaves this rank of a 1-D mesh its classes of the head, as DTensors with Shard(0), which it returns.

        A tied embedding is cut with the head. Raises ValueError where a rank would have no class.
        """
        shard = VocabShard(mesh.get_group(), self.config.padded_vocab_size)

        def cut(whole: nn.Parameter) -> nn.Parameter:
            own = whole.detach()[shard.classes].to(mesh.device_type, copy=True)
            layout = {"shape": whole.shape, "stride": whole.stride()}
            return nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], **layout))

        self.head.shard, self.head.weight = shard, cut(self.head.weight)
        if self.head.bias is not None:
            self.head.bias = cut(self.head.bias)
        if self.config.tied:
            self.embedding.weight = self.head.weight
        return set(self.head.parameters())

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """hidden [B, T, D] of tokens [B, T] int64, in the dtype of autocast or of the weights.

        With a cache, tokens continue what it holds.

        With `config.checkpoint` autograd keeps a block's input alone, and backward runs the block once more, with the
        same dropout masks.
        """
        start = 0 if cache is None else cache.length
        if start and tokens.shape[1] > 1:
            raise ValueError(f"a cache of {start} positions is continued by one token at a time, got {tokens.shape[1]}")
        head_dim = self.config.width // self.config.n_heads
        rotary = _rotary_table(start, start + tokens.shape[1], head_dim, tokens.device)
        x = self._embed(tokens)
        recomputes = self.config.checkpoint and torch.is_grad_enabled()  # never with a cache: that is for no_grad
        for layer, block in enumerate(self.blocks):
            if recomputes:
                x = checkpoint(block, x, rotary, cache, layer, use_reentrant=False)
            else:
                x = block(x, rotary, cache, layer)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.norm(x)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.config.tied and self.head.shard is not None:
            return _in_autocast_dtype(vocab_shard.embedding(tokens, self.embedding.weight.to_local(), self.head.shard))
        return self.embedding(tokens)

    def compile_parts(self, device: torch.device) -> None:
        """Compiles embedding, blocks and last norm, each by itself: all blocks share one graph for a sequence length.

        Not their hooks (of sharding), nor the embedding on a CPU, where threads would add up its gradient in an order
        that chance decides, nor one that is cut with the head, nor the head, whose loss is one operator to a compiler.
        DDP's cutting of graphs, which would cut a block, is off for the whole process.
        """
        torch._dynamo.config.optimize_ddp = False
        for part in (*([] if device.type == "cpu" else [self.embedding]), *self.blocks, self.norm):
            part.forward = torch.compile(part.forward, dynamic=False, fullgraph=True)

    def n_parameters(self) -> int:
        """Parameters, a tied weight counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations that a token takes in training, those of the model: none is counted twice.

        6 for every entry of a matrix that tokens are multiplied by (2 forward, 4 backward; PaLM, Chowdhery et al. 2022,
        appendix B), and those of attention, 6 T D a layer: half of PaLM's, since a token sees half of the others.
        """
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2) + self.head.weight.numel()
        return 6 * matrices + 6 * seq_len * self.config.width * self.config.n_layers

    def head_share(self) -> float:
        """The lm-head's part of the parameters, in [0, 1]."""
        return sum(parameter.numel() for parameter in self.head.parameters()) / self.n_parameters()


def fastest_attention(device: torch.device) -> AbstractContextManager:
    """A context in which SDPA prefers cuDNN's kernel where that is the fastest: from Hopper on."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext()
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    return sdpa_kernel(list(order), set_priority=True)


def _in_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype, where that is on, so that the stream between the blocks takes half the bytes."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _gelu(x: Tensor) -> Tensor:
    """GELU as GPT-2 has it: x (1 + tanh u) / 2 for u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if torch.compiler.is_compiling():  # the same by a sigmoid: a compiled tanh takes longer than reading and writing
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


def _rotary_table(start: int, end: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [end - start, 1, head_dim / 2] fp32 of the positions in [start, end)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(start, end, device=device, dtype=torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D/H] with its two halves rotated against each other; computed in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
