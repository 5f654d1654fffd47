"""The operands that any PyTorch model gives to the GEMMs of its linear layers, as bytes in a file.

Where a layer's bytes come from depends on its kind:

- a converted layer: what its operators answered, of all three GEMMs;
- torchao: the weight is a tensor with codes and scales. The input is quantized within the product, so it is quantized
  once more by the same call of torchao;
- compressed-tensors: the layer multiplies values. Their codes and scales are made once more by its own functions, and
  the values of these must be the ones that were multiplied;
- any other layer: the numbers that were multiplied.

All but a converted layer are recorded at `torch.nn.functional.linear`, in the forward pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from mxref._version import __version__
from mxref.arrays import as_array
from mxref.conformance.archive import check_name
from mxref.conformance.stacks import Stack, StackOperand, save_stack
from mxref.formats import BLOCK_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mxref.layouts.foreign import LAYOUTS
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.roles import GemmRole
from mxref_torch.checks.watching import MAX_BYTES, LayerWatcher
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.operands import Bf16Operand, Fp8Operand
from mxref_torch.names import model_of, named_modules, plain_class, some
from mxref_torch.operators import Multiplied, Quantized

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class OperandRecorder(TorchFunctionMode):
    """Holds the operands of the linear layers that ran."""

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        super().__init__()
        self.operands: list[StackOperand] = []
        self.kinds: set[str] = set()
        """The packages whose layers ran, with their versions."""
        self._max_bytes, self._bytes = max_bytes, 0
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._running: list[tuple[str, nn.Module, Any, Any]] = []
        self._names = {module: name for name, module in named_modules(model)}
        self._before: list[int] = []
        self.missed: dict[str, None] = {}
        """Linear layers that ran and are not recorded, in their order."""
        self._reading = False

    def enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take note of a module that begins, and of its first argument."""
        name, given = self._names[module], next(iter((*args, *named.values())), None)
        # compressed-tensors puts other values into the weight while the layer runs.
        weight = module.weight.data if getattr(module, "quantization_scheme", None) is not None else None
        self._running.append((name, module, given, weight))
        self._before.append(len(self.operands))
        if not isinstance(module, MXLinear):
            return
        kind = module.gemms[GemmRole.FPROP].kind
        if kind is Fp8Operand:
            raise LayerError(
                f"layer {name} reads FP8 with one scale for a tensor, which is not recorded; record a recipe of block "
                "formats or BF16"
            )
        if kind is Bf16Operand and isinstance(given, torch.Tensor):  # its product is no `linear` of torch
            self.kinds.add(f"mxref {__version__}")
            for tensor, numbers in (
                ("x", given.reshape(-1, given.shape[-1])),
                ("w", module.get_parameter("weight")),
            ):
                self._keep(name, tensor, _numbers(numbers.detach().to(torch.bfloat16)), None)

    def leave(self, *_: Any) -> None:
        """Take note of the module's end, and of a linear layer that multiplied by another function than `linear`."""
        name, module, _given, _weight = self._running.pop()
        before = self._before.pop()
        if plain_class(module) is not None and before == len(self.operands):
            self.missed[name] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operands of `linear`, and call the function."""
        if func is nn.functional.linear and self._running and not self._reading:
            self._reading = True
            try:
                with torch.no_grad():
                    self._linear(
                        *args[:2], **{k: v for k, v in (kwargs or {}).items() if k in ("input", "weight")}
                    )
            finally:
                self._reading = False
        return func(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        name, module, given, before = self._running[-1]
        x = input.reshape(-1, input.shape[-1])
        if type(weight).__module__.startswith("torchao."):
            self.kinds.add(f"torchao {version('torchao')}")
            self._keep(name, "x", _numbers(x), _torchao(_torchao_input(x, weight)))
            self._keep(name, "w", None, _torchao(weight))
        elif getattr(module, "quantization_scheme", None) is not None and "compressed_tensors" in sys.modules:
            self.kinds.add(f"compressed-tensors {version('compressed-tensors')}")
            source = given.reshape(-1, given.shape[-1]) if isinstance(given, torch.Tensor) else x
            self._keep(name, "x", *_compressed(module, "input", source, x))
            self._keep(name, "w", *_compressed(module, "weight", before, weight))
        else:
            self.kinds.add("plain")
            self._keep(name, "x", _numbers(x), None)
            self._keep(name, "w", _numbers(weight), None)

    def keep_quantized(self, where: dict[str, str], call: Quantized) -> None:
        """Keep what an operator answered for a converted layer."""
        from mxref.explain.link import treatment_text

        q = call.q
        scale = None if q.tensor_scale is None else _host(q.tensor_scale)
        array = MXArray(
            _host(q.codes), _host(q.scales), tuple(call.x.shape), call.axis, q.block, q.prescale, None, q.format, scale
        )  # fmt: skip
        self.kinds.add(f"mxref {__version__}")
        layer, role, tensor = (where.get(key, "unknown") for key in ("layer", "role", "tensor"))
        self._keep(layer, tensor, _numbers(call.x), array, role, treatment_text(call.spec))

    def _keep(
        self, layer: str, tensor: str, source: NDArray[Any] | None, array: MXArray | None, gemm: str = "fprop",
        treatment: str = "",
    ) -> None:  # fmt: skip
        self._bytes += sum(
            a.nbytes for a in (source, *(array.arrays().values() if array else ())) if a is not None
        )
        if self._bytes > self._max_bytes:
            raise LayerError(
                f"the operands are above {self._max_bytes:,} bytes: take a smaller batch, or set max_bytes"
            )
        key = (layer, gemm, tensor)
        self.operands.append(StackOperand(*key, self._calls[key], source, array, treatment))
        self._calls[key] += 1


class _Converted(LayerWatcher):
    """Passes on what the operators answer for converted layers."""

    def __init__(self, model: nn.Module, recorder: OperandRecorder) -> None:
        super().__init__(model)
        self._recorder = recorder

    def quantized(self, call: Quantized) -> None:
        self._recorder.keep_quantized(self.of_quantization(call), call)

    def multiplied(self, call: Multiplied) -> None:
        """Products are not recorded."""


@contextmanager
def record_operands(
    model: Any, file: str | Path, *, name: str = "", max_bytes: int = MAX_BYTES
) -> Iterator[OperandRecorder]:
    """Record the operands of a model's linear layers during the block, and write them to a file for `mxref compare`.

    Args:
        model: any PyTorch model, or what `convert` returned; not compiled.
        file: where to write; the name ends in .npz. Nothing is written if the block raises.
        name: of the stack in reports; by default the packages whose layers ran.
        max_bytes: the largest size that is kept in memory.

    Yields:
        What was recorded so far, in `operands`.

    Raises:
        LayerError: no linear layer ran, a compiled model, a layer whose bytes cannot be read, or more than `max_bytes`.
        FileFormatError: a name that does not end in .npz, or a file that cannot be written.
    """
    module, path = model_of(model), check_name(file)
    recorder = OperandRecorder(module, max_bytes)
    for each_name, each in named_modules(module):
        if each._compiled_call_impl is not None or type(each).__name__ == "OptimizedModule":
            raise LayerError(
                f"{each_name or 'the model'} is compiled, and compiled code cannot be looked into: record the model as "
                "it is before torch.compile"
            )
    with ExitStack() as stack:
        for _, each in named_modules(module):
            for handle in (
                each.register_forward_pre_hook(recorder.enter, with_kwargs=True),
                each.register_forward_hook(recorder.leave, always_call=True),
            ):
                stack.callback(handle.remove)
        if any(isinstance(each, MXLinear) for each in module.modules()):
            stack.enter_context(_Converted(module, recorder).watching())
        stack.enter_context(recorder)
        yield recorder
    if not recorder.operands:
        raise LayerError(
            "no linear layer ran: call the model within the block, or functions of torch.nn.functional in its modules"
        )
    facts = {"torch": torch.__version__, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    if recorder.missed:
        facts["without"] = some(recorder.missed)
    save_stack(path, Stack(name or "; ".join(sorted(recorder.kinds)), tuple(recorder.operands), facts))


def _host(tensor: Any) -> NDArray[Any]:
    if isinstance(tensor, torch.Tensor):
        tensor = as_array(tensor.detach().cpu().contiguous())
    return np.array(tensor)


def _numbers(x: torch.Tensor) -> NDArray[Any]:
    if x.dtype not in _TYPES:
        raise LayerError(f"a linear layer multiplies {x.dtype}: operands are float32, bfloat16 or float16")
    return _host(x)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return _host(tensor.detach().contiguous().view(torch.uint8))


# ---- torchao ----

_ELEMENTS = {torch.float4_e2m1fn_x2: MXFP4, torch.float8_e4m3fn: MXFP8_E4M3, torch.float8_e5m2: MXFP8_E5M2}


def _torchao_input(x: torch.Tensor, weight: Any) -> Any:
    """Return the input as the weight's product quantizes it; None if it stays as it is."""
    k = getattr(weight, "act_quant_kwargs", None)
    if k is None:
        return None
    made = type(weight)
    if hasattr(made, "to_mx"):
        return made.to_mx(
            x, k.elem_dtype, k.block_size, k.scaling_mode, k.kernel_preference, is_swizzled_scales=k.is_swizzled_scales
        )  # fmt: skip
    scale = weight.act_per_tensor_scale
    if k.use_dynamic_per_tensor_scale:
        from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

        scale = per_tensor_amax_to_scale(torch.max(torch.abs(x)))
    return made.to_nvfp4(
        x, block_size=k.block_size, per_tensor_scale=scale, is_swizzled_scales=k.is_swizzled_scales,
        use_triton_kernel=k.use_triton_kernel,
    )  # fmt: skip


