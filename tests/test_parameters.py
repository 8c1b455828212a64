"""Signatures stay short: options that belong together are records, and each is listed once."""

import dataclasses
import importlib
import inspect
import itertools
import pkgutil

import pytest

import clipless
from clipless import losses
from clipless.privacy import BatchOptions, PrivacyEngine, PrivacyOptions, PrivateLoader
from clipless.robustness import AttackOptions, attack_certificates
from clipless.training import Trainer, TrainingOptions
from tests.privacy.runs import Run, examples, mlp

MOST = 12
MOST_SHARED = 8
RECORDS = (PrivacyOptions, BatchOptions, TrainingOptions, AttackOptions)
# Layers follow torch, and commands have their options.
EXEMPT = ("clipless.nn", "clipless.cli")


def public_callables():
    """Functions, methods and constructors behind the public names, by name; no data records."""
    rooms = [
        each.name
        for each in pkgutil.walk_packages(clipless.__path__, "clipless.")
        if each.name.count(".") == 1 and "._" not in each.name and not each.name.endswith("__")
    ]
    found = {}
    for room in ["clipless", *rooms]:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if str(getattr(thing, "__module__", "")).startswith(EXEMPT):
                continue
            if inspect.isfunction(thing):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
            elif inspect.isclass(thing):
                for attribute, value in vars(thing).items():
                    if attribute.startswith("_") and attribute not in ("__init__", "__call__"):
                        continue
                    if attribute == "__init__" and dataclasses.is_dataclass(thing):
                        continue  # a record: its fields are its listing
                    function = getattr(value, "__func__", value)
                    if inspect.isfunction(function):
                        found[f"{thing.__module__}.{thing.__qualname__}.{attribute}"] = function
    return found


CALLABLES = public_callables()


def parameters(function):
    given = inspect.signature(function).parameters
    return {name: p for name, p in given.items() if name not in ("self", "cls")}


def test_the_search_sees_what_it_is_about():
    names = " ".join(CALLABLES)
    for each in ("PrivacyEngine.make_private", "Trainer.__init__", "attack_certificates",
                 "CliplessClassifier.__init__", "PrivateLoader.__init__"):  # fmt: skip
        assert each in names
    assert len(CALLABLES) > 150


@pytest.mark.parametrize("name", CALLABLES)
def test_no_public_function_has_many_parameters(name):
    assert len(parameters(CALLABLES[name])) <= MOST


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: each.__name__)
def test_options_are_frozen_have_defaults_and_are_few(record):
    fields = dataclasses.fields(record)
    assert record.__dataclass_params__.frozen
    assert len(fields) <= MOST
    assert record() == record()
    for field in fields:
        assert f"{field.name}:" in record.__doc__, f"{field.name} is not explained"


def test_no_two_listings_of_the_same_options():
    """Of names with a default; estimators repeat each other, as scikit-learn wants it."""
    listings = {name: parameters(each) for name, each in CALLABLES.items()}
    listings |= {each.__name__: parameters(each) for each in RECORDS}
    optional = {
        name: {key for key, p in given.items() if p.default is not inspect.Parameter.empty}
        for name, given in listings.items()
        if "clipless.sklearn" not in name
    }
    for (one, first), (other, second) in itertools.combinations(optional.items(), 2):
        assert len(first & second) <= MOST_SHARED, (one, other, sorted(first & second))


def test_no_field_of_a_run_is_in_two_records():
    for one, other in itertools.combinations((PrivacyOptions, BatchOptions, TrainingOptions), 2):
        assert not {f.name for f in dataclasses.fields(one)} & {
            f.name for f in dataclasses.fields(other)
        }


def test_a_keyword_at_the_wrong_place_is_told_where_it_goes():
    engine, criterion = PrivacyEngine(), losses.CrossEntropy()
    for make in (engine.make_private, engine.make_private_with_epsilon):
        with pytest.raises(TypeError, match=r"relation as options=PrivacyOptions\(relation="):
            make(module=mlp(), relation="zero_out")
        nested = r"options=PrivacyOptions\(batches=BatchOptions\(micro_batch_size=\.\.\.\)\)"
        with pytest.raises(TypeError, match=nested):
            make(module=mlp(), micro_batch_size=3)
    with pytest.raises(TypeError, match=r"training=TrainingOptions\(callbacks="):
        Trainer(mlp(), criterion, callbacks=[])
    with pytest.raises(TypeError, match=r"options=PrivacyOptions\(sampling="):
        Trainer(mlp(), criterion, sampling="full_batch")
    with pytest.raises(TypeError, match=r"batches=BatchOptions\(pad="):
        PrivacyOptions(pad=True)
    with pytest.raises(TypeError, match=r"batches=BatchOptions\(views="):
        PrivateLoader(examples(10), views=2)
    with pytest.raises(TypeError, match=r"data=DataLoader\(num_workers="):
        PrivateLoader(examples(10), num_workers=2)
    with pytest.raises(TypeError, match=r"attack=AttackOptions\(restarts="):
        attack_certificates(mlp(), examples(10)[0], restarts=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_thing'"):
        Trainer(mlp(), criterion, no_such_thing=1)


def test_an_option_is_given_once():
    given = PrivacyOptions(bounds="none", sampling="full_batch", epochs=2)
    with pytest.raises(ValueError, match="bounds is given twice"):
        Run(bounds="proved", options=given)
    with pytest.raises(ValueError, match="epochs is given twice"):
        Run(target_epsilon=3.0, epochs=2, options=given)
    with pytest.raises(ValueError, match="steps is given twice"):
        Trainer(mlp(), None, target_epsilon=3.0, steps=5, options=PrivacyOptions(steps=5))
    with pytest.raises(TypeError, match="options must be PrivacyOptions, got TrainingOptions"):
        Run(options=TrainingOptions())


def test_arguments_and_options_make_the_same_plan():
    short = Run(sampling="full_batch", precision="bfloat16", noise_multiplier=1.5).engine.plan
    options = PrivacyOptions(sampling="full_batch", precision="bfloat16")
    assert Run(options=options, noise_multiplier=1.5).engine.plan == short
    assert short != Run(noise_multiplier=1.5).engine.plan
    planned = Run(target_epsilon=3.0, options=PrivacyOptions(epochs=4)).engine.plan
    assert planned == Run(target_epsilon=3.0, epochs=4).engine.plan
    assert planned.steps == 20


def test_weights_stay_constrained_where_noise_is_found():
    with pytest.raises(ValueError, match="noise_multiplier=0"):
        Run(target_epsilon=3.0, steps=5, bounds="none")
