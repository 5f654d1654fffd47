"""Every key of a training configuration: frozen tables, checked when they are made.

`config_files` fills them from TOML.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple

from mxref.errors import RecipeError
from mxref.tomlio import normalize
from mxref_training.errors import ConfigError

MAX_COUNT = 2**32 - 1
"""Most of what is counted by the run; a step is a 32-bit word of the random streams."""
MAX_STEP_TOKENS = 2**31
MAX_LAYERS = 4096
MAX_WIDTH = 2**24
MAX_RANKS = 2**20
MAX_THREADS = 1024
"""OpenMP ends the process where the system refuses to start a thread."""

# Limits of normal float32, in which a run computes.
SMALLEST, LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check(obj: Any, section: str, **limits: tuple[float, float]) -> None:
    """Raise ConfigError, naming key, value and limit, unless all fields have their types and lie within limits."""
    try:
        normalize(obj, f"{section}.")
    except RecipeError as err:
        raise ConfigError(str(err)) from err
    for name, (low, high) in limits.items():
        value = getattr(obj, name)
        if value is None or low <= value <= high:
            continue
        if value > high:
            limit = f"above {high:,}" if isinstance(high, int) else f"above {high:.6g}"
        elif low == 0:
            limit = "negative"
        else:
            limit = f"below {low}" if low != SMALLEST or value > 0 else "no positive number"
        raise ConfigError(f"{section}.{name} = {value} is {limit}")


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
        reals = {"factor": (1, LARGEST), "high_freq_factor": (0, LARGEST)}
        check(self, "model.rope_scaling", original_max_position=(1, MAX_COUNT), **reals)
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
        sizes = dict.fromkeys(("width", "heads", "kv_heads", "ffn", "vocab", "max_seq"), (1, MAX_WIDTH))
        reals = dict.fromkeys(("norm_eps", "init_std", "rope_theta"), (SMALLEST, LARGEST))
        check(self, "model", layers=(1, MAX_LAYERS), **sizes, **reals)
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


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    train: str = "builtin"
    """`builtin`; `c4` or `hf:NAME:CONFIG:SPLIT`; JSONL: a file, a folder or a pattern; or Megatron's token files.

    Token files are a prefix, a `.bin` file, or `WEIGHT PREFIX WEIGHT PREFIX` and so on.
    """
    val: str | None = None
    """As `train`. Without it, the source's own validation side, or 2 % of the files' documents, held out."""
    tokenizer: str | None = None
    """A `tokenizer.json`; without it a byte-level BPE of `model.vocab` tokens is trained on `train`."""
    max_documents: int = 0
    """Read no more than this many training documents; 0 reads all, or 100,000 of a data set that is streamed."""
    order_samples: int = 0
    """Samples that Megatron's order of token files is made for; 0 is `run.steps` times `run.batch`."""

    def __post_init__(self) -> None:
        check(self, "data", max_documents=(0, MAX_COUNT), order_samples=(0, MAX_COUNT))
        for name in ("train", "val", "tokenizer"):
            require(
                getattr(self, name) != "",
                f"data.{name} is empty: give a path, or leave it out for its default",
            )


class Schedule(StrEnum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    """Half a cosine, from the end of the warm-up down to `min_lr_ratio` at `decay_steps`."""
    LINEAR = "linear"
    """A straight line, from the end of the warm-up down to 0 at `decay_steps`."""
    WSD = "wsd"
    """Warm-up, stable, decay: constant up to `decay_start`, then a straight line down to 0 at `decay_steps`."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, gradient clipping and the learning rate."""

    lr: float
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment of AdamW."""
    beta2: float = 0.95
    """Decay of its second moment."""
    eps: float = 1e-5
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled; for matrices (linear weights and embeddings), never for norm weights."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 switches clipping off."""
    warmup: int = 0
    """Steps of linear warm-up."""
    schedule: Schedule = Schedule.CONSTANT
    min_lr_ratio: float = 0.1
    """End of the cosine, as a fraction of `lr`."""
    decay_steps: int = 0
    """Step at which the decay ends; 0 is the last step of the run."""
    decay_start: int | None = None
    """Step at which the decay of `wsd` begins, and of no other schedule."""

    def __post_init__(self) -> None:
        positive = dict.fromkeys(("lr", "eps"), (SMALLEST, LARGEST))
        counts = dict.fromkeys(("warmup", "decay_steps"), (0, MAX_COUNT))
        reals = dict.fromkeys(("weight_decay", "clip"), (0, LARGEST))
        check(self, "optim", **positive, **counts, min_lr_ratio=(0, 1), **reals)
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name} = {getattr(self, name)} is outside [0, 1)")
        require(
            (self.decay_start is not None) == (self.schedule is Schedule.WSD),
            f"optim.schedule = {self.schedule.value!r} and optim.decay_start = {self.decay_start} do not go together: "
            "the schedule 'wsd', and no other, needs the step at which its decay begins",
        )
        if self.decay_start is not None:
            require(
                self.warmup <= self.decay_start < (self.decay_steps or MAX_COUNT),
                f"optim.decay_start = {self.decay_start} is not from optim.warmup = {self.warmup} to a step before "
                f"optim.decay_steps = {self.decay_steps}",
            )


