"""The training loop: deterministic, resumable to the bit, and never silent about a value that is not finite."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import mxref_torch
from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref_training.config import Compile, TrainConfig
from mxref_training.data.corpus import TokenCorpus, check_lengths, prepare_corpus
from mxref_training.distributed.ranks import SOLE, Ranks, restarted
from mxref_training.distributed.share import layout_identity
from mxref_training.errors import CheckpointError, ConfigError, DivergedError, start_over
from mxref_training.run.assembly import Assembly
from mxref_training.run.begun import begun_run
from mxref_training.run.device import device_name, made_current, memory_errors
from mxref_training.run.evaluate import Evaluation, evaluate
from mxref_training.run.failure import Failures
from mxref_training.run.finite import require_finite, require_finite_loss, way_out
from mxref_training.run.folder import LEASE, RunFolder
from mxref_training.run.identity import identity, run_facts
from mxref_training.run.interrupt import Interrupted, StopRequest
from mxref_training.run.journal import Journal
from mxref_training.run.memory import less_memory
from mxref_training.run.observe import UNOBSERVED, Observation, Observer
from mxref_training.run.optim import learning_rate, set_learning_rate
from mxref_training.run.outcome import TrainResult, outcome
from mxref_training.run.preflight import preflight
from mxref_training.run.progress import ProgressSink, SilentProgress, default_progress, reporting
from mxref_training.run.repeatable import compiler_threads, deterministic, deterministic_errors, fixed_choices
from mxref_training.run.same_software import require_same_draws, require_same_software
from mxref_training.run.shared_folder import require_shared
from mxref_training.run.silent import SilentJournal, SilentObserver
from mxref_training.run.stepping import Taken

__all__ = ["Interrupted", "TokenCorpus", "TrainResult", "prepare_corpus", "train"]

MAX_SKIPPED = 10
"""Steps in a row that may be skipped before the run counts as diverged."""


def train(
    config: TrainConfig,
    recipe: Recipe,
    out: Path,
    *,
    backend: Backend,
    corpus: TokenCorpus | None = None,
    label: str = "",
    progress: ProgressSink | None = None,
    resume: bool = True,
    stop_after: int | None = None,
    observe: Observation = UNOBSERVED,
    ranks: Ranks = SOLE,
) -> TrainResult:
    """Train a Llama from its initial weights, or from the latest checkpoint in `out`.

    Several ranks, which are connected, each call this with the same arguments. The first writes the files of the run.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        out: folder of the run, made where it does not exist.
        backend: computes the block formats.
        corpus: tokens; made from `config.data` where they are not given.
        label: name of the run in progress reports.
        progress: where to report to; default the terminal, or lines on standard error.
        resume: go on with the run in `out`; False deletes that run first.
        stop_after: stop after this optimizer step as if the process ended there, with a checkpoint.
        observe: trackers and profile; of the first rank.
        ranks: which of the processes of the run this one is.

    Raises:
        ConfigError: something in the configuration does not fit, or a GEMM ran in another format than the recipe's.
        CheckpointError: the run in `out` is another one, is damaged or not finite, or cannot be written.
        DivergedError: a weight or a moment of the optimizer is not finite; the loss or a gradient was not finite for
            `MAX_SKIPPED` steps in a row; or the last validation loss is not finite.
        RunError: an exception that is none of mxref's, as of a backend; its traceback is in the run's `log.txt`.
        Interrupted: SIGINT, SIGTERM or SIGHUP came to any rank; a checkpoint was saved.
        PeerStopped: another rank raised one of these, or ended.
    """
    observe.require(config)
    device = preflight(config, recipe, backend, ranks=ranks)
    corpus = corpus or prepare_corpus(config)
    check_lengths(config, corpus)
    corpus.tokenizer.check_vocab(config.model.vocab)
    folder = RunFolder(Path(out), config.run.keep, ranks)
    with (
        ranks.one_error(),
        made_current(device),
        deterministic(device, config.run.threads, compiled=config.run.compile is not Compile.NONE),
        compiler_threads(config),
        fixed_choices(config, backend, device),
        reporting((progress or default_progress()) if ranks.first else SilentProgress()) as sink,
        folder.alone(LEASE if restarted() else 0.0) if ranks.first else nullcontext(),
        Failures(folder, backend, config.run.steps).explained() as failures,
        ranks.one_error(),
        memory_errors(less_memory(config)),
        deterministic_errors(device),
    ):
        wanted = identity(config, recipe, backend, corpus) | layout_identity(config, ranks.world)
        require_same_software(ranks)
        ranks.agree("what determines the run's numbers", wanted)
        begun: tuple[bool, int] | None = None
        if ranks.first:
            if not resume:
                folder.clear()
            begun = begun_run(folder, wanted, device_name(device), sink.note)
        begun = ranks.broadcast(begun)
        assert begun is not None  # the first rank has said
        exists, step = begun
        if exists:
            require_shared(folder.path / "run.json", ranks)
        stopped = ""
        if step > config.run.steps:
            raise CheckpointError(
                f"the run in {out} is at step {step} already, beyond run.steps = {config.run.steps}; "
                f"choose another --out, or {start_over(folder.path)}"
            )
        if step == config.run.steps:
            sink.note(f"{folder.path} is finished: {step} steps")
            if ranks.first:
                folder.verify_logs(step)
                folder.store.settle(step)
                folder.describe(config, recipe)
        elif stop_after is None or step < stop_after:
            if not step and config.run.init_from is None:
                require_same_draws(ranks)
            run = _Run(config, recipe, folder, backend, device, corpus, wanted, sink, ranks)
            run.begin(step)
            failures.run = run
            if ranks.first:
                if not exists:
                    folder.create(
                        recipe, corpus, device_name(device), run_facts(config, label, wanted, backend)
                    )
                folder.describe(config, recipe)
            if not exists:
                require_shared(folder.path / "run.json", ranks)
            with run.shadowed():
                stopped = run.go(min(config.run.steps, stop_after or config.run.steps), label, observe)
            step = run.step
        # Another host may see what the first rank wrote late, so that rank alone reads it.
        result = ranks.broadcast(outcome(folder, config) if ranks.first else None)
        assert result is not None  # the first rank has said
        if step == config.run.steps:
            require_finite_loss(result, config, folder)
        return replace(result, stopped=stopped)


class _Run(Assembly):
    """A run in progress: its steps, and what is logged, evaluated and saved between them."""

    @contextmanager
    def shadowed(self) -> Iterator[None]:
        """Have the reference repeat the share `run.shadow` of the block's operations; say what was compared."""
        share = self.config.run.shadow
        if not share:
            yield
            return
        if all(own.kind(role) != "block" for own in self.recipe.treatments() for role in GemmRole):
            raise ConfigError(
                f"run.shadow = {share}, but the recipe has no block format to compare: set run.shadow = 0"
            )
        file = self.folder.path / "shadow.npz"
        with mxref_torch.shadow(self.model, share, file=file, seed=self.config.run.seed) as watch:
            yield
            self.sink.note(str(watch))

    def go(self, last: int, label: str, observe: Observation) -> str:
        """Train up to the step `last`; return the signal that asked to stop when that was the run's last one."""
        run = self.config.run
        self.journal: Journal | SilentJournal = SilentJournal()
        self.observer: Observer | SilentObserver = SilentObserver()
        try:
            if self.ranks.first:
                self.journal = Journal(self.config, self.folder, self.schedule, self.sink, self.marks)
                watched = self.config, self.recipe, self.folder, self.model, self.context
                self.observer = Observer(observe, *watched, self.sink, self.step, self.marks.get("telemetry"))
            self.sink.start(label, self.step, run.steps, run.step_tokens)
            if self.step:
                self.sink.note(f"resumed at step {self.step} of {run.steps}")
            self.journal.start_clock()
            with StopRequest() as request, self.saver:
                while self.step < last:
                    with self.observer.step(self.step + 1):
                        self._train_step()
                    if self.step % run.eval_every == 0 or self.step == run.steps:
                        self._catch_up()
                        self._validate()
                    self.saver.poll()
                    stop = request.agreed(self.ranks)
                    due = run.checkpoint_every and self.step % run.checkpoint_every == 0
                    if due or stop or self.step == last:
                        self._catch_up()
                        self._save()
                    if stop and self.step < run.steps:
                        self.saver.wait()
                        raise Interrupted(
                            f"{stop} after step {self.step} of {run.steps}: saved in {self.folder.path}; "
                            "the same command goes on from there"
                        )
            return request.signal
        finally:
            if self.captured is not None:
                self.captured.close()
            self.journal.close()
            self.observer.close()

    def _train_step(self) -> None:
        """Take a step, or start one and report the one before it."""
        run = self.config.run
        lr = learning_rate(self.config.optim, self.step, run.steps)
        set_learning_rate(self.optimizer, lr)
        if phase := self.schedule.begins(self.step):
            self._catch_up()
            self.first.expect()
            self.sink.note(f"step {self.step + 1} begins the phase {phase}")
        batch = self.loader.next_batch(run.batch)
        self.first.count_anew()
        if self.captured is None:
            taken: Taken | None = self.eager.take(batch, self.step, lr, self.observer)
        else:
            taken = self.captured.start(batch, self.step, lr)
            self.first.check(self.step)
        self.step += 1
        self._report(taken)

    def _catch_up(self) -> None:
        """Report the step that was started last, unless it was."""
        if self.captured is not None:
            self._report(self.captured.finish())

    def _report(self, taken: Taken | None) -> None:
        """Log a step, if there is one, and stop where too many were skipped in a row."""
        if taken is None:
            return
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if taken.problem else 0
        self.journal.add_step(taken, self.observer)
        if taken.problem:
            self._require_finite()  # skipping more steps would not bring the model back
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise DivergedError(
                f"{taken.problem} at step {taken.step + 1}, the {MAX_SKIPPED}th step in a row to be skipped: "
                f"{way_out(self.config)}"
            )

    def _validate(self) -> None:
        began = time.perf_counter()
        found = self._evaluation() if self.captured_evaluation is None else self.captured_evaluation()
        widened = self.ranks.any(self.backend.range_exceeded())
        if widened:
            mxref_torch.restart(self.model)
            with self.backend.widened():
                found = self._evaluation()
        mxref_torch.restart(self.model)
        seconds = time.perf_counter() - began
        self.journal.add_evaluation(self.step, found, widened, seconds, self.observer)
        self._require_finite()
        self.journal.start_clock()

    def _evaluation(self) -> Evaluation:
        found = evaluate(self.model, self.context, self.corpus.val.ids, **self.evaluated)
        self.eager.free()
        return found

    def _require_finite(self) -> None:
        require_finite(self.state.tensors(), self.step, self.config, self.folder.store, self.ranks)

    def _save(self) -> None:
        self._require_finite()
        facts = {
            "skipped_in_a_row": self.skipped_in_a_row,
            "logs": self.journal.marks() | self.observer.marks(),
            "identity": self.identity,
        }
        self.saver.save(self.state.snapshot(self.step, facts))
        self.journal.start_clock()
