"""Texts: strings in, labels out, one private query and one linear layer."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from clipless.errors import DamagedFileError, PrivacyError
from clipless.privacy import Ledger, Relation
from clipless.sklearn import (
    CliplessTextClassifier,
    CliplessTextRegressor,
    FolderEncoder,
    HashedNgrams,
    load,
)
from clipless.sklearn.texts._vector_cache import VectorCache
from clipless.sklearn.texts._vectors import STATISTICS_BOUND, VectorEncoder, unit_rows
from clipless.statistics import PrivateRows

pytestmark = pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")


def reviews(rows=600):
    random = np.random.default_rng(0)
    liked = random.random(rows) < 0.5
    nouns = random.choice(["film", "book", "song", "play"], rows)
    texts = [
        f"a {'lovely' if yes else 'dreadful'} {n}" for yes, n in zip(liked, nouns, strict=True)
    ]
    return texts, liked


def lengths(texts):
    return np.array([[len(text), text.count("l"), text.count("d")] for text in texts], float)


def test_texts_are_learnt_and_everything_is_in_one_ledger(tmp_path):
    texts, liked = reviews()
    ledger = Ledger.in_memory(dataset_size=len(texts), relation=Relation.ZERO_OUT)
    fitted = CliplessTextClassifier(2.0, ledger=ledger, random_state=0).fit(texts, liked)
    assert fitted.score(texts, liked) > 0.95
    assert ledger.releases == 2 + fitted.n_iter_  # vectors, class counts, steps
    assert fitted.privacy_.epsilon <= 2.0
    assert (fitted.certified_radius(texts[:5]) > 0).all()
    fitted.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert (again.predict(texts) == fitted.predict(texts)).all()
    assert np.array_equal(again.certified_radius(texts[:5]), fitted.certified_radius(texts[:5]))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "container",
    [list, tuple, np.array, pd.Series, lambda t: pd.DataFrame({"t": t}),
     lambda t: np.array(t, dtype=object)[:, None]],
)  # fmt: skip
def test_containers_of_texts_are_read_alike(container):
    texts, liked = reviews(60)
    fitted = CliplessTextClassifier(8.0, random_state=0).fit(container(texts), liked)
    assert fitted.predict(container(texts)).shape == (60,)


def test_what_is_no_column_of_texts_is_refused():
    estimator = CliplessTextClassifier()
    for wrong in ("one string", np.zeros((3, 2)), pd.DataFrame({"a": ["x"], "b": ["y"]}), []):
        with pytest.raises(ValueError, match=r"text|0 sample"):
            estimator.fit(wrong, [True, False, True])
    with pytest.raises(ValueError, match="encoder must be"):
        CliplessTextClassifier(encoder=3).fit(["a", "b"], [True, False])
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        CliplessTextClassifier(encoder="no/such").fit(["a", "b"], [True, False])
    with pytest.raises(ValueError, match="one vector for each"):
        CliplessTextClassifier(encoder=lambda t: np.zeros(4)).fit(["a", "b"], [True, False])


ODD = [None, np.nan, pd.NA, 3.5, b"\xff", "", [1], "\ud800", "lovely " * 1000]


def test_one_odd_text_moves_the_statistics_by_no_more_than_their_sensitivity(monkeypatch):
    texts, _ = reviews(50)
    seen = []
    release = PrivateRows._release

    def recorded(rows, value, bound, *query):
        seen.append((value.clone(), bound))
        return release(rows, value, bound, *query)

    monkeypatch.setattr(PrivateRows, "_release", recorded)
    reader = CliplessTextClassifier(8.0, encoder=HashedNgrams(places=32))
    for first in (None, texts[0], *ODD):
        vectors, codes, votes = reader._read([first, *texts[1:]], reset=True)
        ledger = Ledger.in_memory(dataset_size=50, relation=Relation.ZERO_OUT)
        rows = PrivateRows(vectors, codes, votes, ledger=ledger)
        VectorEncoder.from_rows(rows, size=32, noise_multiplier=5.0)
    empty = seen[0][0]
    assert all(bound == STATISTICS_BOUND for _, bound in seen)
    assert all((value - empty).norm() <= STATISTICS_BOUND * (1 + 1e-9) for value, _ in seen)
    moved = [bool((value - empty).norm() > 0) for value, _ in seen[1:]]
    assert moved[:4] == [True, False, False, False]


def test_unit_rows_are_units_whatever_they_hold():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0], [3e38, 3e38],
                      [1e-40, 1e-40], [-1e-30, 0.0]])  # fmt: skip
    norms = unit_rows(x.double()).norm(dim=1)
    assert torch.allclose(norms, torch.tensor([1.0, 0, 0, 0, 1, 1, 1], dtype=torch.float64))


def test_the_vector_encoder_is_as_steep_as_it_says():
    generator = torch.Generator().manual_seed(0)
    encoder = VectorEncoder(
        torch.rand(6, generator=generator).double() / 4,
        torch.rand(6, generator=generator).double() + 0.5,
    )
    one, two = (unit_rows(torch.randn(500, 6, generator=generator).double()) for _ in range(2))
    two = unit_rows(one + 1e-3 * two)
    codes = torch.zeros(500, 0)
    moved = (encoder(one, codes).double() - encoder(two, codes).double()).norm(dim=1)
    ratios = moved / (one - two).norm(dim=1)
    assert 0.7 * encoder.lipschitz() < ratios.max() <= encoder.lipschitz() * 1.01


@pytest.mark.usefixtures("quick")
def test_a_function_is_an_encoder_and_is_asked_for_again(tmp_path):
    texts, liked = reviews(60)
    fitted = CliplessTextClassifier(8.0, encoder=lengths, random_state=0).fit(texts, liked)
    assert "promise" in str(fitted.privacy_.notes)
    fitted.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"encoder=\.\.\."):
        load(tmp_path / "model").predict(texts)
    again = load(tmp_path / "model", encoder=lengths)
    assert (again.predict(texts) == fitted.predict(texts)).all()
    with pytest.raises(ValueError, match="length 2"):
        load(tmp_path / "model", encoder=lambda t: lengths(t)[:, :2]).predict(texts)


@pytest.mark.usefixtures("quick")
def test_encoders_that_learn_from_the_texts_are_refused():
    from sklearn.feature_extraction.text import TfidfVectorizer

    def vocabulary(texts):
        return TfidfVectorizer(token_pattern=r".").fit_transform(texts).toarray()

    def centred(texts):
        return lengths(texts) - lengths(texts).mean(0)

    for function in (vocabulary, centred):
        with pytest.raises(PrivacyError, match="by itself"):
            CliplessTextClassifier(8.0, encoder=function).fit(*reviews(60))


def test_vectors_are_made_once(tmp_path):
    texts, liked = reviews(60)
    calls = []

    def encode(some):
        calls.extend(each for each in some if each.startswith("a "))  # and no public trial
        return lengths(some)

    estimator = CliplessTextClassifier(8.0, encoder=encode, cache=tmp_path, random_state=0)
    estimator.fit(texts, liked).predict(texts)
    assert sorted(calls) == sorted(set(texts))
    new = CliplessTextClassifier(8.0, encoder=encode, cache=tmp_path).fit(texts, liked)
    assert len(calls) == len(set(texts))
    new.predict(["a dreadful opera"])
    assert len(calls) == len(set(texts)) + 1


def test_a_cache_survives_a_process_that_was_killed_and_tells_of_damage(tmp_path):
    def cache(name="lengths"):
        return VectorCache(tmp_path, encoder=name)

    first = cache().get(["a", "b"], lengths)
    _, vectors = cache()._files
    with vectors.open("ab") as file:
        file.write(b"half a vector")  # the keys were not written any more
    assert np.array_equal(cache().get(["a", "b"], None), first)
    assert np.array_equal(cache().get(["b", "dd"], lengths), lengths(["b", "dd"]))
    assert np.array_equal(cache().get(["dd", "a"], None), lengths(["dd", "a"]))
    assert cache("other").get(["a"], lambda texts: np.ones((1, 2))).tolist() == [[1.0, 1.0]]
    with pytest.raises(DamagedFileError, match="another length"):
        cache().get(["new"], lambda texts: np.ones((1, 2)))
    vectors.write_bytes(vectors.read_bytes()[:8])
    with pytest.raises(DamagedFileError, match="delete it"):
        cache().get(["a"], lengths)


def test_n_grams_depend_on_their_own_text_alone():
    texts, _ = reviews(40)
    encoder = HashedNgrams(places=64)
    together = encoder(texts)
    assert all(np.array_equal(encoder([t])[0], v) for t, v in zip(texts, together, strict=True))
    assert len({tuple(v) for v in together}) == len(set(texts))


@pytest.fixture
def small_transformer(tmp_path):
    """A transformers model with random weights and a tokenizer of letters, in a folder."""
    transformers = pytest.importorskip("transformers")
    letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = letters + [f"##{letter}" for letter in letters[5:]]
    folder = tmp_path / "encoder"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


@pytest.mark.usefixtures("quick")
def test_a_transformer_in_a_folder_reads_each_text_by_itself(small_transformer, tmp_path):
    texts, liked = reviews(30)
    encoder = FolderEncoder(small_transformer, longest=32)
    vectors = encoder(texts)
    assert vectors.shape == (30, 16)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(encoder(["a", texts[3], "longer than others by far"])[1], vectors[3])
    fitted = CliplessTextClassifier(8.0, encoder=str(small_transformer)).fit(texts, liked)
    fitted.save(tmp_path / "model")
    assert (load(tmp_path / "model").predict(texts) == fitted.predict(texts)).all()
    config = small_transformer / "config.json"
    config.write_text(config.read_text() + " ")  # another folder now, for all that is known
    with pytest.raises(ValueError, match="not where it was"):
        load(tmp_path / "model").predict(texts)


def test_a_regressor_reads_texts():
    texts, liked = reviews(1200)
    stars = np.where(liked, 5.0, 1.0)
    fitted = CliplessTextRegressor(3.0, random_state=0).fit(texts, stars)
    assert fitted.score(texts, stars) > 0.5
    assert fitted.privacy_.releases == 4 + fitted.n_iter_
    with pytest.raises(AttributeError, match="no columns"):
        _ = fitted.feature_importances_
