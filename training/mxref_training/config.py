"""Training configurations: frozen dataclasses filled from TOML, checked before anything is computed.

Every table goes through `mxref.tomlio`, so an unknown key names the nearest valid one, as in a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mxref.errors import RecipeError
from mxref.tomlio import build, merge, nearest, read_toml, shown, to_table
from mxref_training import limits
from mxref_training.dimensions import ModelConfig
from mxref_training.errors import ConfigError
from mxref_training.huggingface.config_json import completed, require_same_shape
from mxref_training.limits import check, require
from mxref_training.overrides import parse_override
from mxref_training.parallel import Axes, ParallelConfig

PRESETS = Path(__file__).parent / "presets"
RECIPES = Path(__file__).parent / "recipes"


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
    max_line_mib: int = 64
    """Longest line of a data file in MiB, decompressed: a limit of the memory that a damaged or hostile file uses."""
    workers: int = 0
    """Processes that turn text into tokens; below 2, this process does."""

    def __post_init__(self) -> None:
        from_zero = dict.fromkeys(("max_documents", "order_samples"), (0, limits.MAX_COUNT))
        workers = (0, limits.MAX_THREADS)
        check(self, "data", max_line_mib=(1, limits.MAX_COUNT), workers=workers, **from_zero)
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
        positive = dict.fromkeys(("lr", "eps"), (limits.SMALLEST, limits.LARGEST))
        counts = dict.fromkeys(("warmup", "decay_steps"), (0, limits.MAX_COUNT))
        reals = dict.fromkeys(("weight_decay", "clip"), (0, limits.LARGEST))
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
                self.warmup <= self.decay_start < (self.decay_steps or limits.MAX_COUNT),
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
        counts = dict.fromkeys(from_one, (1, limits.MAX_COUNT)) | dict.fromkeys(
            from_zero, (0, limits.MAX_COUNT)
        )
        seeds = dict.fromkeys(("seed", "data_seed"), (0, 2**64 - 1))
        check(
            self,
            "run",
            threads=(0, limits.MAX_THREADS),
            shadow=(0, 1),
            spike=(0, limits.LARGEST),
            **counts,
            **seeds,
        )
        require(
            self.init_from != "", "run.init_from is empty: give a folder, or leave it out for drawn weights"
        )
        require(
            self.step_tokens <= limits.MAX_STEP_TOKENS,
            f"run.batch * run.seq_len = {self.step_tokens:,} tokens per step are above {limits.MAX_STEP_TOKENS:,}",
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

    def axes(self, ranks: int) -> Axes:
        """Return the ranks along each axis of a run of so many ranks; ConfigError as of `ParallelConfig.axes`."""
        return (self.parallel or ParallelConfig()).axes(ranks)


def config_from_table(table: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """Return the configuration of a TOML table; ConfigError names the table and the key."""
    try:
        return build(TrainConfig, table, where)
    except RecipeError as err:
        raise ConfigError(str(err)) from err


def load_config(source: str | Path, overrides: Sequence[str | Mapping[str, Any]] = ()) -> TrainConfig:
    """Return a training configuration.

    Args:
        source: a TOML file, or the name of a preset.
        overrides: laid over it in order: `section.key=value`, whose value is TOML, or a string where it does
            not parse as TOML; or a nested table.

    Raises:
        ConfigError: an unknown preset, key or value; FileFormatError: a file that cannot be read.
        HuggingFaceError: the folder that `run.init_from` names holds no such model.
    """
    path = _find(source, PRESETS, "preset")
    table = read_toml(path)
    for override in overrides:
        table = merge(table, parse_override(override, TrainConfig) if isinstance(override, str) else override)
    config = config_from_table(completed(table), path.name)
    if config.run.init_from is not None:
        require_same_shape(to_table(config.model), Path(config.run.init_from))
    return config


def names(folder: Path) -> list[str]:
    """Return the names of the presets or recipes in a folder of the package, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def _find(source: str | Path, folder: Path, kind: str) -> Path:
    path = Path(source)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return path
    if str(source) not in (known := names(folder)):
        hint = nearest(str(source), known)
        raise ConfigError(f"unknown {kind} {shown(str(source))}{hint}; a file's name must end in .toml")
    return folder / f"{source}.toml"
