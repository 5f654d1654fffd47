"""The linear layers in torchtitan: a converter of torchtitan's kind, and configurations that train its Llama 3.

`MXLinearConverter.Config(recipe=...)` goes into the list `converters` of torchtitan's `model_registry`. The layers
then follow torchtitan's optimizers, and its checkpoints hold their place in training. Nothing else imports this
package: it needs torchtitan 0.3, which `pip install 'mxref[torchtitan]'` installs.
"""

from mxref_torch.torchtitan.job import ModuleMXLinear, MXCheckpointManager, MXLinearConverter, follow

__all__ = ["MXCheckpointManager", "MXLinearConverter", "ModuleMXLinear", "follow"]
