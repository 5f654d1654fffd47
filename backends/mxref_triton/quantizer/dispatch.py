"""Quantization in one pass: which kernel reads an input, over which tiles, and where its random bits begin."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mxref.errors import UnsupportedError
from mxref.placement import Placement
from mxref.plan import QuantPlan, dtype_name
from mxref.quantization import require_magnitude, require_whole
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import Rotation
from mxref.steps.rounding import Rounding
from mxref_triton.lane.gfx950 import Conversion
from mxref_triton.lane.hopper import packs_bfloat16
from mxref_triton.lane.treatment import MAX_FUSED_HADAMARD, Output, Treatment, treatment
from mxref_triton.launch import INTERPRETED, check_device, is_hopper
from mxref_triton.quantizer.inputs import Matrix, matrices
from mxref_triton.quantizer.launches import Outputs, launch_both, launch_columns, launch_rows
from mxref_triton.quantizer.randomness import check_step, has_narrow_calls, randomness
from mxref_triton.quantizer.signs import drawn_signs
from mxref_triton.quantizer.tensor_scale import tensor_scale
from mxref_triton.quantizer.transform import hadamard


class Storage:
    """Memory for what a plan stores: packed codes or bfloat16 values, and scale codes."""

    def __init__(self, plan: QuantPlan, device: torch.device, output: Output) -> None:
        made = plan.format
        words = plan.length // 2 if output is Output.VALUES else made.code_bytes(plan.length) // 4
        self.words = torch.empty((plan.rows, words), dtype=torch.int32, device=device)
        self.scales = torch.empty((plan.rows, plan.length // made.k), dtype=torch.uint8, device=device)
        self._plan = plan

    def from_row(self, row: int) -> Outputs:
        """Return what kernels write from a stored row on."""
        words, scales = (self.words[row:], self.scales[row:]) if row else (self.words, self.scales)
        return Outputs(words, scales, self._plan.tensor_scale)

    def codes_and_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / k]."""
        shape = self._plan.rows_shape
        codes, scales = self.words.view(torch.uint8), self.scales
        if len(shape) == 1:
            return codes, scales
        return codes.view(*shape, codes.shape[-1]), scales.view(*shape, scales.shape[-1])

    def values(self) -> torch.Tensor:
        """Return bfloat16 values in the shape of the input; in memory the block axis is the last."""
        plan = self._plan
        values = self.words.view(torch.bfloat16).view(*plan.rows_shape, plan.length)
        return values[..., : plan.shape[plan.axis]].movedim(-1, plan.axis)


def quantize(
    x: torch.Tensor,
    plan: QuantPlan,
    output: Output = Output.CODES,
    native: frozenset[Conversion] = frozenset(),
) -> Storage:
    """Return a planned quantization of a tensor, as codes or as bfloat16 values; `native` as in `treatment`."""
    check_device(x)
    check_step(plan, x.device)
    out = Storage(plan, x.device, output)
    if not out.scales.numel():
        return out
    _launch(x, plan, output, native, out.from_row)
    return out


def _launch(
    x: torch.Tensor,
    plan: QuantPlan,
    output: Output,
    native: frozenset[Conversion],
    outputs: Callable[[int], Outputs],
) -> None:
    """Start the kernels of a plan, one for each matrix of the tensor; `outputs` gives what is written from a row on."""
    rotation = plan.rotation
    if rotation is not None and rotation.n > MAX_FUSED_HADAMARD:
        signs = None if plan.signs is None else drawn_signs(rotation.n, plan.signs, plan.step)
        x, rotation = hadamard(padded(x, plan), rotation, plan.axis, signs), None
    how = _treatment(x, plan, rotation, output, native)
    random = randomness(plan, rotation)
    for m in matrices(x, plan.axis, joined=_rows_are_even(plan)):
        arguments = random.from_row(_global_row(plan, m.first_row))
        if m.reads_words() and m.tensor.shape[1] == plan.length:
            launch_rows(m, outputs(m.first_row), how, arguments, one_row=_is_whole(plan))
        else:
            launch_columns(m, outputs(m.first_row), how, arguments, plan.length)


