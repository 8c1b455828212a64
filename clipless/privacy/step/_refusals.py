"""What a session refuses in the middle of a step: what was wrong, and what to do."""

from __future__ import annotations

import warnings

from clipless.errors import PrivacyError


def no_batch_drawn() -> PrivacyError:
    """The model was called in training mode on nobody knows what."""
    return PrivacyError(
        "the model was called in training mode before a batch was drawn from the private "
        "loader. Iterate over the loader that make_private returned; for anything but "
        "training use model.eval() or torch.no_grad()."
    )


def several_batches_drawn() -> PrivacyError:
    """Nothing tells which of several samples the input is."""
    return PrivacyError(
        "several batches were drawn since the last step, and the model's input was moved "
        "or transformed, so that nothing tells which of them it is and which of its rows "
        "are padding. Draw a batch, take its step, then draw the next. What was drawn is "
        "counted."
    )


def noise_of_a_pass() -> PrivacyError:
    """Noise is changed while passes are paid for as they were planned."""
    return PrivacyError(
        "the noise of epochs in a fixed order stays as it was planned: a pass is paid for at its "
        "first step, and correlated noise is of one amount. Begin another run for other noise"
    )


def noise_chosen_after_looking() -> PrivacyError:
    """The noise was changed after something was released."""
    return PrivacyError(
        "the noise was to be changed after a release. Accountants of a schedule that is fixed "
        "beforehand do not cover noise that may have been chosen by looking at results (two "
        "continuations, each of which keeps (3, 1e-5), can reach delta 1.8e-5 if the result of "
        "the first step chooses between them). Declare a filter before the first release, which "
        "covers it: PrivacyEngine(accountant='filter') with target_epsilon."
    )


def layer_called_alone(module: object) -> PrivacyError:
    """A layer was called outside its model."""
    return PrivacyError(
        f"{type(module).__name__} was called outside the model it is part of. Gradients "
        "must come through the whole model and the criterion: call the model itself, or "
        "use torch.no_grad() if this is not for training."
    )


def not_the_output() -> PrivacyError:
    """The criterion was given something else than the output."""
    return PrivacyError(
        "the private criterion was given something else than the output of the private "
        "model in training mode. Pass the model's output itself, unchanged: even a reshape "
        "could mix examples. For evaluation use torch.no_grad()."
    )


def no_new_batch() -> PrivacyError:
    """A batch is used again, or none was drawn."""
    return PrivacyError(
        "no new batch was drawn from the private loader since the last step, or an old "
        "one was used again. Iterate over the loader that make_private returned, one step "
        "for each batch."
    )


def backward_too_late() -> PrivacyError:
    """The backward pass of a step that is over."""
    return PrivacyError(
        "backward was called after the step it belongs to was taken, or after another "
        "batch was begun. Call backward before drawing the next batch."
    )


def edited_before_backward() -> PrivacyError:
    """The weights changed between forward and backward pass."""
    return PrivacyError(
        "weights were edited between the forward pass and its backward pass; the "
        "gradients would belong to neither. Edit them between steps."
    )


def two_threads() -> PrivacyError:
    """Two passes or steps at once."""
    return PrivacyError(
        "two threads run forward, backward or step at once, and their gradients would get mixed "
        "up. Run the passes and the steps of one model one after the other; in another thread, "
        "evaluate a copy."
    )


def edited_before_step() -> PrivacyError:
    """The weights changed between backward pass and step."""
    return PrivacyError(
        "weights were edited between the backward pass and the optimizer's step. Edit "
        "them between steps, and do not step with another optimizer."
    )


def session_over(what: str, reason: str | None) -> PrivacyError:
    """Something of a session that has ended was used for training."""
    return PrivacyError(
        f"{what} belongs to a private training session that is over: {reason}. Nothing is trained "
        "without noise by accident: call make_private to go on privately, engine.detach() to make "
        "everything ordinary again, or use model.eval() or torch.no_grad() for evaluation."
    )


def another_loader() -> PrivacyError:
    """A batch of one session was given to another one."""
    return PrivacyError(
        "this batch was drawn from another private loader, whose session counts it. A sample is "
        "released once, by the session it was drawn for: iterate over the loader that this "
        "make_private returned."
    )


def loader_taken() -> PrivacyError:
    """A private loader was given to a second session."""
    return PrivacyError(
        "this private loader belongs to another private training session. One sample that two "
        "sessions release is not counted for what it costs: make a loader for each, or call "
        "detach() on the engine of the first one. Nothing was changed."
    )


def computed_input() -> PrivacyError:
    """The model was called on something that can be trained."""
    return PrivacyError(
        "the model's input was computed by something that can be trained. Gradients end at the "
        "model: make what comes before it a part of the model, or compute the input under "
        "torch.no_grad()."
    )


