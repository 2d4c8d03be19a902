"""The count of an optimizer's releases, and their limit."""

from typing import Any

from keras_dpopt.optimizer_state import scalar_variable

NO_LIMIT = 2**62


class ReleaseCount:
    """Part of the private optimizers: counts releases and holds the step limit.

    The count is the number of the next release, for which the noise is drawn. It only
    grows, and no release with the limit's number or a higher one happens.
    """

    def _make_release_count(self) -> None:
        self._release_count = scalar_variable(self, "release_count", 0, "int64")
        self._step_limit = scalar_variable(self, "step_limit", NO_LIMIT, "int64")

    @property
    def release_count(self) -> Any:
        """int64 scalar variable: the number of the next release."""
        return self._release_count

    @property
    def step_limit(self) -> Any:
        """int64 scalar variable: the limit."""
        return self._step_limit

    def releases(self) -> int:
        """Returns the release count, on the host."""
        return int(self._release_count.numpy())

    def skip_releases(self, count: int) -> None:
        """Moves the release count up to `count`; it never goes down."""
        self._release_count.assign(max(self.releases(), count))

    def limit_releases(self, left: int) -> None:
        """Allows `left` more releases."""
        self._step_limit.assign(min(self.releases() + left, NO_LIMIT))

    def at_limit(self) -> bool:
        """Whether no further release is allowed."""
        return self.releases() >= int(self._step_limit.numpy())