def plan_tensor_scale(
    x: torch.Tensor, plan: QuantPlan, placement: Placement
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor's largest finite magnitude and its scale, as `mxref.quantization.plan_tensor_scale` does.

    An amax that is given is read, which waits for the device, unless a graph is captured.

    Raises:
        ShapeError, RecipeError: as there.
        UnsupportedError: the amax lies on another device than the tensor, or the tensor where no kernels run.
    """
    amax = placement.amax
    if amax is None:
        require_whole(plan)
        check_device(x)
        check_step(plan, x.device)
        word = torch.zeros(1, dtype=torch.int32, device=x.device)
        if x.numel():
            _launch(x, plan, Output.AMAX, frozenset(), lambda row: Outputs(word))
        amax = word.view(torch.float32)
    else:
        found = amax.device if isinstance(amax, torch.Tensor) else "the host"
        if isinstance(amax, torch.Tensor):
            check_device(amax)
        if x.device not in (found, torch.device("meta")):
            raise UnsupportedError(
                f"backend 'triton' reads placement.amax where the input lies, got an amax on {found} for an input on "
                f"{x.device}; move it: torch.as_tensor(amax, device={str(x.device)!r})"
            )
        if INTERPRETED or not torch.cuda.is_current_stream_capturing():
            require_magnitude(float(amax))
    return amax, tensor_scale(amax, plan.format, plan.spec.four_over_six)


def quantize_dual(
    x: torch.Tensor,
    row: QuantPlan,
    column: QuantPlan,
    output: Output = Output.CODES,
    native: frozenset[Conversion] = frozenset(),
) -> tuple[Storage, Storage]:
    """Return both plans of a matrix: from one read of memory where that gains something, else one after the other."""
    m = Matrix(x, 0)
    gains = all(_reading_takes_longest(plan, x.device) for plan in (row, column))
    if not (gains and m.reads_words() and x.shape == (column.length, row.length) and x.numel()):
        return quantize(x, row, output, native), quantize(x, column, output, native)
    check_device(x)
    for plan in (row, column):
        check_step(plan, x.device)
    outs = Storage(row, x.device, output), Storage(column, x.device, output)
    arguments = [
        (out.from_row(0), randomness(plan, plan.rotation).from_row(_global_row(plan, 0)))
        for out, plan in zip(outs, (row, column), strict=True)
    ]
    hows = (
        _treatment(x, row, row.rotation, output, native),
        _treatment(x, column, column.rotation, output, native),
    )
    launch_both(m, arguments[0], arguments[1], hows)
    return outs


def _reading_takes_longest(plan: QuantPlan, device: torch.device) -> bool:
    """Return whether arithmetic takes less time than memory, so that one read for two plans gains something.

    Both at once over one after the other, 16384 x 4096 bfloat16 on an H100: MXFP4 0.66, with H16 0.74, MXFP8 0.83. SR
    takes 1.01 to 1.33, MXFP6 1.11, and NVFP4 1.03, with H16 1.09. Transforms beyond a block are slower too, and take a
    compiler up to a minute.
    """
    made, n = plan.format, plan.rotation.n if plan.rotation else 0
    if plan.spec.rounding is Rounding.SR or n > made.k:
        return False
    return not is_hopper(device) or (made.element.bits != 6 and made.scale.powers)


def padded(x: torch.Tensor, plan: QuantPlan) -> torch.Tensor:
    """Return a tensor with zeros appended along the block axis as a plan says."""
    missing = plan.length - plan.shape[plan.axis]
    if not missing:
        return x
    zeros = x.new_zeros((*plan.shape[: plan.axis], missing, *plan.shape[plan.axis + 1 :]))
    return torch.cat((x, zeros), plan.axis)


def _treatment(
    x: torch.Tensor, plan: QuantPlan, rotation: Rotation | None, output: Output, native: frozenset[Conversion]
) -> Treatment:
    # Nothing else of the spec decides amax, so its kernels are few.
    spec = OperandSpec(plan.format) if output is Output.AMAX else plan.spec
    n = rotation.n if rotation else 0
    drawn = rotation is not None and plan.signs is not None
    return treatment(
        spec, dtype_name(x), n, drawn or bool(rotation and rotation.signs), output,
        native=native, packed=packs_bfloat16(x.device),
        late=plan.step is not None and (drawn or plan.stream is not None), drawn=drawn, narrow=has_narrow_calls(plan),
    )  # fmt: skip


def _rows_are_even(plan: QuantPlan) -> bool:
    """Return whether stored rows lie as far apart in the global tensor as in the input, or nothing depends on it."""
    ends = (plan.axis, 0 if plan.axis else 1)  # the first of the other axes may be a part of the global one
    pairs = zip(plan.shape, plan.global_shape, strict=True)
    return plan.stream is None or all(own == whole for i, (own, whole) in enumerate(pairs) if i not in ends)


def _is_whole(plan: QuantPlan) -> bool:
    """Return whether a contiguous input may be read as one long row: nothing in it depends on where rows end."""
    if plan.spec.block.is_tile:
        return False
    return plan.stream is None or (plan.first == 0 and plan.global_length == plan.length)


def _global_row(plan: QuantPlan, row: int) -> int:
    """Return the index in the global tensor of a stored row; 0 where no random bits depend on it."""
    if plan.stream is None:
        return 0
    others = [i for i in range(len(plan.shape)) if i != plan.axis]
    index, place = 0, 1
    for i in reversed(others):
        row, own = divmod(row, plan.shape[i])
        index += (plan.origin[i] + own) * place
        place *= plan.global_shape[i]
    return index