def _torchao(tensor: Any) -> MXArray | None:
    """Return the bytes of an MXTensor or NVFP4Tensor of torchao."""
    if tensor is None:
        return None
    made = _ELEMENTS.get(tensor.elem_dtype) if hasattr(tensor, "elem_dtype") else NVFP4
    if made is None or tensor.block_size != made.k or tensor.qdata.ndim != 2:
        raise LayerError(
            f"cannot read a {type(tensor).__name__} of torchao with shape {tuple(tensor.shape)} and blocks of "
            f"{tensor.block_size}: known are matrices in {', '.join(f.title for f in (*_ELEMENTS.values(), NVFP4))}"
        )
    rows, length = tensor.shape
    layout = LAYOUTS["nvidia_128x4" if tensor.is_swizzled_scales else "rows"]
    scales = layout.read(_bytes(tensor.scale), rows, length, made)
    scale = None
    if made.tensor_scale:
        held = tensor.per_tensor_scale
        scale = np.ones(1, np.float32) if held is None else _host(held.float()).reshape(1)
    return MXArray(_bytes(tensor.qdata), scales, (rows, length), 1, format=made, tensor_scale=scale)


# ---- compressed-tensors ----


def _compressed(
    module: Any, part: str, source: torch.Tensor, values: torch.Tensor
) -> tuple[NDArray[Any] | None, MXArray | None]:
    """Return the numbers before quantization and the bytes of the values that a layer multiplies."""
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    scheme = module.quantization_scheme
    args = scheme.input_activations if part == "input" else scheme.weights
    if args is None:
        return _numbers(values), None
    made = _compressed_format(args)
    tensor = getattr(module, f"{part}_global_scale", None)
    if args.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(
            value=source, args=args, module=module, global_scale=tensor
        )
    else:
        scale, zero = getattr(module, f"{part}_scale"), getattr(module, f"{part}_zero_point", None)
    levels = quantize(source, scale, zero, args, global_scale=tensor)
    again = dequantize(levels, scale, zero, args, dtype=values.dtype, global_scale=tensor)
    if not torch.equal(again, values):
        raise LayerError(
            f"the {part} that a layer of compressed-tensors multiplies is not the one that its scales give: "
            f"{int((again != values).sum())} of {values.numel()} values differ; is the layer compressed already?"
        )
    codes = _codes(levels, made)
    held = None if tensor is None else 1 / _host(tensor.float()).reshape(1)
    array = MXArray(codes, _scale_bytes(scale, made), tuple(values.shape), 1, format=made, tensor_scale=held)
    return _numbers(source), array