class Compile(StrEnum):
    """The part of a model that `torch.compile` compiles."""

    NONE = "none"
    BLOCK = "block"
    """Each decoder layer; all of them share one graph."""
    MODEL = "model"
    """The whole model as one graph."""


class Recompute(StrEnum):
    """What the backward pass computes again, so that the forward pass need not keep it (activation checkpointing)."""

    NONE = "none"
    SELECTIVE = "selective"
    """Each decoder layer but for its GEMMs and attention, whose results are kept."""
    FULL = "full"
    """Each decoder layer."""


@dataclass(frozen=True)
class RunConfig:
    """Length of a run, its batches, and what is written when."""

    steps: int
    """Optimizer steps of the run."""
    batch: int
    """Sequences per optimizer step."""
    seq_len: int
    """Tokens of a sequence."""
    eval_every: int
    """Steps between evaluations; the last step is always evaluated."""
    eval_tokens: int
    """Validation tokens per evaluation: the first ones, unshuffled."""
    seed: int = 0
    """Initial weights, random rounding and, unless `data_seed` is set, the order of the data."""
    data_seed: int | None = None
    """Order of the data; none: `seed`."""
    micro_batch: int = 0
    """Sequences per forward pass; 0 is the whole batch."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 keeps only the one at the end."""
    keep: int = 2
    """How many checkpoints stay on disk."""
    async_checkpoint: bool = False
    """Write checkpoints from a copy in the host's memory while training goes on."""
    spike: float = 10.0
    """Report a loss that is this many robust standard deviations above the median of the last losses; 0: none."""
    log_every: int = 1
    """Steps between lines of `metrics.jsonl`; evaluations are always written."""
    telemetry_every: int = 0
    """Steps between measurements of telemetry; 0 measures nothing."""
    threads: int = 0
    """Threads of PyTorch; 0 leaves its default."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`; `auto` is where the backend computes."""
    compile: Compile = Compile.NONE
    """What `torch.compile` compiles: `none`, `block` or `model`."""
    recompute: Recompute = Recompute.NONE
    """What the backward pass computes again to save memory: `none`, `selective` or `full`. The bits stay the same."""
    capture: bool = False
    """Run each step as one CUDA graph, and report it when the next has been started; on a CPU without the graph.

    The learning rate is then rounded to float32.
    """
    deterministic: bool = False
    """Do not choose kernels by their time, so that the same seed gives the same bits on the same device and versions.

    Kernels are deterministic in any case; a compiler that measures its kernels may choose others in another process.
    """
    shadow: float = 0.0
    """Share of the operations in block formats that the reference repeats and compares, 0 to 1."""
    init_from: str | None = None
    """A folder in Hugging Face's layout with the weights to begin with; without it they are drawn from the seed.

    Its config.json gives the keys that `[model]` leaves out, its tokenizer.json is the default of `data.tokenizer`.
    """

    def __post_init__(self) -> None:
        from_one = ("steps", "batch", "seq_len", "eval_every", "eval_tokens", "keep", "log_every")
        from_zero = ("micro_batch", "checkpoint_every", "telemetry_every")
        counts = dict.fromkeys(from_one, (1, MAX_COUNT)) | dict.fromkeys(from_zero, (0, MAX_COUNT))
        seeds = dict.fromkeys(("seed", "data_seed"), (0, 2**64 - 1))
        counts["threads"] = 0, MAX_THREADS
        check(self, "run", shadow=(0, 1), spike=(0, LARGEST), **counts, **seeds)
        require(
            self.init_from != "", "run.init_from is empty: give a folder, or leave it out for drawn weights"
        )
        require(
            self.step_tokens <= MAX_STEP_TOKENS,
            f"run.batch * run.seq_len = {self.step_tokens:,} tokens per step are above {MAX_STEP_TOKENS:,}",
        )
        require(
            self.batch % self.sequences == 0,
            f"run.batch = {self.batch} is not a multiple of run.micro_batch = {self.micro_batch}",
        )
        require(
            self.eval_tokens >= self.seq_len,
            f"run.eval_tokens = {self.eval_tokens} is below one sequence of run.seq_len = {self.seq_len}",
        )
        require(
            not (self.capture and (self.shadow or self.telemetry_every)),
            f"run.capture = true, but run.shadow = {self.shadow} and run.telemetry_every = {self.telemetry_every} look "
            "at each operation, which a CUDA graph does not show: set both to 0, or run.capture = false",
        )
        require(
            self.recompute is Recompute.NONE or not (self.capture or self.compile is Compile.MODEL),
            f"run.recompute = {self.recompute.value!r} goes neither with run.capture = true nor with run.compile = "
            "'model': set run.capture = false and run.compile = 'block' or 'none'",
        )
        require(
            self.recompute is not Recompute.SELECTIVE or self.compile is Compile.NONE,
            "run.recompute = 'selective' chooses among operations, which a compiled layer does not show: set "
            "run.compile = 'none', or run.recompute = 'full'",
        )

    @property
    def sequences(self) -> int:
        """Sequences per forward pass."""
        return self.micro_batch or self.batch

    @property
    def micro_batches(self) -> int:
        """Forward passes per optimizer step."""
        return self.batch // self.sequences

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch * self.seq_len

    @property
    def order_seed(self) -> int:
        """Seed of the order of the data."""
        return self.seed if self.data_seed is None else self.data_seed


