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


def model_changed_meanwhile() -> PrivacyError:
    """The model changed between its output and the criterion."""
    return PrivacyError(
        "the model was changed and called again between this forward pass and its "
        "criterion; the noise would be that of another model. Change it between steps."
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
    """Two backward passes at once."""
    return PrivacyError(
        "two threads run backward at once, and their gradients would get mixed up. Run "
        "the backward passes of a step one after the other."
    )


def changed_before_step() -> PrivacyError:
    """The model changed between forward pass and step."""
    return PrivacyError(
        "the model was changed between its forward pass and the optimizer's step; the "
        "gradients belong to another model. Change it between steps."
    )


def edited_before_step() -> PrivacyError:
    """The weights changed between backward pass and step."""
    return PrivacyError(
        "weights were edited between the backward pass and the optimizer's step. Edit "
        "them between steps, and do not step with another optimizer."
    )
