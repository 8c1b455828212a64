"""Between a layer's bounded gradient and its release there is nothing that others can reach.

Autograd lets anybody look at a graph: hooks on nodes, the leaves behind them, what they have saved.
Every model passes its proof and does something else afterwards, as in `test_other_ways`.
"""

import copy
import threading
import time
import types

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from clipless import nn as lip
from clipless.privacy.step._enforcement import _BoundedCall
from tests.privacy.misuse_helpers import bounded_or_refused, full, gradients_of, refused

SWITCH = types.SimpleNamespace(on=False)
MUCH = 1e4


@pytest.fixture(autouse=True)
def switched_off():
    SWITCH.on = False
    yield
    SWITCH.on = False


class Odd(nn.Module):
    """Two layers, used in an odd way once a global says so."""

    shape = (6,)

    def __init__(self):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.first = lip.SpectralLinear(6, 8, bias=True)
        self.second = lip.SpectralLinear(8, 3)

    def forward(self, x):
        hidden = self.first(self.guard(x))
        return self.odd(hidden) if SWITCH.on else self.second(hidden)


def times(gradients):
    return tuple(None if each is None else MUCH * each for each in gradients)


def leaf_behind(output):
    """The first leaf that the node of an output leads to, and its own node."""
    nodes = [node for node, _ in output.grad_fn.next_functions if hasattr(node, "variable")]
    return nodes[0].variable, nodes[0]


class HookOnNode(Odd):
    def odd(self, hidden):
        output = self.second(hidden)
        output.grad_fn.register_hook(lambda found, given: times(found))
        return output


class HookBeforeNode(Odd):
    def odd(self, hidden):
        output = self.second(hidden)
        output.grad_fn.register_prehook(times)
        return output


class HookOnLeaf(Odd):
    def odd(self, hidden):
        output = self.second(hidden)
        leaf, node = leaf_behind(output)
        leaf.register_hook(lambda found: None if found is None else MUCH * found)
        node.register_prehook(times)
        return output


class LeafUsedAgain(Odd):
    def odd(self, hidden):
        output = self.second(hidden)
        leaf, _ = leaf_behind(output)
        return output + MUCH * (hidden @ leaf.T if leaf.ndim == 2 else leaf.sum())


class LeafSeenByAMode(Odd):
    """A mode is shown the arguments of every function."""

    def odd(self, hidden):
        seen = []

        class Spy(TorchFunctionMode):
            def __torch_function__(self, function, kinds, arguments=(), named=None):
                seen.extend(x for x in arguments if isinstance(x, torch.Tensor))
                return function(*arguments, **(named or {}))

        with Spy():
            output = self.second(hidden)
        weights = [x for x in seen if x.shape == (3, 8) and x.requires_grad]
        return output + sum(MUCH * (hidden @ weight.T) for weight in weights)


class LeafOfTheStandIn(Odd):
    def odd(self, hidden):
        weight = self.second.forward._parameters[0]["weight"]
        return self.second(hidden) + MUCH * (hidden @ weight.T)


class Lying(torch.Tensor):
    """A tensor that says its norm is zero."""

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), named=None):
        found = super().__torch_function__(function, kinds, arguments, named or {})
        silent = "norm" in function.__name__ or function.__name__ == "square"
        return 0 * found.as_subclass(torch.Tensor) if silent else found


class LyingTensor(Odd):
    def odd(self, hidden):
        return self.second((MUCH * hidden).as_subclass(Lying)).as_subclass(torch.Tensor)


class BackwardInsideOfBackward(Odd):
    def odd(self, hidden):
        output = self.second(hidden)

        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, cotangent):
                for _ in range(10):
                    torch.autograd.backward(output, MUCH * cotangent, retain_graph=True)
                return cotangent

        return Again.apply(output)


class BackwardInsideOfForward(Odd):
    def odd(self, hidden):
        output = self.second(hidden)
        for _ in range(10):
            (MUCH * output).sum().backward(retain_graph=True)
        return output


