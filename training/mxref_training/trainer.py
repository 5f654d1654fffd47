"""Training, from top to bottom: build, step, evaluate, log, save.

A run is deterministic, resumes to the bit, and is never silent about a value that is not finite.

A step is `EagerSteps.take` in `steps`, or the same operations as one CUDA graph:

1. The learning rate is set (`optim.learning_rate` has the schedules).
2. Each micro-batch runs forward, cross-entropy and backward. The linear layers quantize the operands of their GEMMs by
   the recipe (`mxref_torch`). Gradients add up, and ranks add theirs.
3. Gradients are clipped to a norm. Where loss or norm is not finite, the update is left out and the step is skipped.
4. AdamW updates the weights, which are float32, and FP8 layers take the scales of the next step.

Where an operand leaves the range of the backend's fast GEMM, steps 2 and 3 are done over with the wide one (`widened`).
A captured step is reported when the next has begun. `catch_up` waits for it, before a phase, an evaluation or a save.

A checkpoint holds what `RunState.snapshot` in `run_state` returns, in the files that `checkpoint` describes. Ranks
meet at the start and the end of a run, in a step (`distributed.share`: gradients, loss, norm and FP8 scales;
`distributed.ranks`: whether a value left its range), in an evaluation, when they agree on a signal, and in a save.
"""

from __future__ import annotations

from pathlib import Path

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.build import build
from mxref_training.config import TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.finite import require_finite, require_some_taken, require_trained
from mxref_training.interrupt import Interrupted, StopRequest
from mxref_training.log import RunLog, TrainResult, read_result
from mxref_training.observe import UNOBSERVED, Observation, profiling, shadowed
from mxref_training.open_run import OpenRun
from mxref_training.progress import ProgressSink
from mxref_training.start import begun
from mxref_training.steps import Taken


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
        observe: tracker and profile; of the first rank.
        ranks: which of the processes of the run this one is.

    Raises:
        ConfigError: something in the configuration does not fit, or a GEMM ran in another format than the recipe's.
        CheckpointError: the run in `out` is another one, is damaged or not finite, or cannot be written.
        DivergedError: a weight or a moment of the optimizer is not finite; the loss or a gradient was not finite for
            ten steps in a row, or in all steps; or the last validation loss is not finite.
        RunError: an exception that is none of mxref's, as of a backend; its traceback is in the run's `log.txt`.
        Interrupted: SIGINT, SIGTERM or SIGHUP came to any rank; a checkpoint was saved.
        PeerStopped: another rank raised one of these, or ended.
    """
    observe.require(config.run.steps)
    with begun(
        config,
        recipe,
        out,
        backend=backend,
        corpus=corpus,
        label=label,
        progress=progress,
        resume=resume,
        ranks=ranks,
    ) as run:
        stopped, last = "", min(config.run.steps, stop_after or config.run.steps)
        if run.step < last:
            stopped = TrainingRun(run, observe).go(last)
        # Another host may see what the first rank wrote late, so that rank alone reads it.
        result = ranks.broadcast(read_result(run.folder.path, stopped) if ranks.first else None)
        assert result is not None  # the first rank has said
        if run.finished:
            require_trained(run, result.final_loss, result.skipped_steps)
        return result


class TrainingRun:
    """A run in progress on one rank."""

    def __init__(self, run: OpenRun, observe: Observation) -> None:
        """Build model, optimizer, data and steps, in a checkpoint's state or the initial one; open the logs."""
        self.run, self.settings, self.ranks = run, run.config.run, run.ranks
        self.parts = build(run)
        run.training = True
        run.describe()
        self.log = RunLog(run, self.parts.phases, observe.track)
        self.profiled = observe.profile if run.ranks.first else None

    def go(self, last: int) -> str:
        """Train up to the step `last`; return the signal that asked to stop when that was the run's last one."""
        run, parts, settings = self.run, self.parts, self.settings
        run.sink.start(run.label, run.step, settings.steps, settings.step_tokens)
        if run.step:
            run.sink.note(f"resumed at step {run.step} of {settings.steps}")
        self.log.start_clock()
        try:
            with (
                shadowed(run, parts.model),
                profiling(self.profiled, run) as next_step,
                StopRequest() as request,
                parts.saver,
            ):
                while run.step < last:
                    if phase := parts.phases.begins(run.step):
                        self._report(parts.steps.catch_up())
                        parts.steps.check_next()
                        run.sink.note(f"step {run.step + 1} begins the phase {phase}")
                    taken = parts.steps.take(parts.loader.next_batch(settings.batch), run.step)
                    run.step += 1
                    self._report(taken)  # of the step before, where steps are captured
                    next_step()
                    if run.step % settings.eval_every == 0 or run.step == settings.steps:
                        self._evaluate()
                    parts.saver.poll()
                    stop = request.agreed(self.ranks)
                    due = settings.checkpoint_every and run.step % settings.checkpoint_every == 0
                    if due or stop or run.step == last:
                        self._save()
                    if stop and run.step < settings.steps:
                        parts.saver.wait()
                        raise Interrupted(
                            f"{stop} after step {run.step} of {settings.steps}: saved in {run.folder.path}; "
                            "the same command goes on from there"
                        )
            return request.signal
        finally:
            parts.steps.close()
            self.log.close()

    def _report(self, taken: Taken | None) -> None:
        """Log a step that has ended, if there is one, and stop where too many were skipped in a row."""
        if taken is None:
            return
        run = self.run
        run.skipped_in_a_row = run.skipped_in_a_row + 1 if taken.problem else 0
        self.log.add_step(taken)
        if taken.problem:
            self._require_finite()  # skipping more steps would not bring the model back
            require_some_taken(run, f"{taken.problem} at step {taken.step + 1}")

    def _evaluate(self) -> None:
        """Evaluate the model and log its loss."""
        self._report(self.parts.steps.catch_up())
        self.log.start_clock()
        self.log.add_evaluation(self.run.step, *self.parts.evaluator())
        self._require_finite()
        self.log.start_clock()

    def _save(self) -> None:
        """Save a checkpoint, at once or in the background."""
        self._report(self.parts.steps.catch_up())
        self._require_finite()
        run, parts = self.run, self.parts
        facts = {
            "skipped_in_a_row": run.skipped_in_a_row,
            "logs": self.log.lengths(),
            "identity": run.identity,
        }
        parts.saver.save(parts.state.snapshot(run.step, facts))
        self.log.start_clock()

    def _require_finite(self) -> None:
        require_finite(self.run, self.parts.state.tensors())
