"""BAM."""

import keras

from keras_dpopt import ascent_queries, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class BAM(DPOptimizer):
    """Bias-aware minimisation: the gradient norm of each example is made small too.

    Knolle, Ziller, Usynin, Braren, Makowski, Rueckert and Kaissis, "Bias-Aware
    Minimisation: Understanding and Mitigating Estimator Bias in Private SGD". The loss
    is mean_i (l_i + lambda*||grad l_i||), so that clipping biases the gradient less
    (the displayed equations were not to be had; these are of the text and the code):

        g_i = grad l_i(theta_t)
        u_i = g_i + lambda * H_i g_i / ||g_i||                                  (exact)
        u_i = (1-alpha)*g_i + alpha*grad l_i(theta_t + r*g_i/||g_i||),
              alpha = lambda/r                                                (approx.)
        g_t = (1/B) * (sum_i clip(u_i, C) + sigma*C*z_t)

    and the base rule on g_t: SGD, Adam or AdamW.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        lambda_: Weight of the gradient norms, non-negative; 0 is the base optimizer.
            Defaults to 0.04, the authors' alpha = 0.8 at r = 0.05.
        radius: r of the approximate form, positive. Defaults to 0.05. With
            lambda > r it extrapolates.
        exact: Whether to use the Hessian-vector product; both forms take two backward
            passes. LSTM and GRU layers need the approximate form with the vectorized
            engine. Defaults to `False`.
        base: "sgd" (the default), "adam" or "adamw" ("adam" with `weight_decay` 0.01
            unless it is given).
        momentum: Of base="sgd", in [0, 1). Defaults to 0.
        beta_1: Of Adam, in [0, 1). Defaults to 0.9.
        beta_2: Of Adam, in [0, 1). Defaults to 0.999.
        epsilon: Of Adam, outside the root. Defaults to 1e-8.
        weight_decay: lambda of the decay, decoupled, non-negative, or `None`.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        The ascent is of the example itself, inside its record, and the whole record u_i
        is clipped once: one Gaussian release with L2 sensitivity C, as in `DPSGD`.

    Deviations from the paper:
        An example whose gradient is zero has the record zero (the authors' code divides
        by its norm). The ascended weights are values: nothing has to be restored.

    Example:
        >>> optimizer = BAM(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.query.lambda_ / optimizer.query.radius  # alpha
        0.7999999999999999
    """

    def __init__(
        self,
        learning_rate=0.01,
        *,
        lambda_=0.04,
        radius=0.05,
        exact=False,
        base="sgd",
        momentum=0.0,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        weight_decay: float | None = None,
        **kwargs,
    ):
        rule, weight_decay = update_rules.make_base(
            base,
            noise_correction=None,
            variance_floor=0.0,
            momentum=momentum,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            default_decay=0.01,
        )
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=ascent_queries.PerExampleAscentQuery(lambda_, radius, exact),
            mechanism=None,
            filter=None,
            rule=rule,
            noise_correction=None,
            weight_decay=weight_decay,
            **kwargs,
        )
        # Whole, because the rule has only what its base uses.
        self._own = {
            "lambda_": lambda_,
            "radius": radius,
            "exact": exact,
            "base": base,
            "momentum": momentum,
            "beta_1": beta_1,
            "beta_2": beta_2,
            "epsilon": epsilon,
        }

    def get_config(self):
        """Returns the configuration."""
        return {**super().get_config(), **self._own}
