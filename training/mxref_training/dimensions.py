"""The dimensions of a Llama 3 model: the table `model` of a training configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mxref_training import limits
from mxref_training.limits import check, require


@dataclass(frozen=True)
class RopeScaling:
    """The `llama3` stretching of rotary wavelengths, with the values of Llama 3.1."""

    factor: float = 8.0
    """How much the long wavelengths are stretched."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_max_position / low_freq_factor` are stretched in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_max_position / high_freq_factor` are not stretched."""
    original_max_position: int = 8192
    """Positions before stretching."""

    def __post_init__(self) -> None:
        check(
            self,
            "model.rope_scaling",
            factor=(1, limits.LARGEST),
            high_freq_factor=(0, limits.LARGEST),
            original_max_position=(1, limits.MAX_COUNT),
        )
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"model.rope_scaling: low_freq_factor = {self.low_freq_factor} must be positive and below "
            f"high_freq_factor = {self.high_freq_factor}",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama 3 model."""

    layers: int
    """Decoder blocks."""
    width: int
    """Channels of the residual stream; a multiple of 2 `heads`."""
    heads: int
    """Heads of the attention."""
    kv_heads: int
    """Heads of keys and values, each shared by `heads` / `kv_heads` heads."""
    ffn: int
    """Width of the SwiGLU."""
    vocab: int
    """Tokens of the vocabulary."""
    max_seq: int
    """Positions that the rotary table holds."""
    rope_theta: float = 500000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """The stretching of long wavelengths of Llama 3.1; none: no stretching."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding as the weight of `lm_head` too."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    scale_output_init: bool = True
    """Divide the standard deviation of `o_proj` and `down_proj` by sqrt(2 layers), as Megatron does."""

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(
            ("width", "heads", "kv_heads", "ffn", "vocab", "max_seq"), (1, limits.MAX_WIDTH)
        )
        reals = dict.fromkeys(("norm_eps", "init_std", "rope_theta"), (limits.SMALLEST, limits.LARGEST))
        check(self, "model", layers=(1, limits.MAX_LAYERS), **sizes, **reals)
        require(
            self.width % (2 * self.heads) == 0,
            f"model.width = {self.width} is not a multiple of 2 * model.heads = {2 * self.heads}: "
            "rotary embeddings need an even number of channels in every head",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}",
        )
        require(self.rope_theta > 1, f"model.rope_theta = {self.rope_theta} must be above 1")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.width // self.heads