LAYOUT = "parallel"
"""The key of a run's identity that holds the axes of its ranks. A run may go on with other axes."""


class Axes(NamedTuple):
    """Ranks along each axis of the mesh, the slowest first."""

    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """Ranks that have sequences of their own."""
        return self.replicate * self.shard

    @property
    def whole(self) -> bool:
        """Whether each rank holds the whole model."""
        return self.shard == self.tensor == 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return prod(self)


ONE = Axes(1, 1, 1)
"""One process."""


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks along the three axes of the mesh; 0 or -1 on one axis takes the ranks that the others leave."""

    replicate: int = 1
    """Groups of ranks that each hold all weights; gradients are added over them. With `shard` and `tensor` 1 a group is
    one rank, whose weights are never gathered; else the groups are those of HSDP."""
    shard: int = 0
    """Ranks over which each layer's weights, gradients and moments are split (FSDP)."""
    tensor: int = 1
    """Ranks that compute a layer together, each with a part of its rows or columns."""
    keep_gathered: bool = False
    """Whether layers that a forward pass gathered stay so until the backward pass. They are gathered once, not twice,
    and a rank holds the weights of all layers, 4 bytes for each parameter."""

    def __post_init__(self) -> None:
        check(self, "parallel", **dict.fromkeys(("replicate", "shard", "tensor"), (-1, MAX_RANKS)))
        left = [name for name in ("replicate", "shard", "tensor") if getattr(self, name) < 1]
        require(
            len(left) <= 1,
            f"parallel.{' and parallel.'.join(left)} are 0 or -1, and only one axis can take the ranks that are left",
        )

    def axes(self, ranks: int) -> Axes:
        """Return the ranks along each axis of a run of so many ranks.

        Raises:
            ConfigError: the product is another number, or no number makes it so.
        """
        wanted = (self.replicate, self.shard, self.tensor)
        given = prod(n for n in wanted if n > 0)
        if ranks % given == 0:
            found = Axes(*(n if n > 0 else ranks // given for n in wanted))
            if found.ranks == ranks:
                return found
        shown = " * ".join(
            f"{name} {n if n > 0 else 'rest'}"
            for name, n in zip(("replicate", "shard", "tensor"), wanted, strict=True)
        )
        number = "1 rank" if ranks == 1 else f"{ranks} ranks"
        multiple = "" if min(wanted) > 0 else "a multiple of "
        raise ConfigError(
            f"parallel: {shown} does not make {number}: start {multiple}{given} by torchrun --nproc-per-node, or "
            "change the table parallel; an axis of 0 takes the ranks that are left"
        )


@dataclass(frozen=True)
class TrainConfig:
    """Everything about a run but the recipe."""

    model: ModelConfig
    optim: OptimConfig
    run: RunConfig
    data: DataConfig = DataConfig()
    parallel: ParallelConfig | None = None
    """How ranks share the work; None is `ParallelConfig()`."""

    def __post_init__(self) -> None:
        check(self, "config")
        require(
            self.run.seq_len <= self.model.max_seq,
            f"run.seq_len = {self.run.seq_len} is above model.max_seq = {self.model.max_seq}",
        )

    @property
    def keeps_gathered(self) -> bool:
        """Whether the layers that a forward pass gathers stay until the backward pass."""
        return self.parallel is not None and self.parallel.keep_gathered

    def axes(self, ranks: int) -> Axes:
        """Return the ranks along each axis of a run of so many ranks; ConfigError as of `ParallelConfig.axes`."""
        return (self.parallel or ParallelConfig()).axes(ranks)
