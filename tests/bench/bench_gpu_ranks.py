"""Time whole optimizer steps on many GPUs, and record their losses.

    PYTHONPATH=.:backends:training:tests torchrun --nproc-per-node 2 -m bench.bench_gpu_ranks --model llama-1b \
        --recipe bf16@block --recipe fp8@block+captured [--sequences 8] [--batch 16] [--json FILE]

Each row trains a model with random weights on random tokens as `mxref train` trains it, with deterministic kernels:
one process alone if `torchrun` did not start it, else ranks that split weights and batches by FSDP2, or with
`+replicas` each hold the whole model. With `+kept` split weights stay gathered until the backward pass.
With `+captured` a step is one CUDA graph, and steps are not waited for.
One more step runs under the profiler. It tells how long only NCCL's kernels ran, and how long none did.
Every rank has `--sequences` sequences in each forward pass, so without `--batch` the work of a rank is always the same.
With `--batch` the work of all ranks is, and losses can be compared; `--drawn` gives weights that do not depend on the
ranks, and sets `run.deterministic`. Without it a compiler chooses kernels by their time, as `mxref train` lets it, and
two processes may have losses with other last bits. `--json` adds the rows to those that the file has.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import mxref
import mxref_torch
from bench.bench_gpu_step import find, gpu_time, machine, wait
from bench.spans import kernels_of, shares
from bench.step import config_of, with_run
from mxref_training.config import Compile, ParallelConfig, Recompute, TrainConfig
from mxref_training.device import choose_device, deterministic, fixed_choices, made_current
from mxref_training.distributed import sharded
from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.failing import one_error
from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.sharded import own_part
from mxref_training.distributed.share import Share
from mxref_training.errors import DivergedError
from mxref_training.layout import check_layout
from mxref_training.model.llama import Llama, flops_per_token, parameter_count
from mxref_training.model.loss import compiled_loss
from mxref_training.optim import make_optimizer
from mxref_training.steps import CapturedSteps, EagerSteps, Steps, Taken

WARM_UP = 2
"""Steps that compile, and fill caches, before any is timed."""
CAPTURES = 2
"""Steps more where a graph is made, of which the first captures it."""

Row = dict[str, Any]


class Training:
    """A model in training on this rank."""

    def __init__(
        self, config: TrainConfig, recipe: mxref.Recipe, backend: mxref.Backend, device: torch.device, ranks: Ranks,
        drawn: bool,
    ) -> None:  # fmt: skip
        self.config, self.device, self.ranks = config, device, ranks
        self.share = Share(ranks, check_layout(config, ranks.world))
        split = not self.share.axes.whole
        self.model = Llama(config.model, device="meta")
        if not split:
            self.model.to_empty(device=device)
            self.model.tie()
        context = mxref_torch.convert(
            self.model, recipe, backend=backend, seed=config.run.seed, steps=config.run.steps
        ).context
        self.model.model.recompute = config.run.recompute
        torch._dynamo.reset()
        compiled = compiled_loss(self.model, config.run.compile)
        if split:
            sharded.shard(
                self.model, sharded.make_mesh(device, self.share.axes), device,
                keep_gathered=bool(config.parallel and config.parallel.keep_gathered),
            )  # fmt: skip
        self._fill(drawn)
        self.optimizer = make_optimizer(self.model, config.optim)
        kind = CapturedSteps if config.run.capture else EagerSteps
        self.steps: Steps = kind(self.model, context, self.optimizer, config, recipe, compiled, self.share)
        self.generator = torch.Generator().manual_seed(0)
        self.number = 0
        self.losses: list[float] = []
        self.repeated = 0

    def _fill(self, drawn: bool) -> None:
        """Draw the weights as training does, or on the device, where it takes no minutes."""
        if drawn:
            self.model.reset_parameters(self.config.run.seed)
            return
        self.model.model.rotary_emb.fill()
        seed = 0 if self.share.axes.whole else self.ranks.rank
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                own = own_part(parameter)
                own.normal_(0, 0.02, generator=generator) if parameter.ndim > 1 else own.fill_(1)

    def start(self) -> None:
        """Take a step, or start one and look at the one before it."""
        run, number = self.config.run, self.number
        tokens = torch.randint(
            self.config.model.vocab, (run.batch, run.seq_len + 1), generator=self.generator
        )
        inputs, targets = (np.ascontiguousarray(s.numpy()) for s in (tokens[:, :-1], tokens[:, 1:]))
        self.number += 1
        self._note(self.steps.take((inputs, targets), number))

    def finish(self) -> None:
        """Wait for all steps that were started."""
        self._note(self.steps.catch_up())
        wait(self.device)

    def _note(self, taken: Taken | None) -> None:
        if taken is None:
            return
        if taken.problem:
            raise DivergedError(f"step {taken.step}: {taken.problem}")
        self.losses.append(taken.loss)
        self.repeated += taken.widened

    def timed(self, count: int) -> list[float]:
        """Return the milliseconds of so many steps: of each, or where none is waited for the mean alone."""
        times = []
        for steps in [count] if self.config.run.capture else [1] * count:
            self.finish()
            began = time.perf_counter()
            for _ in range(steps):
                self.start()
            self.finish()
            times.append(1e3 * (time.perf_counter() - began) / steps)
        return times

    def close(self) -> None:
        """Free the graph: NCCL ends no connection that a graph uses."""
        self.steps.close()

    def weights(self) -> str:
        """Return the SHA-256 of all weights; collective."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().cpu().numpy().tobytes())
        return digest.hexdigest()


