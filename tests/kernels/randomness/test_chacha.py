"""ChaCha20 words are those of RFC 8439, and keys lead forward alone."""

import numpy as np
import pytest

from clipless.kernels import KeyStream, WordSource, next_key, random_subset, standard_exponential

KEY = bytes(range(32))


def block(key, counter, nonce):
    """The block function of RFC 8439, section 2.3, written from its text."""

    def turned(x, by):
        return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF

    def quarter(s, a, b, c, d):
        for first, second, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[first] = (s[first] + s[second]) & 0xFFFFFFFF
            s[third] = turned(s[third] ^ s[first], by)

    words = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    words += np.frombuffer(key, "<u4").tolist() + [counter] + np.frombuffer(nonce, "<u4").tolist()
    state = list(words)
    for _ in range(10):
        for i in range(4):
            quarter(state, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(state, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) & 0xFFFFFFFF for a, b in zip(state, words, strict=True)]


def test_the_block_function_is_that_of_the_standard():
    """RFC 8439, section 2.3.2."""
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3"
    assert block(KEY, 1, nonce)[:8] == [int(each, 16) for each in expected.split()]


@pytest.mark.parametrize(
    ("purpose", "index", "first"), [(0, 0, 0), (9, 0x4A, 1), (2**32 - 1, 7, 5), (1, 2**64 - 1, 0)]
)
def test_words_are_the_blocks_of_their_nonce(purpose, index, first):
    nonce = purpose.to_bytes(4, "little") + index.to_bytes(8, "little")
    expected = [word for count in range(3) for word in block(KEY, first + count, nonce)]
    found = KeyStream(KEY).words(21, purpose=purpose, index=index, first_block=first)
    assert found.view("<u4").tolist() == expected[:42]


def test_a_stream_ends_before_its_counter_begins_anew():
    last = 2**32 - 1
    assert len(KeyStream(KEY).words(8, purpose=0, first_block=last)) == 8
    with pytest.raises(ValueError, match="blocks"):
        KeyStream(KEY).words(9, purpose=0, first_block=last)
    with pytest.raises(ValueError, match="32 bytes"):
        KeyStream(KEY[:16])


def test_the_next_key_is_of_no_other_stream():
    key = next_key(KEY)
    seen = [KeyStream(KEY).words(4, purpose=purpose).tobytes() for purpose in range(16)]
    assert len(key) == 32
    assert key not in seen
    assert next_key(key) not in {key, KEY}


def test_exponentials():
    source = WordSource(KeyStream(KEY), purpose=0)
    drawn = standard_exponential(source, 200_000)
    for power, moment in ((1, 1.0), (2, 2.0)):
        spread = (drawn**power).std() / 200_000**0.5
        assert abs((drawn**power).mean() - moment) < 4.5 * spread
    assert abs((drawn > 3).mean() - np.exp(-3)) < 4.5 * (np.exp(-3) / 200_000) ** 0.5
    assert not set(drawn[:8]) & set(standard_exponential(source, 8))


@pytest.mark.parametrize(("size", "count"), [(6, 2), (40, 2), (5, 5), (3, 0), (1, 1)])
def test_subsets_are_uniform(size, count):
    source = WordSource(KeyStream(KEY), purpose=3)
    tries = 3000
    hits = np.zeros((size, size))
    for _ in range(tries):
        found = random_subset(source, size, count)
        assert len(set(found.tolist())) == count
        assert (np.diff(found) > 0).all()
        hits[np.ix_(found, found)] += 1
    share = count / size
    assert abs(np.diag(hits) / tries - share).max() <= 5 * (share * (1 - share) / tries) ** 0.5
    if size > 2:
        pair = share * (count - 1) / (size - 1)
        others = hits[~np.eye(size, dtype=bool)] / tries
        assert abs(others - pair).max() <= 5 * (max(pair, 0) * (1 - pair) / tries) ** 0.5
