"""What Keras calls while it trains and evaluates, besides the training step itself."""

from keras_dpopt import distribution, keras_compat
from keras_dpopt.types import MixIn


class TrainingHooks(MixIn):
    """Part of the private models: how Keras makes and reduces its steps."""

    def test_step(self, data):
        """Does one step of an evaluation; Keras calls it."""
        return distribution.reducible(super().test_step(data))

    def make_train_function(self, force=False):
        """Makes Keras' train function without XLA around the whole step.

        XLA would compile again for each number of microbatches; the function of one
        microbatch is compiled instead.
        """
        jit_compile, self.jit_compile = self.jit_compile, False
        try:
            made = super().make_train_function(force)
            self._own_train_function = self.train_function
            return made
        finally:
            self.jit_compile = jit_compile

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if self.fit_run is not None:
            return  # Keras would take a batch out of the iterator: `fit` has built all
        if iterator is not None and keras_compat.strategies_of(self)[0] is not None:
            iterator, data_batch = None, distribution.first_share(self, iterator)
        super()._maybe_symbolic_build(iterator, data_batch)
