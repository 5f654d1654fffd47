"""The linear layers in torchtitan: a converter of torchtitan's kind, and configurations that train its Llama 3.

`MXLinearConverter.Config(recipe=...)` goes into the list `converters` of torchtitan's `model_registry`. The layers
then follow torchtitan's optimizers, and its checkpoints hold their place in training. Nothing else imports this
package: it needs torchtitan 0.3.
"""

from mxref_torch.errors import MissingPackageError

try:
    import torchtitan.components.quantization  # noqa: F401 -- the part of torchtitan that a converter extends
except ImportError as err:
    raise MissingPackageError(
        f"mxref_torch.torchtitan needs torchtitan 0.3, and importing it fails: {err}; "
        "pip install 'mxref[torchtitan]'"
    ) from err

from mxref_torch.torchtitan.converter import ModuleMXLinear, MXLinearConverter
from mxref_torch.torchtitan.job import MXCheckpointManager, follow

__all__ = ["MXCheckpointManager", "MXLinearConverter", "ModuleMXLinear", "follow"]
