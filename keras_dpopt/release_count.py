"""The count of an optimizer's releases, and their limit."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from keras_dpopt.types import MixIn

NO_LIMIT = 2**62


@dataclasses.dataclass
class _Counters:
    """A plain object, so that no checkpoint finds the variables and turns them back."""

    count: Any
    limit: Any
    ahead: Any
    key: Any
    skipped: int = 0


class ReleaseCount(MixIn):
    """Part of the private optimizers: counts releases and holds the step limit.

    The count is the number of the next release, for which the noise is drawn. It only
    grows, and no release with the limit's number or a higher one happens.
    """

    def _make_release_count(self) -> None:
        self._counters = _Counters(
            _variable("release_count", 0),
            _variable("step_limit", NO_LIMIT),
            _variable("releases_ahead", 0),
            _variable("planned_key", 0),
        )

    @property
    def release_count(self) -> Any:
        """int64 scalar variable: the number of the next release."""
        return self._counters.count

    @property
    def step_limit(self) -> Any:
        """int64 scalar variable: the limit."""
        return self._counters.limit

    def releases(self) -> int:
        """Returns the release count, on the host."""
        return int(self.release_count.numpy())

    def releases_made(self) -> int:
        """Returns how many releases were made here; skipped numbers do not count."""
        return self.releases() - self._counters.skipped

    def set_releases(self, count: int) -> None:
        """Sets the release count, for a run that goes on under the keys of a backup."""
        self._counters.skipped += count - self.releases()
        self.release_count.assign(count)

    def skip_releases(self, count: int) -> None:
        """Moves the release count up to `count`; it never goes down."""
        self.set_releases(max(self.releases(), count))

    def limit_releases(self, left: int) -> None:
        """Allows `left` more releases."""
        self.step_limit.assign(min(self.releases() + left, NO_LIMIT))

    def follow_schedule(self) -> None:
        """Remembers how far the releases are ahead of the updates, and the noise key.

        Where the noise follows the learning rate, and so the number of the update, this
        ties the order of the steps to the plan that is accounted. Loading moves both
        counts, and draws another key.
        """
        self._counters.key.assign(self.keys.noise)
        self._counters.ahead.assign(self.releases() - int(self.iterations.numpy()))

    def schedule_checks(self) -> list:
        """Ops that fail in a step that is not the next one of the plan."""
        ahead = self.release_count.value - tf.cast(self.iterations.value, tf.int64)
        return [
            tf.debugging.assert_equal(
                ahead,
                # Read in the order of the graph: the release has been counted.
                self._counters.ahead.value + 1,
                "The number of updates was changed within a fit, and the noise would "
                "not be that which the ledger accounts.",
            ),
            tf.debugging.assert_equal(
                self.keys.noise,
                self._counters.key.value,
                "An optimizer's state was loaded within a fit whose noise follows a "
                "schedule. Load it between two fits.",
            ),
        ]

    def at_limit(self) -> bool:
        """Whether no further release is allowed."""
        return self.releases() >= int(self.step_limit.numpy())


def _variable(name: str, value: int) -> keras.Variable:
    return keras.Variable(
        keras.initializers.Constant(value),
        shape=(),
        dtype="int64",
        trainable=False,
        aggregation="only_first_replica",
        name=name,
    )
