"""onnx: its reference evaluator runs the operator Cast, and DequantizeLinear in blocks."""

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from peers.peer import Decoder, Peer


def evaluate(operator, inputs, **attributes):
    """The output of one operator; `inputs` are arrays of types that ONNX has."""
    names = [f"x{i}" for i in range(len(inputs))]
    node = helper.make_node(operator, names, ["y"], **attributes)
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, inputs, strict=True)
    ]
    output = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    model = helper.make_model(
        helper.make_graph([node], "one", typed, [output]), opset_imports=[helper.make_opsetid("", 25)]
    )
    return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0]


def cast(to, **attributes):
    return lambda v: evaluate("Cast", [v], to=to, **attributes).view(np.uint8)


def decode(scales):
    codes = np.full((len(scales), 32), 7, np.uint8).view(ml_dtypes.float4_e2m1fn)
    e8m0 = scales[:, None].view(ml_dtypes.float8_e8m0fnu)
    with np.errstate(over="ignore"):
        values = evaluate(
            "DequantizeLinear", [codes, e8m0], axis=1, block_size=32, output_dtype=TensorProto.FLOAT
        )
    return values[:, 0]


PEER = Peer(
    "onnx",
    elements={"onnx Cast": cast(TensorProto.FLOAT4E2M1, saturate=1, round_mode="nearest")},
    casts={
        f"onnx Cast {mode}": cast(TensorProto.FLOAT8E8M0, saturate=1, round_mode=mode)
        for mode in ("nearest", "up", "down")
    },
    decoders={"onnx DequantizeLinear": Decoder("float32", decode)},
)
