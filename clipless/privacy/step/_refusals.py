"""What a session refuses in the middle of a step: what was wrong, and what to do."""

from __future__ import annotations

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


def users_run_eagerly() -> PrivacyError:
    """Compiled code and sharded models sum over rows without looking at whose they are."""
    return PrivacyError(
        "a unit of users does not go with compile, nor with sharded models: there, the rows of a "
        "gradient are added up without their users' shares. Leave the one or the other out."
    )
