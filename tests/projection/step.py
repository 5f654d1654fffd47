"""The time of one optimizer step of a Llama on one card of a node, as in docs/explanation/projection.rst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mxref.formats import BF16, FP8, MXFP4, MXFP6_E2M3, OperandFormat
from mxref_training.config import ModelConfig, Recompute, TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.model.llama import layer_matmul_parameters, parameter_count
from projection.assumptions import Assumptions, Machine
from projection.counted import MX64, KernelCounts, case_name, one
from projection.published import CARDS
from projection.roofline import kernel_time

_MASTER = 4
"""Bytes of a float32 parameter, gradient or moment."""
_HALF = 2
"""Bytes of BF16."""


class Pass(StrEnum):
    """When something happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Part(StrEnum):
    """What time goes to, in the order in which it is shown."""

    FPROP = "Fprop"
    DGRAD = "Dgrad"
    WGRAD = "Wgrad"
    QUANTIZE_X = "quantize X"
    QUANTIZE_W = "quantize W"
    QUANTIZE_DY = "quantize dY"
    ATTENTION = "attention"
    HEAD = "lm_head"
    LAYERS = "other in layers"
    REST = "other outside"
    COMMUNICATION = "communication"


QUANTIZATION = (Part.QUANTIZE_X, Part.QUANTIZE_W, Part.QUANTIZE_DY)
OUTSIDE_LAYERS = (Part.HEAD, Part.REST, Part.COMMUNICATION)

Times = Mapping[tuple[Pass, Part], float]
"""Seconds of a step."""


@dataclass(frozen=True)
class Arm:
    """A treatment of the linear layers."""

    key: str
    label: str
    format: OperandFormat
    """Of Dgrad and Wgrad, and of Fprop."""
    treatment: str = ""
    """How MXFP4 quantizes X and W, one of `counted.TREATMENTS`; with MX64 Fprop is in MXFP6, and dY has H16."""

    @property
    def fprop(self) -> OperandFormat:
        """The format of Fprop."""
        return MXFP6_E2M3 if self.treatment == MX64 else self.format


ARMS = (
    Arm("bf16", "BF16", BF16),
    Arm("fp8", "FP8", FP8),
    Arm("plain", "MXFP4", MXFP4, "plain"),
    Arm("h16", "MXFP4 + H16", MXFP4, "h16"),
    Arm("h32", "MXFP4 + H32", MXFP4, "h32"),
    Arm("mx64", "mx64", MXFP4, MX64),
)

_FORMAT = {BF16: "bf16", FP8: "fp8", MXFP4: "fp4", MXFP6_E2M3: "fp6"}


@dataclass(frozen=True)
class Workload:
    """A model and how its batches are spread."""

    model: ModelConfig
    batch: int
    """Sequences of an optimizer step, over all cards."""
    seq_len: int
    cards: int
    micro_batch: int
    """Sequences of a card's forward pass."""
    recompute: bool = False
    """Whether the backward pass gathers each layer's weights again and repeats its forward pass."""

    def __post_init__(self) -> None:
        if self.batch % (self.cards * self.micro_batch):
            raise ConfigError(
                f"{self.cards} cards with {self.micro_batch} sequences each do not divide a batch of {self.batch}; "
                "choose a number of cards that does"
            )

    @classmethod
    def of(cls, config: TrainConfig, cards: int) -> Workload:
        """Return the workload of a training configuration on a number of cards."""
        run = config.run
        return cls(
            config.model, run.batch, run.seq_len, cards, run.sequences, run.recompute is Recompute.FULL
        )

    @property
    def tokens(self) -> float:
        """Tokens of a card in a step."""
        return self.batch * self.seq_len / self.cards

    @property
    def micro_batches(self) -> int:
        """Forward passes of a card in a step."""
        return self.batch // (self.cards * self.micro_batch)

    @property
    def weights(self) -> int:
        """Weights of the linear layers that are quantized."""
        return self.model.layers * layer_matmul_parameters(self.model)

    def inputs(self, shared: bool) -> int:
        """Return the elements per token that all layers quantize as X; `shared`: q, k, v read one, gate and up too."""
        m = self.model
        into_attention, into_ffn = (1, 1) if shared else (3, 2)
        return m.layers * ((into_attention + 1 + into_ffn) * m.width + m.ffn)

    @property
    def gradients(self) -> int:
        """Elements per token that all layers quantize as dY: one for each output."""
        m = self.model
        return m.layers * (3 * m.width + 2 * m.kv_heads * m.head_dim + 2 * m.ffn)