def row_of(training: Training, count: int, hashed: bool) -> Row:
    """Return the medians of so many steps after the warm-up; those of the slowest rank and the fullest memory."""
    ranks, run, on_gpu = training.ranks, training.config.run, training.device.type == "cuda"
    began = time.perf_counter()
    for _ in range(WARM_UP + CAPTURES * run.capture):
        training.start()
    training.finish()
    warm_up = time.perf_counter() - began
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(training.device)
    times = training.timed(count)
    peak = 0.0
    if on_gpu:
        # What a graph uses is reserved, and PyTorch counts none of it as allocated.
        used = torch.cuda.max_memory_reserved if run.capture else torch.cuda.max_memory_allocated
        peak = used(training.device) / 2**30
    found = ranks.gather_numbers([statistics.median(times), min(times), peak, warm_up])
    ms, fastest, peak, warm_up = (max(column) for column in zip(*found, strict=True))
    rate = 1e3 * run.step_tokens / ms
    row: Row = {
        "ranks": ranks.world,
        "layout": training.share.axes._asdict(),
        "compile": run.compile.value,
        "recompute": run.recompute.value,
        "captured": run.capture,
        "deterministic": run.deterministic,
        "kept": bool(training.config.parallel and training.config.parallel.keep_gathered),
    }
    row |= {
        "batch": run.batch,
        "sequences": training.share.sequences(run),
        "micro_batches": run.micro_batches,
    }
    row |= {"ms": ms, "fastest_ms": fastest, "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / ranks.world}
    flops = flops_per_token(training.config.model, run.seq_len)
    row |= {"tflops_per_gpu": rate / ranks.world * flops / 1e12, "peak_gib": peak, "warm_up_s": warm_up}
    row |= {"repeated": training.repeated, "losses": training.losses}
    if on_gpu:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            training.timed(1)
        work = gpu_time(profiler.key_averages())
        row |= {key: work[key] for key in ("kernel_ms", "launches", "kernels")}
        row["nccl_ms"] = sum(kernel["ms"] for kernel in work["kernels"] if "nccl" in kernel["name"].lower())
        row |= {f"{name}_ms": ms for name, ms in shares(kernels_of(profiler.events())).items()}
    if hashed:
        row["weights"] = training.weights()
    return row


def text_of(row: Row) -> str:
    """Return a row in one line."""
    text = (
        f"{row['recipe']} {way_of(row)} x {row['ranks']}: {row['ms']:.1f} ms, {row['tokens_per_s_per_gpu']:,.0f} "
        f"tokens/s per GPU, {row['tflops_per_gpu']:.0f} TFLOP/s, {row['peak_gib']:.1f} GiB, warm-up "
        f"{row['warm_up_s']:.0f} s, last loss {row['losses'][-1]!r} {row.get('weights', '')[:12]}"
    )
    if "nccl_ms" in row:
        text += (
            f"\n    {row['launches']} kernels of {row['kernel_ms']:.0f} ms, of these NCCL {row['nccl_ms']:.0f} ms; "
            f"NCCL alone {row['nccl_alone_ms']:.1f} ms, none {row['idle_ms']:.1f} ms: {diagnosis(row)}"
        )
    return text


def way_of(row: Row) -> str:
    """Return how a row's steps were run, as the command names it."""
    layout = row["layout"]
    replicas = row["ranks"] > 1 and layout["shard"] == layout["tensor"] == 1
    ways = {"captured": row.get("captured"), "replicas": replicas, "kept": row.get("kept")}
    return "+".join([row["compile"], *(way for way, is_so in ways.items() if is_so)])


def diagnosis(row: Row) -> str:
    """Return what a step lost most time to, other than to its own kernels."""
    lost = {
        "the GPU waits for Python": row["idle_ms"],
        "communication that nothing hides": row["nccl_alone_ms"],
    }
    longest = max(lost, key=lambda what: lost[what])
    if lost[longest] < 0.02 * row["ms"]:
        return "the GPU computes"
    return f"{longest} for {lost[longest] / row['ms']:.0%} of the step"


@click.command(help=__doc__)
@click.option("--model", default="llama-1b", show_default=True, help="As for bench_gpu_step, or a preset.")
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    default=("bf16@block",),
    help="NAME[:PROFILE][@COMPILE[+captured][+replicas|+kept]]",
)
@click.option("--layers", type=click.IntRange(1), help="Layers of the model.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a sequence.")
@click.option("--sequences", default=1, type=click.IntRange(1), help="Of each rank and forward pass.")
@click.option("--batch", type=click.IntRange(1), help="Sequences of all ranks in a step.")
@click.option("--replicate", default=1, type=click.IntRange(1), help="Groups that each hold all weights.")
@click.option("--tensor", default=1, type=click.IntRange(1), help="Ranks that compute a layer together.")
@click.option(
    "--recompute", default="none", show_default=True, type=click.Choice([how.value for how in Recompute])
)
@click.option("--clip", type=float, help="optim.clip; 0: never.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Steps that are timed.")
@click.option(
    "--drawn", is_flag=True, help="Weights as training draws them, run.deterministic, and the weights' hash."
)
@click.option("--backend", "backend_name", default="triton", show_default=True)
@click.option("--label", default="", help="What the rows are for.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Add the rows here.")
def main(
    model: str, recipes: tuple[str, ...], layers: int | None, seq_len: int | None, sequences: int, batch: int | None,
    replicate: int, tensor: int, recompute: str, clip: float | None, steps: int, drawn: bool, backend_name: str,
    label: str, out: Path | None,
) -> None:  # fmt: skip
    ranks = started_ranks()
    data = ranks.world // tensor
    config = config_of(model)
    config = replace(
        with_run(
            config, micro_batch=sequences * data, batch=batch or sequences * data, seq_len=seq_len,
            eval_tokens=seq_len, capture=False, recompute=Recompute(recompute),
        ),
        model=replace(config.model, layers=layers or config.model.layers),
        optim=replace(config.optim, clip=config.optim.clip if clip is None else clip),
        parallel=(parallel := ParallelConfig(replicate, shard=0, tensor=tensor)),
    )  # fmt: skip
    backend = mxref.get_backend(backend_name)
    device = choose_device("auto", backend, ranks)
    rows: list[Row] = []
    with connected(ranks), one_error(ranks), made_current(device), deterministic(device, threads=0):
        for text in recipes:
            name, _, ways = text.partition("@")
            compiled, *more = ways.split("+")
            if unknown := set(more) - {"captured", "replicas", "kept"}:
                raise click.BadParameter(f"{text}: {min(unknown)} is neither captured nor replicas nor kept")
            chosen = with_run(
                config, compile=Compile(compiled or "none"), capture="captured" in more, deterministic=drawn
            )
            if "replicas" in more:
                chosen = replace(chosen, parallel=ParallelConfig(ranks.world, shard=1))
            if "kept" in more:
                chosen = replace(chosen, parallel=replace(parallel, keep_gathered=True))
            with fixed_choices(chosen, backend, device):
                training = Training(chosen, find(name), backend, device, ranks, drawn)
                try:
                    row = {"label": label, "model": model, "recipe": name} | row_of(training, steps, drawn)
                finally:
                    training.close()
            row["shape"] = shape_of(chosen)
            rows.append(row)
            del training
            gc.collect()  # the model, before the next is made
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if ranks.first:
                print(text_of(row), flush=True)
                if out:
                    keep(out, row, device)


def shape_of(config: TrainConfig) -> Row:
    """Return the sizes of a model."""
    names = ("layers", "width", "heads", "kv_heads", "ffn", "vocab")
    sizes: Row = {name: getattr(config.model, name) for name in names}
    return sizes | {"parameters": parameter_count(config.model), "seq_len": config.run.seq_len}


def keep(out: Path, row: Row, device: torch.device) -> None:
    """Add a row to a file of rows, made where it does not exist."""
    record: Row = {"machine": machine(device), "ranks": []}
    if out.exists():
        record = json.loads(out.read_text(encoding="utf-8"))
    record["ranks"].append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
