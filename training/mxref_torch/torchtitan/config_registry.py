"""Configurations of torchtitan that train its Llama 3 by a recipe of mxref.

`torchtitan.train --module mxref_torch.torchtitan --config NAME` finds them here by their names.
"""

from __future__ import annotations

from torchtitan.config import CompileConfig
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from mxref_torch.torchtitan.job import MXLinearConverter


def llama3_debugmodel_mxfp4_h16() -> Trainer.Config:
    """Six layers of 256, for a test on one device."""
    return _by_recipe(llama3.llama3_debugmodel(), "debugmodel", "mxfp4_h16")


def llama3_8b_mxfp4_h16() -> Trainer.Config:
    """Llama 3.1 8B with MXFP4 in all three GEMMs and 16 x 16 Hadamard rotations, compiled per block."""
    return _by_recipe(llama3.llama3_8b(), "8B", "mxfp4_h16", compiled=True)


def llama3_8b_fp8() -> Trainer.Config:
    """The same model in tensor-scaled FP8, the baseline of a comparison."""
    return _by_recipe(llama3.llama3_8b(), "8B", "fp8", compiled=True)


def _by_recipe(config: Trainer.Config, flavor: str, recipe: str, compiled: bool = False) -> Trainer.Config:
    config.model_spec = model_registry(flavor, converters=[MXLinearConverter.Config(recipe=recipe)])
    config.training.disable_cuda_graphs = True
    if compiled:
        config.compile = CompileConfig(enable=True)
    # Under torchtitan's default, FSDP2 of PyTorch 2.13 shards no model over several ranks.
    config.parallelism.spmd_backend = "partial_dtensor"
    return config
