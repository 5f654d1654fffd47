"""What comes before and after the steps of a run: checks, the locked folder, fixed numerics, and how errors end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.config import TrainConfig
from mxref_training.data import corpus as tokens
from mxref_training.device import fixed_numerics, keep_freed_memory
from mxref_training.distributed.ranks import Ranks
from mxref_training.failures import run_errors
from mxref_training.open_run import OpenRun
from mxref_training.preflight import preflight
from mxref_training.progress import ProgressSink, default_progress, reporting
from mxref_training.run_folder import RunFolder


@contextmanager
def begun(
    config: TrainConfig,
    recipe: Recipe,
    out: Path,
    *,
    backend: Backend,
    corpus: tokens.TokenCorpus | None,
    label: str,
    progress: ProgressSink | None,
    resume: bool,
    ranks: Ranks,
) -> Iterator[OpenRun]:
    """Yield a run that was checked and whose folder is locked; nothing of it is allocated. Arguments as of `train`.

    Within the block numerics are fixed, and an exception that is none of mxref's ends in RunError.
    """
    with (
        reporting((progress or default_progress()) if ranks.first else ProgressSink()) as sink,
    ):
        device = preflight(config, recipe, backend, ranks=ranks)
        if device.type == "cpu":
            keep_freed_memory()
        if corpus is None:
            with ranks.first_alone():
                corpus = tokens.prepare_corpus(config)
            sink.note(corpus.report)
        tokens.check_lengths(config, corpus)
        corpus.tokenizer.check_vocab(config.model.vocab)
        folder = RunFolder(Path(out), config.run.keep, ranks)
        run = OpenRun(config, recipe, backend, device, corpus, folder, ranks, label, sink)
        with (
            fixed_numerics(config, backend, device),
            folder.alone() if ranks.first else nullcontext(),
            run_errors(run),
        ):
            run.agree()
            if ranks.first and not resume:
                folder.clear()
            run.find()
            if run.finished:
                run.settle()
            yield run
