"""The secret keys of a run.

Whoever holds the noise key can subtract the noise, so the keys live in a plain object:
neither Keras nor TensorFlow tracks what is in it, and no save, checkpoint or export
finds it. `keras_dpopt.BackupAndRestore` alone writes them, to its own directory.
"""

from typing import Any

import tensorflow as tf

from keras_dpopt import prng

_PURPOSES = ("noise", "sampler", "layers", "weights")


class SecretKeys:
    """Four 64-bit Philox keys: for noise, sampler, layers and sampled weights.

    Args:
        seed: `None` draws the keys from the operating system. An int makes the run
            repeatable, and not private against whoever knows it.
    """

    def __init__(self, seed: int | None = None):
        self.seeded = seed is not None
        values = [
            prng.new_key() if seed is None else prng.key_from_seed(seed, purpose)
            for purpose in _PURPOSES
        ]
        self._strategy = tf.distribute.get_strategy()
        with tf.init_scope():
            # Under a strategy of several workers, all get the values of the first.
            self._variable = tf.Variable(
                values, dtype=tf.int64, trainable=False, name="secret_keys"
            )

    @property
    def noise(self) -> tf.Tensor:
        """Scalar int64 key of the noise."""
        return self._variable[0]

    @property
    def sampler(self) -> tf.Tensor:
        """Scalar int64 key of the batch sampler."""
        return self._variable[1]

    @property
    def layers(self) -> tf.Tensor:
        """Scalar int64 key of dropout and other layer randomness."""
        return self._variable[2]

    @property
    def weights(self) -> tf.Tensor:
        """Scalar int64 key of weights that are sampled from a posterior."""
        return self._variable[3]

    def refresh(self) -> None:
        """Draws new keys, for a continuation that is no exact replay."""
        self.seeded = False
        values = [prng.new_key() for _ in _PURPOSES]
        self._variable.assign(_of_first_worker(self._strategy, values))

    def export(self) -> dict:
        """Returns the keys; the caller guards them (see `BackupAndRestore`)."""
        return {"keys": self._variable.numpy().tolist(), "seeded": self.seeded}

    def restore(self, exported: dict) -> None:
        """Takes the keys of `export`."""
        self._variable.assign(exported["keys"])
        self.seeded = bool(exported["seeded"])

    def __reduce__(self):
        # A copy of an optimizer that drew the same noise again would cancel it.
        return (SecretKeys, ())

    def __deepcopy__(self, memo):
        del memo
        return SecretKeys()


def _of_first_worker(strategy: tf.distribute.Strategy, values: list[int]) -> Any:
    """Returns the values of the first worker, on all of them; all have to call it."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return values

    def of_first():
        context = tf.distribute.get_replica_context()
        first = tf.equal(context.replica_id_in_sync_group, 0)
        mine = tf.where(first, tf.constant(values, tf.int64), 0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    return strategy.experimental_local_results(strategy.run(of_first))[0]


class ForkOnRestore(tf.train.experimental.PythonState):
    """Draws fresh keys when a `tf.train.Checkpoint` is restored.

    The checkpoint brings back old weights; old draws must not come back with them.

    Args:
        keys: The keys to refresh; nothing of them is saved.
    """

    def __init__(self, keys: SecretKeys):
        super().__init__()
        self._refresh = keys.refresh

    def serialize(self) -> str:
        """Returns nothing to save."""
        return ""

    def deserialize(self, string_value) -> None:
        """Draws fresh keys."""
        del string_value
        self._refresh()
