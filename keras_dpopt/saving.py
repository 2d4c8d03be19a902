"""Saving and loading of private models: where Keras' ways would lose the ledger."""

import keras

from keras_dpopt.types import MixIn


class PrivateSaving(MixIn):
    """Part of the private models: saves and loads weights together with the ledger."""

    def save(self, filepath, overwrite=True, zipped=None, **kwargs):
        """Saves the model with its ledger, as a `.keras` file.

        Args:
            filepath: As in Keras.
            overwrite: As in Keras.
            zipped: As in Keras.
            **kwargs: As in Keras.

        Raises:
            ValueError: for Keras' old HDF5 format, which has no place for the ledger.
        """
        if str(filepath).endswith((".h5", ".hdf5")):
            raise ValueError(
                "The old HDF5 format has no place for the privacy ledger. Save to a "
                "`.keras` file, or the weights alone with "
                "`save_weights('name.weights.h5')`."
            )
        super().save(filepath, overwrite=overwrite, zipped=zipped, **kwargs)

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        """Loads weights, optimizer state and ledger; the keys are drawn anew.

        The ledger of the file is added to that of the model, which keeps what it has.

        Args:
            filepath: As in Keras.
            skip_mismatch: As in Keras.
            **kwargs: As in Keras.
        """
        if self.built and self.compiled and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)
        if not str(filepath).endswith((".keras", ".weights.h5", ".weights.json")):
            self.privacy_ledger.note_missing()  # an old format, without a ledger

    def get_compile_config(self):
        """Returns the configuration of `compile`."""
        config = super().get_compile_config()
        if config:
            config["jit_compile"] = self.jit_microbatch or "auto"
        return config

    def compile_from_config(self, config):
        """Compiles from a saved configuration; Keras skips this for custom models."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)