def _compressed_format(args: Any) -> BlockFormat:
    """Return the block format of quantization arguments."""
    for made in BLOCK_FORMATS.values():
        known = made in (MXFP4, MXFP8_E4M3, NVFP4)
        if (
            known
            and (args.num_bits, args.group_size) == (made.element.bits, made.k)
            and str(args.type).endswith("float")
        ):
            return made
    raise LayerError(
        f"a scheme of compressed-tensors with {args.num_bits} bits, type {args.type} and groups of {args.group_size} "
        "has no block format here: known are MXFP4, MXFP8 and NVFP4"
    )


def _codes(levels: torch.Tensor, made: BlockFormat) -> NDArray[np.uint8]:
    """Return the packed codes of values on the grid of the elements."""
    if made.element.bits == 8:
        return _bytes(levels.to(torch.float8_e4m3fn))
    magnitudes = np.array(made.element.values[:8], np.float32)
    values = _host(levels.float())
    codes = np.searchsorted(magnitudes, np.abs(values)).astype(np.uint8)
    return pack(codes | np.signbit(values).astype(np.uint8) << 3, made.element)


def _scale_bytes(scale: torch.Tensor, made: BlockFormat) -> NDArray[np.uint8]:
    """Return the bytes of scales that are stored as numbers."""
    if not made.scale.powers:
        return _bytes(scale.to(torch.float8_e4m3fn))
    mantissa, exponent = np.frexp(_host(scale.float()))
    if not (mantissa == 0.5).all():
        raise LayerError(
            f"scales of {made.title} are powers of two, and the layer has {float(scale.flatten()[0])}"
        )
    found: NDArray[np.uint8] = (exponent + 126).astype(np.uint8)
    return found
