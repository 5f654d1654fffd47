"""What comes before and after the steps of a run: checks, the locked folder, fixed numerics, and how errors end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.agreement import require_agreement, require_same_draws, require_shared
from mxref_training.config import TrainConfig
from mxref_training.data import corpus as tokens
from mxref_training.device import device_name, known_errors
from mxref_training.distributed.ranks import Ranks, restarted
from mxref_training.distributed.share import layout_identity
from mxref_training.errors import CheckpointError, start_over
from mxref_training.failures import explained
from mxref_training.forecast import less_memory
from mxref_training.identity import changed_environment, identity
from mxref_training.log import open_logs
from mxref_training.numerics import fixed_numerics
from mxref_training.open_run import OpenRun
from mxref_training.preflight import preflight
from mxref_training.progress import ProgressSink, default_progress, reporting
from mxref_training.run_folder import LEASE, RunFolder


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

    Within the block numerics are fixed, and an exception that is none of mxref's ends in RunError on all ranks.
    """
    with (
        ranks.one_error(),
        reporting((progress or default_progress()) if ranks.first else ProgressSink()) as sink,
    ):
        device = preflight(config, recipe, backend, ranks=ranks)
        if corpus is None:
            with ranks.first_alone("prepares the data"):
                corpus = tokens.prepare_corpus(config)
            sink.note(corpus.report)
        tokens.check_lengths(config, corpus)
        corpus.tokenizer.check_vocab(config.model.vocab)
        folder = RunFolder(Path(out), config.run.keep, ranks)
        run = OpenRun(config, recipe, backend, device, corpus, folder, ranks, {}, label, sink)

        def when() -> str:
            return (
                f"after {run.step} of {config.run.steps} steps" if run.training else "before its first step"
            )

        def way_on() -> str:
            saved = folder.store.latest()
            return (
                f"the same command goes on from step {saved}" if saved else "the same command starts it again"
            )

        with (
            fixed_numerics(config, backend, device),
            folder.alone(LEASE if restarted() else 0.0) if ranks.first else nullcontext(),
            explained(folder.log, when, way_on),
            ranks.one_error(),
            known_errors(less_memory(config)),
        ):
            run.identity = identity(config, recipe, backend, corpus) | layout_identity(config, ranks.world)
            require_agreement(ranks, folder.path, run.identity)
            if ranks.first and not resume:
                folder.clear()
            run.exists, run.step = ranks.broadcast(_found(run) if ranks.first else (False, 0))
            if run.exists:
                require_shared(folder.path / "run.json", ranks)
            if run.step > config.run.steps:
                raise CheckpointError(
                    f"the run in {out} is at step {run.step} already, beyond run.steps = {config.run.steps}; "
                    f"choose another --out, or {start_over(folder.path)}"
                )
            if run.finished:
                run.sink.note(f"{folder.path} is finished: {run.step} steps")
                if ranks.first:
                    for log in open_logs(folder.path, folder.store.state(run.step)["logs"]).values():
                        log.close()
                    folder.store.settle(run.step)
                run.describe()
            elif not run.step and config.run.init_from is None:
                require_same_draws(ranks)
            yield run


def _found(run: OpenRun) -> tuple[bool, int]:
    """Return whether the folder holds the wanted run, and the step of its newest checkpoint, 0 if there is none.

    Raises:
        CheckpointError: the folder holds another run, or a part of this one is missing.
    """
    folder = run.folder
    record = folder.record()
    if record is None:
        return False, 0
    folder.require(run.identity, record["identity"])
    folder.require_checkpoints()
    if changed := changed_environment(record, device_name(run.device)):
        run.sink.note(f"not the machine that began this run, so bits may differ: {', '.join(changed)}")
    step = folder.store.latest()
    if step is None:
        run.sink.note(f"no checkpoint in {folder.store.folder}: starts at step 0")
    return True, step or 0