def step_times(
    work: Workload,
    arm: Arm,
    records: Sequence[KernelCounts],
    machine: Machine,
    assumed: Assumptions,
    native: bool = True,
) -> dict[tuple[Pass, Part], float]:
    """Return the seconds of one optimizer step by pass and part.

    Args:
        work: what is trained.
        arm: in which formats.
        records: counts that hold training's quantizations.
        machine: the hardware.
        assumed: all that is assumed.
        native: whether gfx950's own conversions round.

    Raises:
        FileFormatError: a quantization has not been counted.
    """
    f, b, u = Pass.FORWARD, Pass.BACKWARD, Pass.UPDATE
    parameters = parameter_count(work.model)
    wire = (1 - assumed.hidden_share.value) * _seconds_per_byte(work.cards, machine, assumed)
    quantization = _quantization(work, arm, records, machine, assumed, native)
    forward, backward = layer_bytes(work, assumed)
    outside = outside_bytes(work, assumed)
    memory = machine.memory.value * assumed.memory_share.value
    times = {
        **_products(work, arm, machine, assumed),
        **quantization,
        (f, Part.LAYERS): forward / memory,
        (b, Part.LAYERS): backward / memory,
        **{(when, Part.REST): outside[when] / memory for when in (f, b, u)},
        (f, Part.COMMUNICATION): parameters * assumed.parameter_bytes.value * wire,
        (b, Part.COMMUNICATION): parameters * assumed.gradient_bytes.value * wire,
    }
    if work.recompute:
        for part in (Part.FPROP, Part.ATTENTION, Part.QUANTIZE_X, Part.LAYERS, Part.COMMUNICATION):
            times[b, part] = times.get((b, part), 0.0) + times[f, part]
    return times


def _seconds_per_byte(cards: int, machine: Machine, assumed: Assumptions) -> float:
    """Return the seconds that a byte of every card's result takes, in the node or on the way to it: the longer one.

    The cards of a node receive different parts over their network ports, and pass them on through the links.
    """
    node = min(cards, CARDS)
    inside = (node - 1) / node / machine.links.value
    to_the_node = (1 - node / cards) / node / machine.network.value
    return max(inside, to_the_node) / assumed.link_share.value


def _products(
    work: Workload, arm: Arm, machine: Machine, assumed: Assumptions
) -> dict[tuple[Pass, Part], float]:
    """Return the time of all matrix products; attention and lm_head are BF16 in every arm."""
    m, tokens = work.model, work.tokens

    def gemm(format: OperandFormat) -> float:
        name = _FORMAT[format]
        share: float = getattr(assumed, f"{name}_share").value
        return 2 * tokens * work.weights / (machine.matrix_flops(name) * share)

    backward = gemm(arm.format)
    bf16 = machine.matrix_flops("bf16")
    head = 2 * tokens * m.vocab * m.width / (bf16 * assumed.bf16_share.value)
    # Two products over half of the positions; the backward pass recomputes one and has four of its own.
    attention = 2 * tokens * work.seq_len * m.width * m.layers / bf16
    return {
        (Pass.FORWARD, Part.FPROP): gemm(arm.fprop),
        (Pass.BACKWARD, Part.DGRAD): backward,
        (Pass.BACKWARD, Part.WGRAD): backward,
        (Pass.FORWARD, Part.HEAD): head,
        (Pass.BACKWARD, Part.HEAD): 2 * head,
        (Pass.FORWARD, Part.ATTENTION): attention / assumed.attention_forward_share.value,
        (Pass.BACKWARD, Part.ATTENTION): 2.5 * attention / assumed.attention_backward_share.value,
    }


