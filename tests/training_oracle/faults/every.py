"""All planted faults of the training layer: the oracle's checks must catch every one, first at its own stage.

Each fault is easily made, or was made in a real stack. It replaces one function or method of mxref during a scenario.
The modules `loop`, `optimizer`, `layers` and `study` beside this one define the faults.
"""

from __future__ import annotations

from dataclasses import dataclass

from training_oracle.faults import layers as layers
from training_oracle.faults import loop as loop
from training_oracle.faults import optimizer as optimizer
from training_oracle.faults import study as study
from training_oracle.faults.loop import Plant


@dataclass(frozen=True)
class Fault:
    name: str
    scenario: str
    check: str
    """The first check that has to fail."""
    plant: Plant


def _optimization(check: str, *faults: tuple[str, Plant]) -> list[Fault]:
    return [Fault(name, "optimization", check, plant) for name, plant in faults]


FAULTS = [
    Fault("weights drawn by the data seed", "optimization", "initial_weights", loop.weights_of_the_data_seed),
    Fault("outputs drawn as wide as the rest", "optimization", "initial_weights", loop.wide_outputs),
    *_optimization(
        "data_order",
        ("not shuffled again in the next epoch", loop.one_order_for_all_epochs),
        ("not shuffled at all", loop.corpus_order),
        ("order of the run's seed", loop.order_of_the_run_seed),
        ("no shift of the windows", loop.windows_without_shift),
        ("windows share no token", loop.windows_apart),
        ("resumed at the first sample", loop.loader_starts_over),
        ("resumed at the start of the epoch", loop.loader_forgets_the_place),
    ),
    *_optimization(
        "training_loss",
        ("targets are the inputs", loop.targets_shifted(0)),
        ("targets two tokens on", loop.targets_shifted(2)),
        ("loss in bits", loop.loss_in_bits),
        ("token 0 is padding", loop.ignores_token_zero),
        ("labels smoothed", loop.smoothed_labels),
        ("logged loss is the sum of the micro-batches", loop.loss_not_divided),
    ),
    Fault(
        "gradient not divided by the micro-batches", "optimization", "accumulation", loop.gradient_not_divided
    ),
    *_optimization(
        "gradient",
        ("gradients are not cleared", loop.gradients_pile_up),
        ("only the last micro-batch counts", loop.last_micro_batch_alone),
        ("the embedding is frozen by a detach", loop.detached_embedding),
        ("residual branches scaled in the backward pass", loop.halved_backward),
    ),
    Fault("tied embeddings learn from one side", "tied", "gradient", loop.tied_head_detached),
    Fault("tied embeddings count twice in the norm", "tied", "clipping", optimizer.tied_counted_twice),
    *_optimization(
        "clipping",
        ("each gradient clipped by itself", optimizer.clips_each),
        ("clipped group by group", optimizer.clips_matrices_apart),
        ("largest norm in place of the sum", optimizer.largest_norm),
        ("every element clipped", optimizer.clips_values),
        ("small gradients scaled up", optimizer.always_scales),
        ("the norm after clipping is logged", optimizer.logs_the_clipped_norm),
        ("not clipped at all", optimizer.never_clips),
    ),
    *_optimization(
        "schedule",
        ("rate set on the first group only", optimizer.rate_of_the_first_group),
        ("warm-up starts at 0", optimizer.warm_up_from_zero),
        ("warm-up takes a step too many", optimizer.warm_up_too_long),
        ("cosine counts the warm-up", optimizer.cosine_from_zero),
        ("cosine ends at 0", optimizer.cosine_without_floor),
        ("floor is a rate, not a ratio", optimizer.floor_as_a_rate),
        ("cosine ends with the run", optimizer.cosine_ends_with_the_run),
        ("cosine ends a step late", optimizer.cosine_a_step_late),
        ("cosine rises again after its end", optimizer.cosine_goes_on),
        ("straight line in place of the cosine", optimizer.linear_decay),
        ("rate of the step before", optimizer.late_rate),
    ),
    *_optimization(
        "adamw",
        ("beta1 ignored", optimizer.betas(beta1=0.9)),
        ("beta2 ignored", optimizer.betas(beta2=0.999)),
        ("betas exchanged", optimizer.betas_exchanged),
        ("eps ignored", optimizer.default_eps),
        ("eps inside the root", optimizer.hand(eps="inside")),
        ("eps before the bias correction", optimizer.hand(eps="before")),
        ("no bias correction", optimizer.hand(corrected=False)),
        ("second moment not corrected", optimizer.hand(second_corrected=False)),
        ("decay through the gradient", optimizer.hand(decay="coupled")),
        ("decay without the rate", optimizer.hand(decay="rateless")),
        ("decay after the update", optimizer.hand(decay="after")),
        ("momentum on the update", optimizer.hand(nesterov=True)),
        ("norms decay", optimizer.norms_decay),
        ("embeddings do not decay", optimizer.embeddings_spared),
        ("nothing decays", optimizer.nothing_decays),
        ("second moments rounded to BF16", optimizer.moments_in_bfloat16),
        ("resumed without the moments", optimizer.moments_lost),
        ("resumed with the step at 0", optimizer.optimizer_step_lost),
        ("weights rounded to BF16 after each step", optimizer.weights_in_bfloat16),
    ),
    Fault("evaluated in training mode", "optimization", "evaluation_mode", loop.never_in_evaluation_mode),
    Fault("left in evaluation mode", "optimization", "evaluation_mode", loop.never_in_training_mode),
    *_optimization(
        "validation",
        ("validation loss on training tokens", loop.validates_on_training_tokens),
        ("mean of the batches' means", loop.mean_of_means),
        ("sum over the limit, not the tokens", loop.divided_by_the_limit),
        ("limit of validation tokens ignored", loop.limit_ignored),
        ("last batch dropped", loop.drops_the_last_batch),
        ("other windows at each evaluation", loop.shuffled_validation),
        ("windows that overlap", loop.overlapping_windows),
    ),
    Fault("perplexity as a power of 2", "optimization", "log", loop.perplexity_of_two),
    Fault("NaN gradients taken for 0", "fp8", "standstill", layers.nan_taken_for_zero),
    Fault("a skipped step moves the moments", "fp8", "standstill", layers.skipped_steps_update),
    Fault("scale of the last micro-batch", "fp8", "fp8_scales", layers.last_amax),
    Fault("scales two steps old", "fp8", "fp8_scales", layers.scales_a_step_late),
    Fault("resumed without the FP8 scales", "fp8", "fp8_scales", layers.fp8_history_lost),
    Fault("E4M3's range for dY", "fp8", "fp8_scales", layers.one_range_for_all),
    Fault("the amax of a skipped step is kept for the next", "fp8", "fp8_scales", layers.skipped_amax_stays),
    Fault("current scaling in place of delayed", "fp8", "fp8_product", layers.current_scaling),
    Fault("scale rounded to a power of 2", "fp8", "fp8_scales", layers.powers_of_two),
    Fault("an unseen FP8 tensor loses its scale", "history", "fp8_history", layers.unseen_loses_its_scale),
    Fault("an amax of 0 gives scale 1", "history", "fp8_history", layers.zero_resets_the_scale),
    Fault("a NaN in one micro-batch is passed over", "history", "fp8_history", layers.nan_passed_over),
    Fault("an evaluation adds to the amax", "history", "fp8_history", layers.evaluation_is_observed),
    Fault("a step that is done over keeps its amax", "history", "fp8_history", layers.restart_keeps_amax),
    Fault("lm_head quantized too", "streams", "treatments", layers.keeps_nothing),
    Fault("Dgrad with the treatment of X", "streams", "treatments", layers.dgrad_as_fprop),
    Fault("Wgrad's operands exchanged", "streams", "treatments", layers.wgrad_exchanged),
    Fault("weights quantized for each micro-batch", "streams", "treatments", layers.weights_made_again),
    Fault(
        "quantizer seeded by the data seed", "streams", "random_streams", layers.quantizer_of_the_data_seed
    ),
    Fault("the step of the random bits stands still", "streams", "random_streams", layers.place(step=0)),
    Fault("all layers draw the same bits", "streams", "random_streams", layers.one_layer),
    Fault("rows and columns draw the same bits", "streams", "treatments", layers.one_operand),
    Fault("every micro-batch is the first", "streams", "random_places", layers.place(token_origin=0)),
    Fault("rows counted over two steps", "streams", "random_places", layers.place(global_tokens=128)),
    Fault("wavelengths of another model", "forward", "logits", layers.other_theta),
    Fault("channel pairs side by side", "forward", "logits", layers.interleaved_pairs),
    Fault("positions from the end", "forward", "logits", layers.positions_reversed),
    Fault("default eps in the norms", "forward", "logits", layers.default_norm_eps),
    Fault("norm's weight ignored", "forward", "logits", layers.norm_without_weight),
    Fault("sees the future", "forward", "logits", layers.attention(is_causal=False)),
    Fault("scores not scaled", "forward", "logits", layers.attention(scale=1.0)),
    Fault("key-value heads in turn", "forward", "logits", layers.heads_in_turn),
    Fault("gate and up exchanged", "forward", "logits", layers.gate_and_up_exchanged),
    Fault("repetitions keep the data seed", "study", "seeds_of_pairs", study.one_data_seed),
    Fault("every arm draws its own seed", "study", "seeds_of_pairs", study.seed_of_the_arm),
    Fault("crossing at the evaluation after", "study", "crossings", study.crossing_not_interpolated),
    Fault("crossing interpolated from the wrong end", "study", "crossings", study.crossing_from_the_end),
    Fault("the last crossing counts", "study", "crossings", study.last_crossing),
    Fault("a run that never crosses counts as one at its end", "study", "crossings", study.censoring_dropped),
    Fault(
        "a first evaluation below the target is a crossing",
        "study",
        "crossings",
        study.first_taken_for_crossed,
    ),
    Fault(
        "paired with the reference of the first seed", "study", "fixed_target", study.paired_with_the_first
    ),
    Fault("paired with the next seed's reference", "study", "fixed_target", study.paired_with_the_next),
    Fault("overhead with the other sign", "study", "fixed_target", study.other_sign),
    Fault("overhead relative to the arm", "study", "fixed_target", study.relative_to_the_arm),
    Fault("ratio of the means", "study", "fixed_target", study.ratio_of_means),
    Fault("seeds that never cross are left out", "study", "fixed_target", study.censored_left_out),
    Fault("one target for all seeds", "study", "relative_target", study.target_of_the_first_seed),
    Fault("the nearest evaluation is the target", "study", "relative_target", study.target_not_interpolated),
    Fault("spread without the root of the seeds", "study", "intervals", study.spread_of_one),
    Fault("spread of a run for that of a difference", "study", "intervals", study.spread_of_a_run),
    Fault("degrees of freedom of the pairs alone", "study", "intervals", study.freedom_of_the_seeds),
    Fault("normal points for Student's", "study", "intervals", study.normal_points),
    Fault("diverged seeds are left out", "study", "divergence", study.diverged_left_out),
]
