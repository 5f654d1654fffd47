"""torchtitan's trainer on a CPU, for tests: as a program it is `torchtitan.train` with a few of its functions replaced.

torchtitan 0.3 trains on accelerators alone. What keeps it from a CPU, and is replaced here: its choice of the device,
its memory monitor, a barrier that takes GPU numbers, a reduction that gloo has not, and FlexAttention, which PyTorch
differentiates on GPUs alone.
The two seconds that it waits at its end are left out too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# torchtitan reads the device's type once, when it is imported.
with patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    import torchtitan.tools.utils
import torchtitan.trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.components import metrics
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

from mxref_torch.torchtitan.job import handles

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>"]


class NoMemoryMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMemoryMonitor
torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
distributed_utils.set_pg_timeouts = lambda timeout, parallel_dims: None


def attend_on_a_cpu(model: Any) -> None:
    """Replace FlexAttention in a model's configuration."""
    for layer in model.layers:
        if isinstance(layer.attention.inner_attention, FlexAttention.Config):
            layer.attention.inner_attention = ScaledDotProductAttention.Config()


def write_assets(folder: Path) -> None:
    """Write a tokenizer of bytes and a text, at the paths that torchtitan's debug configurations name."""
    tokenizer, text = folder / "tests/assets/tokenizer", folder / "tests/assets/c4_test"
    for made in (tokenizer, text):
        made.mkdir(parents=True, exist_ok=True)
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_alone = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens(SPECIAL)
    bytes_alone.save(str(tokenizer / "tokenizer.json"))
    named = dict(zip(("bos_token", "eos_token"), SPECIAL, strict=True))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(named))
    lines = [json.dumps({"text": f"The number {i} is followed by {i + 1}. " * 4}) for i in range(200)]
    (text / "data.json").write_text("\n".join(lines))


def one_process() -> None:
    """Set what torchrun sets for a job of one process."""
    os.environ |= {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }


def sum_gradients(model: torch.nn.Module, divide: Any = fsdp.disable_fsdp_gradient_division) -> None:
    """Sum gradients over ranks without a factor in the reduction, which gloo has not."""
    divide(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = sum_gradients


class CpuTrainer(torchtitan.trainer.Trainer):
    """torchtitan's trainer, for a model whose attention runs on a CPU."""

    def __init__(self, config: Any) -> None:
        attend_on_a_cpu(config.model_spec.model)
        super().__init__(config)

    def close(self) -> None:
        """Leave each rank's step and FP8 scales in a file: what two ranks print may be mixed."""
        states = [handle.state_dict() for handle in handles(self.model_parts)]
        rank = torch.distributed.get_rank()
        Path(f"rank-{rank}.json").write_text(
            json.dumps([[s["step"], {name: t.tolist() for name, t in s["fp8"].items()}] for s in states])
        )
        super().close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torchtitan.trainer.Trainer.Config._owner = CpuTrainer
    write_assets(Path.cwd())
    from torchtitan.train import main

    sys.exit(main())