def _quantization(
    work: Workload,
    arm: Arm,
    records: Sequence[KernelCounts],
    machine: Machine,
    assumed: Assumptions,
    native: bool,
) -> dict[tuple[Pass, Part], float]:
    """Return the time to make operands: X and W in the forward pass, dY in the backward one, W once per step."""
    amounts = {
        (Pass.FORWARD, Part.QUANTIZE_X): ("x", work.tokens * work.inputs(bool(assumed.shared_inputs.value))),
        (Pass.FORWARD, Part.QUANTIZE_W): ("w", float(work.weights)),
        (Pass.BACKWARD, Part.QUANTIZE_DY): ("x", work.tokens * work.gradients),
    }
    memory = machine.memory.value * assumed.memory_share.value
    out = {}
    for place, (tensor, elements) in amounts.items():
        source = _MASTER if tensor == "w" else _HALF
        if arm.format is MXFP4:
            # dY is no operand of Fprop.
            treatment = "h16" if arm.treatment == MX64 and place[1] is Part.QUANTIZE_DY else arm.treatment
            record = one(records, case_name(tensor, treatment, native))
            out[place] = kernel_time(record, elements, machine, assumed).seconds
        elif arm.format is FP8:
            # Delayed scaling: one pass takes the amax and writes both orientations, a byte each.
            out[place] = elements * (source + 2) / memory
        else:
            # A weight becomes BF16; X and dY are BF16 already.
            out[place] = elements * (source + _HALF) / memory if tensor == "w" else 0.0
    return out


def layer_bytes(work: Workload, assumed: Assumptions) -> tuple[float, float]:
    """Return the bytes of everything in the layers that is neither GEMM, attention nor quantization, by pass.

    Each operation reads its inputs once and writes its results once: two norms, two residual additions, the
    rotary embedding of q and k, SwiGLU; backward also the sums of the gradients of shared inputs.
    """
    m, r = work.model, assumed.residual_bytes.value
    d, rotated = m.width, m.width + m.kv_heads * m.head_dim
    forward = 2 * (r + _HALF) * d + 2 * (2 * r + _HALF) * d + 2 * _HALF * rotated + 3 * _HALF * m.ffn
    sums = 0 if assumed.shared_inputs.value else 3 * 3 * _HALF * d
    backward = (
        2 * (3 * r + _HALF) * d + 2 * (2 * r + _HALF) * d + 2 * _HALF * rotated + 5 * _HALF * m.ffn + sums
    )
    return work.tokens * m.layers * forward, work.tokens * m.layers * backward


def outside_bytes(work: Workload, assumed: Assumptions) -> dict[Pass, float]:
    """Return the bytes outside the layers, by pass: embedding, last norm, loss, sums of gradients, clipping, AdamW."""
    m, r = work.model, assumed.residual_bytes.value
    parameters = parameter_count(m)
    logits = work.tokens * m.vocab * assumed.logit_bytes.value
    embedded = work.tokens * m.width * (_MASTER + r)
    normed = work.tokens * m.width * (r + _HALF)
    # dW of every micro-batch but the first is added to a sum.
    sums = 3 * _MASTER * parameters * (work.micro_batches - 1)
    # AdamW reads weight, gradient and two moments and writes three of them; the norm reads, clipping reads and writes.
    update = (7 + 3) * _MASTER * parameters / work.cards
    return {
        Pass.FORWARD: embedded + normed + logits / 3,
        Pass.BACKWARD: 2 * embedded + 2 * normed + logits * 2 / 3 + sums,
        Pass.UPDATE: update,
    }


def total(times: Times, *, when: Pass | None = None, leave: Sequence[Part] = ()) -> float:
    """Return the seconds of a step, of one pass of it if `when` is given, without some parts."""
    return sum(s for (p, part), s in times.items() if (when is None or p is when) and part not in leave)


def by_part(times: Times) -> dict[Part, float]:
    """Return the seconds of each part over all passes, in order."""
    return {part: sum(s for (_, p), s in times.items() if p is part) for part in Part}
