"""DP-SGLD."""

from typing import Any

import keras

from keras_dpopt import arguments, langevin_mechanism, posterior_rules
from keras_dpopt.dp_optimizer import DPOptimizer
from keras_dpopt.run_plan import ConstantRate


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPSGLD(DPOptimizer):
    """Stochastic gradient Langevin dynamics, whose own noise is the privacy noise.

    Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics" (ICML
    2011), equation 4, with clipped gradients, as Wang, Fienberg and Smola, "Privacy for
    Free" (ICML 2015). With step size eta_t (the learning rate):

        theta_{t+1} = theta_t - (eta_t/2) * (N*g_t + prior_precision*theta_t)
        g_t         = (1/B) * (sum_i clip(grad l_i(theta_t), C) + sigma_t*C*z_t)
        sigma_t     = max(noise_multiplier, 2*B*sqrt(temperature)/(N*C*sqrt(eta_t)))

    so that the noise on theta has the variance eta_t*temperature of the dynamics. It is
    DP-SGD with learning rate eta*N/2, L2 regularization prior_precision/N and this
    noise multiplier. The weights of the steps are samples of the posterior at that
    temperature: keep some with `keras_dpopt.PosteriorSamples`.

    Args:
        learning_rate: eta, a positive float or a
            `keras.optimizers.schedules.LearningRateSchedule`. Defaults to 1e-4. It
            cannot be assigned, because the noise follows it and is accounted before the
            first step.
        temperature: Of the sampled posterior, positive. Defaults to 1.0.
        prior_precision: Of the prior N(0, 1/prior_precision), non-negative. Defaults to
            1.0.
        train_size: N, a positive int. `None`, the default, takes that of the fit.
        **kwargs: The arguments of every private optimizer, but `clipping`,
            `rescale_to_unit_norm` and `dp_sum_query`. `noise_multiplier` is the least
            one: 0 leaves the noise to the dynamics, and a larger one raises it where
            the budget asks for more (a warmer posterior).

    Privacy:
        Each step is a Gaussian release with L2 sensitivity C and the noise multiplier
        sigma_t; the ledger composes the different ones. Calibrate the least one with
        `keras_dpopt.noise_multiplier(..., optimizer=make)`.

    Deviations from the papers:
        Drift eta/2 with noise variance eta is Welling and Teh's convention; others have
        eta and 2*eta.

    Example:
        >>> optimizer = DPSGLD(l2_norm_clip=1.0, noise_multiplier=0.0)
        >>> optimizer.get_config()["learning_rate"]
        0.0001
    """

    def __init__(
        self,
        learning_rate=1e-4,
        *,
        temperature=1.0,
        prior_precision=1.0,
        train_size: int | None = None,
        l2_norm_clip: Any = None,
        noise_multiplier: Any = None,
        **kwargs,
    ):
        arguments.refuse_for_own_mechanism("DPSGLD", **kwargs)
        self._check_names(kwargs)
        if isinstance(learning_rate, dict):
            learning_rate = keras.saving.deserialize_keras_object(learning_rate)
        schedules = keras.optimizers.schedules.LearningRateSchedule
        if not isinstance(learning_rate, schedules):
            learning_rate = ConstantRate(learning_rate)
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=langevin_mechanism.LangevinMechanism(
                l2_norm_clip, noise_multiplier, temperature, train_size
            ),
            filter=None,
            rule=posterior_rules.Langevin(prior_precision, train_size),
            noise_correction=None,
            **kwargs,
        )

    @property
    def learning_rate(self):
        """The learning rate of the next step."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any):
        raise ValueError(
            "The learning rate of DPSGLD cannot be assigned: its noise follows it and "
            "is accounted before the first step. Pass a schedule to the constructor."
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        if isinstance(self._learning_rate, ConstantRate):
            config["learning_rate"] = self._learning_rate.value
        config.update(
            temperature=self.mechanism.temperature,
            prior_precision=self.rule.prior_precision,
            train_size=self.rule.train_size,
        )
        return config
