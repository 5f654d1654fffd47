"""Llama 3: the decoder of Llama 3.x with the module names of Hugging Face Transformers.

Shapes: B sequences, T positions, D width, H heads, G key-value heads, E channels of a head, V vocabulary.
The residual stream, the norms, the rotary embedding and the logits are float32. What enters a linear layer is
cast to `compute_dtype`, so every recipe quantizes from BF16 sources. Attention products are never quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxref_training.config import ModelConfig, Recompute, RopeScaling
from mxref_training.distributed.sharded import put
from mxref_training.model.recompute import through


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., D] over its root mean square, times the weight: float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per position of each channel pair, float64 [E / 2].

    With scaling, a wavelength beyond `original_max_position / low_freq_factor` is stretched by `factor`, one
    below `original_max_position / high_freq_factor` is left alone, and between them the two are mixed.
    Source: Meta's Llama 3.1 reference code, `apply_scaling`.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, float32 [max_seq, E]; made from the configuration, never saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.max_seq, config.head_dim), persistent=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Compute the table, in float64 and rounded once, on the device where it lies."""
        config = self.config
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        positions = torch.arange(config.max_seq, dtype=torch.float64)
        angles = torch.outer(positions, frequencies).repeat(1, 2)  # [max_seq, E]
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, H, T, E] with channel pairs (i, i + E / 2) turned by their position: float32."""
        length, half = x.shape[-2], x.shape[-1] // 2
        x = x.float()
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos[:length] + turned * self.sin[:length]


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        narrow = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, narrow, bias=False)
        self.v_proj = nn.Linear(config.width, narrow, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Return [B, T, D] from x [B, T, D], both in the compute dtype."""
        heads = -1, self.head_dim
        q = self.q_proj(x).unflatten(-1, heads).transpose(1, 2)  # [B, H, T, E]
        k = self.k_proj(x).unflatten(-1, heads).transpose(1, 2)  # [B, G, T, E]
        v = self.v_proj(x).unflatten(-1, heads).transpose(1, 2)
        # PyTorch's attention on a CPU is faster in float32 than in bfloat16 at the lengths that a CPU trains.
        dtype = torch.float32 if x.device.type == "cpu" else x.dtype
        out = F.scaled_dot_product_attention(
            rotary(q).to(dtype), rotary(k).to(dtype), v.to(dtype), is_causal=True, enable_gqa=True
        )
        y: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2).to(x.dtype))
        return y


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D] from x [B, T, D], both in the compute dtype."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # In the order of use, so that the order of the modules is the order of the forward pass.
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: RotaryTable, dtype: torch.dtype) -> Tensor:
        """Return the residual stream x, float32 [B, T, D], after attention and SwiGLU."""
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), rotary)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x).to(dtype))
        return y


class Decoder(nn.Module):
    """Embedding, layers and the last norm: `model` of Transformers' LlamaForCausalLM."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary_emb = RotaryTable(config)
        self.recompute = Recompute.NONE

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the residual stream after the last layer, float32 [B, T, D], from tokens int64 [B, T].

        The last norm is left to the caller, who may compile it together with `lm_head`.
        """
        x: Tensor = self.embed_tokens(tokens).float()
        for layer in self.layers:
            if self.recompute is Recompute.NONE:
                x = layer(x, self.rotary_emb, dtype)
            else:
                x = through(layer, self.recompute, x, self.rotary_emb, dtype)
        return x


class Llama(nn.Module):
    """A Llama 3 language model; its weights are float32 and drawn from the seed alone.

    Args:
        config: the shape.
        seed: of the initial weights: normal with `init_std`, `o_proj` and `down_proj` narrower (see
            `ModelConfig.scale_output_init`), norms one. The same seed gives the same weights under every recipe.
            None draws none: the weights have memory and no values, for a caller that gives them all.
        compute_dtype: what enters a linear layer.
        device: where the weights lie; on `meta` they have shapes and no values.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int | None = 0,
        compute_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        with torch.device("meta"):  # PyTorch would draw weights of its own, only to have them replaced
            self.model = Decoder(config)
            self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        self.to_empty(device=device)
        self.tie()
        if torch.device(device).type == "meta":
            return
        if seed is None:
            self.model.rotary_emb.fill()
        else:
            self.reset_parameters(seed)

    def tie(self) -> None:
        """Have `lm_head` and the embedding share their weight, if the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, float32 [B, T, V], from tokens int64 [B, T]."""
        x = self.model.norm(self.model(tokens, self.compute_dtype))
        logits: Tensor = self.lm_head(x.to(self.compute_dtype))
        return logits.float()

    def through(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return what a function computes by parts of this model, as one forward pass of it."""
        return function(*arguments)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw every weight anew, in the order of `named_parameters`; a rank keeps its part of those that are split."""
        self.model.rotary_emb.fill()
        generator = torch.Generator().manual_seed(seed)
        narrow = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1)
                continue
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = narrow if is_output and self.config.scale_output_init else self.config.init_std
            # Drawn on the CPU, so that the weights do not depend on the device.
            put(parameter, torch.empty(parameter.shape).normal_(0, std, generator=generator))


def parameter_count(config: ModelConfig, tensor: int = 1) -> int:
    """Return the number of parameters, tied ones counted once.

    Args:
        config: the shape.
        tensor: ranks that split the linear layers of each decoder layer; the number is then that of one of them.
    """
    embeddings = config.vocab * config.width * (1 if config.tie_embeddings else 2)
    layer = layer_matmul_parameters(config) // tensor + 2 * config.width
    return embeddings + config.layers * layer + config.width


def layer_matmul_parameters(config: ModelConfig) -> int:
    """Return the number of weights in the linear layers of one decoder layer."""
    kv = config.kv_heads * config.head_dim
    return 2 * config.width * (config.width + kv) + 3 * config.width * config.ffn


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the floating-point operations of training on one token, forward and backward.

    Six per weight of a linear layer, and causal attention's two products over half of `seq_len` positions
    on average (Chowdhery et al. 2022, appendix B, with the causal half counted once).
    """
    weights = config.layers * layer_matmul_parameters(config) + config.vocab * config.width
    return 6 * weights + 6 * config.layers * config.width * seq_len