def other_inputs(found: object, planned: object) -> PrivacyError:
    """The model was called on other inputs than those that were traced."""
    return PrivacyError(
        f"the model was called on {found}, but examples were proved to stay apart on {planned}. "
        "Give it the same arguments in every step, all of one shape: pad sequences to one length "
        "that is public, and not to the longest of a batch, which one example decides."
    )


def step_without_batch(*, training: bool) -> PrivacyError:
    """The error for a step to which nothing has contributed."""
    if training:
        return PrivacyError(
            "the optimizer was asked to step without a batch: draw one from the private "
            "loader, then call the model, the criterion and backward, once each."
        )
    return PrivacyError(
        "the optimizer was asked to step while the model is in evaluation mode, in which "
        "losses do not count and gradients have no noise; they were discarded. Call "
        "model.train() before the model, the criterion and backward."
    )


def warn_of_skipped(count: int) -> None:
    """Say that steps were drawn, and will be counted, that were never taken."""
    warnings.warn(
        f"{count} drawn batch(es) did not lead to a step of the optimizer. They are counted "
        "all the same, since skipping may depend on the data; their gradients are discarded. "
        "For several backward passes a step, use micro_batch_size.",
        stacklevel=3,
    )


def changed_within_step() -> PrivacyError:
    """The bounds of a forward pass are not those of its step."""
    return PrivacyError(
        "the model was changed and called again between this forward pass and its criterion, or "
        "between the batches of one step; the noise would be that of another model. Change it "
        "between steps."
    )


def batch_used_twice() -> PrivacyError:
    """A micro-batch went through the criterion a second time."""
    return PrivacyError(
        "this batch went through the criterion before. Every sampled example may contribute once "
        "to a step: draw the next batch from the private loader."
    )


def not_the_whole_batch(rows: int, *, drawn: int, views: int) -> PrivacyError:
    """Another number of rows went through the model than was drawn."""
    each = "" if views == 1 else f" ({views} views of every example)"
    return PrivacyError(
        f"the batch drawn from the private loader has {drawn} rows{each}, but {rows} went through "
        "the model. Feed it whole and once: dropping, repeating or splitting examples changes what "
        "was sampled."
    )


def incomplete_step(missing: int, micro_batches: int) -> PrivacyError:
    """Some of a step's sample has had no loss."""
    return PrivacyError(
        f"{missing} of the {micro_batches} micro-batches of this step have not gone through the "
        "criterion. Step once for every sample, after its last micro-batch "
        "(loader.current.is_last)."
    )


def missing_backward(delivered: int, micro_batches: int) -> PrivacyError:
    """Some of a step's losses were not differentiated."""
    return PrivacyError(
        f"backward was called for {delivered} of the {micro_batches} batches of this step. Call "
        "backward on every private loss, once."
    )


def foreign_gradient() -> PrivacyError:
    """Somebody else has put a gradient where ours belong."""
    return PrivacyError(
        "a parameter has a gradient that did not come through the private criterion: another loss "
        "was differentiated, or `grad` was assigned. It was discarded. Only the private loss may "
        "be differentiated, and gradients cannot be edited."
    )


def scaled_loss(scale: float) -> PrivacyError:
    """The private loss was multiplied."""
    return PrivacyError(
        f"the private loss was multiplied by {scale:g} before backward. The criterion already "
        "divides by the public batch size; change the learning rate instead, use micro_batch_size "
        "for batches larger than memory, and pass a gradient scaler as grad_scaler= to "
        "make_private."
    )


def second_backward() -> PrivacyError:
    """A loss was differentiated twice."""
    return PrivacyError(
        "backward was called a second time through the same forward pass. Every sampled example "
        "may contribute once: call the model again on a new batch, and do not use "
        "retain_graph=True."
    )


def other_use_of_output() -> PrivacyError:
    """The model's output was differentiated by something else than the criterion."""
    return PrivacyError(
        "the model's output is differentiated by something besides the criterion that was made "
        "private, or the criterion was left out. Terms that look at several examples have no "
        "bounded sensitivity: put what you need into a per-example loss "
        "(clipless.losses.PerExample) and compute the loss with it, in training mode."
    )


def gradient_hook() -> PrivacyError:
    """A hook could change gradients on their way."""
    return PrivacyError(
        "a parameter carries a gradient hook, which could change gradients before they get their "
        "noise. Remove it."
    )


def several_batches_at_once() -> PrivacyError:
    """The model was called on tensors of more than one sample."""
    return PrivacyError(
        "the model was called on tensors of several batches at once. Call it on what the private "
        "loader handed out together."
    )


def other_targets() -> PrivacyError:
    """The targets are not those of the inputs."""
    return PrivacyError(
        "the targets were drawn from the private loader in another batch than the inputs. Pass the "
        "criterion the targets of the batch that went through the model."
    )


def not_one_tensor(output: object) -> PrivacyError:
    """The model's output is no tensor."""
    return PrivacyError(
        f"the model returned a {type(output).__name__} instead of a tensor, whose gradients cannot "
        "be held back. Return the output for the criterion alone."
    )
