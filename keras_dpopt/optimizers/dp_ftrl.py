"""DP-FTRL."""

from typing import Any

import keras

from keras_dpopt import arguments, matrix_mechanism, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPFTRL(DPOptimizer):
    """SGD whose noise is that of tree aggregation.

    Kairouz et al., "Practical and Private (Deep) Learning Without Sampling or
    Shuffling" (ICML 2021), Algorithm 1, with independent node noise. The sum of all
    gradients up to step t is released by the nodes of a binary tree that make up
    [0, t]; each node has noise of its own, of standard deviation sigma*C. As noise of a
    single step, with l the number of zero bits at the end of t+1:

        w_t = z_t - sum_{m<l} z_{t-2^m}
        g_t = (1/B) * (sum_i clip(grad l_i(theta_t), C) + sigma*C*w_t)
        v_t = momentum*v_{t-1} - lr*g_t,     theta_{t+1} = theta_t + v_t

    so that a sum over t steps has at most log2(t)+1 draws of noise in it.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        restart: "epoch" (the default) begins a new tree after each ceil(N/B) steps, in
            which a record comes once; `None` has one tree for all of `fit`.
        momentum: mu in [0, 1). Defaults to 0.9.
        nesterov: Whether to use Nesterov momentum.
        **kwargs: The arguments of every private optimizer, but `clipping`,
            `rescale_to_unit_norm` and `dp_sum_query`. `noise_multiplier` is sigma of a
            node, as in TF Privacy.

    Privacy:
        `fit` takes fixed blocks of records in turn. A tree is one Gaussian release with
        noise multiplier sigma / s, where s^2 = the largest sum over nodes of the square
        of the number of a record's steps in the node: the depth of the tree where a
        record comes once in it. Each fit begins a new tree. `train_on_batch` and
        batches of the caller's are refused. Calibrate with
        `keras_dpopt.noise_multiplier(..., optimizer=make)`.

    Deviations from the paper:
        The tree is not completed at the end of an epoch, nor are estimates refined by
        nodes further down (Honaker): those would not be this release.

    Example:
        >>> optimizer = DPFTRL(l2_norm_clip=1.0, noise_multiplier=4.0)
        >>> optimizer.mechanism.restart
        'epoch'
    """

    def __init__(
        self,
        learning_rate=0.01,
        *,
        restart: str | None = "epoch",
        momentum=0.9,
        nesterov=False,
        l2_norm_clip: Any = None,
        noise_multiplier: Any = None,
        **kwargs,
    ):
        arguments.refuse_for_own_mechanism("DPFTRL", **kwargs)
        self._check_names(kwargs)
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=matrix_mechanism.TreeMechanism(
                l2_norm_clip, noise_multiplier, restart
            ),
            filter=None,
            rule=update_rules.SGD(momentum, nesterov),
            noise_correction=None,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            restart=self.mechanism.restart,
            momentum=self.rule.momentum,
            nesterov=self.rule.nesterov,
        )
        return config
