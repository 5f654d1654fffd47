"""Linear layers whose three GEMMs run in microscaled formats, for any PyTorch model.

`convert(model, recipe)` replaces the `torch.nn.Linear` modules and returns a `Handle`, which follows the optimizer.
`recipe` changes the recipe of a region, `CapturedStep` runs a step as a CUDA graph, `telemetry` measures, and `shadow`,
`record`, `record_operands`, `find_nonfinite` and the two checks guard a run.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "mxref_torch needs PyTorch, which is not installed: pip install 'mxref[training]'", name="torch"
    )

from mxref_torch.captured.operations import StepOutcome
from mxref_torch.captured.step import CapturedStep
from mxref_torch.checks.census import check_census, expected_census
from mxref_torch.checks.finite import find_nonfinite
from mxref_torch.checks.measures import telemetry
from mxref_torch.checks.operands import record_operands
from mxref_torch.checks.stochastic import check_stochastic_rounding
from mxref_torch.checks.watching import record, shadow
from mxref_torch.conversion.convert import convert, recipe, weights_held
from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError, ShadowError, StepError
from mxref_torch.layer.linear import MXLinear, sole_uses
from mxref_torch.optimizer_step import advance, restart
from mxref_torch.step_context import StepContext

__all__ = [
    "CapturedStep",
    "Handle",
    "LayerError",
    "MXLinear",
    "ShadowError",
    "StepContext",
    "StepError",
    "StepOutcome",
    "advance",
    "check_census",
    "check_stochastic_rounding",
    "convert",
    "expected_census",
    "find_nonfinite",
    "recipe",
    "record",
    "record_operands",
    "restart",
    "shadow",
    "sole_uses",
    "telemetry",
    "weights_held",
]
