"""Secret keys: where they come from, and that no copy or restore repeats a draw."""

import copy
import pickle

import keras
import pytest
import runs
import tensorflow as tf

from keras_dpopt.keys import SecretKeys


def _keys(keys):
    return keys.export()["keys"]


def test_a_seed_gives_the_same_keys_and_none_gives_new_ones():
    assert _keys(SecretKeys(7)) == _keys(SecretKeys(7)) != _keys(SecretKeys(8))
    assert not set(_keys(SecretKeys())) & set(_keys(SecretKeys()))


@pytest.mark.parametrize("seed", [None, 7])
def test_each_purpose_has_a_key_of_its_own(seed):
    keys = SecretKeys(seed)
    assert len(set(_keys(keys))) == 4
    assert [
        int(keys.noise),
        int(keys.sampler),
        int(keys.layers),
        int(keys.weights),
    ] == _keys(keys)


def test_restoring_what_was_exported_gives_the_same_keys():
    keys, other = SecretKeys(7), SecretKeys()
    other.restore(keys.export())
    assert other.export() == keys.export() and other.seeded


def test_refreshing_changes_every_key_and_forgets_the_seed():
    keys = SecretKeys(7)
    keys.refresh()
    assert not set(_keys(keys)) & set(_keys(SecretKeys(7)))
    assert not keys.seeded


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))]
)
def test_a_copy_has_fresh_keys(make):
    keys = SecretKeys(7)
    assert not set(_keys(make(keys))) & set(_keys(keys))


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_copy_of_an_optimizer_has_fresh_keys(make):
    optimizer = runs.sgd(seed=7)
    assert not set(_keys(make(optimizer).keys)) & set(_keys(optimizer.keys))


def test_neither_keras_nor_tensorflow_finds_the_keys():
    optimizer = runs.sgd(seed=1234567)
    shown = " ".join(
        [
            str(optimizer.get_config()),
            str(keras.saving.serialize_keras_object(optimizer)),
            str([v.numpy() for v in optimizer.variables]),
            str(vars(optimizer)),
            repr(optimizer.keys),
            str([v for v in vars(optimizer.keys).values() if type(v) is int]),
        ]
    )
    for secret in (1234567, *_keys(optimizer.keys)):
        assert str(secret) not in shown


def test_a_restored_tensorflow_checkpoint_brings_no_draw_back(tmp_path):
    optimizer = runs.sgd(seed=7)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    optimizer.skip_releases(5)
    before = _keys(optimizer.keys)
    checkpoint.restore(path)
    assert optimizer.releases() == 5
    assert not set(_keys(optimizer.keys)) & set(before)


def test_skipped_releases_are_not_made():
    optimizer = runs.sgd()
    optimizer.release_count.assign_add(2)
    optimizer.skip_releases(10)
    optimizer.skip_releases(4)
    assert (optimizer.releases(), optimizer.releases_made()) == (10, 2)
    optimizer.set_releases(3)
    optimizer.release_count.assign_add(1)
    assert (optimizer.releases(), optimizer.releases_made()) == (4, 3)