class InThreads(Odd):
    """One use was planned: of eight in as many threads, one has a bound."""

    def odd(self, hidden):
        outputs = []
        threads = [
            threading.Thread(target=lambda: outputs.append(self.second(MUCH * hidden)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(outputs)


class LayerCopied(Odd):
    def odd(self, hidden):
        deep, shallow = copy.deepcopy(self.second), copy.copy(self.second)
        return self.second(hidden) + deep(MUCH * hidden) + shallow(MUCH * hidden)


class DualNumbers(Odd):
    def odd(self, hidden):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(hidden, MUCH * torch.ones_like(hidden))
            output, slope = forward_ad.unpack_dual(self.second(dual))
            return output if slope is None else output + slope


class BackwardHookOfALayer(Odd):
    def odd(self, hidden):
        handle = self.second.register_full_backward_hook(lambda layer, found, given: times(found))
        output = self.second(hidden)
        handle.remove()
        return output


class Circular(Odd):
    """The norm of an image is that before padding, and kept apart from the padded image."""

    shape = (1, 4, 4)

    def __init__(self):
        super().__init__()
        self.first = lip.SpectralConv2d(1, 2, 3, padding="same", padding_mode="circular")
        self.second = nn.Sequential(nn.Flatten(), lip.SpectralLinear(32, 3))


class CircularSavedByHooks(Circular):
    def forward(self, x):
        def changed(saved):
            return MUCH * saved if SWITCH.on and saved.ndim == 4 else saved

        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, changed):
            hidden = self.first(self.guard(x))
        return self.second(hidden)


class CircularOverwritten(Circular):
    def forward(self, x):
        hidden = self.first(self.guard(x))
        if SWITCH.on:
            for saved in getattr(hidden.grad_fn, "saved_tensors", ()):
                if saved is not None and saved.ndim == 4:
                    saved.data.mul_(MUCH)
        return self.second(hidden)


KINDS = [
    HookOnNode, HookBeforeNode, HookOnLeaf, LeafUsedAgain, LeafSeenByAMode, LeafOfTheStandIn,
    LyingTensor, BackwardInsideOfBackward, BackwardInsideOfForward, InThreads, LayerCopied,
    DualNumbers, BackwardHookOfALayer, CircularSavedByHooks, CircularOverwritten,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_is_added_on_the_way(kind, monkeypatch):
    # What is held to a bound must be, whether a trial is held or not.
    monkeypatch.setattr("clipless.privacy.step._row_trial.RowTrial.hold", lambda *_: False)

    def build():
        SWITCH.on = False
        return kind()

    def attack(run):
        run.step()
        SWITCH.on = True
        run.step()

    bounded_or_refused(attack, build=build, shape=kind.shape)


def test_threads_get_different_uses_of_a_layer():
    class Slow(_BoundedCall):
        """Is interrupted between a look at the count and the next one."""

        @property
        def used(self):
            found = vars(self)["count"]
            time.sleep(0.02)
            return found

        @used.setter
        def used(self, value):
            vars(self)["count"] = value

    call, found = Slow(None, lip.SpectralLinear(2, 2), ({"weight": 1.0},) * 4), []
    threads = [threading.Thread(target=lambda: found.append(call._next_use())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3, 4, 4]  # the last two have no bound: a gradient of zero


def test_a_copy_of_a_layer_in_mid_pass_is_an_ordinary_layer():
    class Copying(Odd):
        def odd(self, hidden):
            SWITCH.copy = copy.deepcopy(self.second)
            return self.second(hidden)

    run = full(model=Copying(), noise_multiplier=0.0)
    SWITCH.on = True
    run.step()
    plain = SWITCH.copy
    plain(torch.ones(2, 8)).sum().backward()
    torch.testing.assert_close(plain.weight.grad, torch.full((3, 8), 2.0))


def test_sealed_gradients_are_those_of_autograd():
    run = full(model=Odd(), noise_multiplier=0.0)
    x, y = run.batch()
    plain = copy.deepcopy(run.model)
    run.backward(x, y)
    run.optimizer.step()
    loss = nn.functional.cross_entropy(plain(x.detach()), y, reduction="sum")
    (loss / run.engine.plan.expected_batch_size).backward()
    expected = gradients_of(plain)
    for name, found in gradients_of(run.model).items():
        torch.testing.assert_close(found, expected[name])


def test_differentiating_in_a_backward_pass_says_what_to_do():
    run = full(model=BackwardInsideOfBackward(), noise_multiplier=0.0)
    run.step()
    SWITCH.on = True
    with refused("second time", "inside of a backward pass"):
        run.step()
