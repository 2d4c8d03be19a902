"""DP-IVON."""

import math

import keras

from keras_dpopt import posterior_queries, posterior_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPIVON(DPOptimizer):
    """Variational learning of a Gaussian posterior over the weights, privately.

    "DP-IVON-Gradsq: Differentially Private Squared-Gradient Improved Variational Online
    Newton"; its displayed equations were not to be had, so the forms are those of IVON,
    Shen et al., "Variational Learning is Effective for Large Deep Networks" (ICML
    2024), Algorithm 1:

        theta = m + e / sqrt(ess*(h + delta)),  e ~ N(0, I): one draw for the batch
        g     = (1/B) * (sum_i clip(grad l_i(theta), C) + sigma*C*z)
        v_hat = max(g^2 - (sigma*C/B)^2, 0),    h_hat = curvature_scale * v_hat
        h'    = b2*h + (1-b2)*h_hat + (1-b2)^2/2 * (h - h_hat)^2 / (h + delta)
        mom'  = b1*mom + (1-b1)*g
        m'    = m - alpha * (mom' / (1 - b1^k) + delta*m) / (h' + delta),    k = t + 1

    with alpha = lr*(hess_init + delta), or lr if not `rescale_lr`; h_hat is that of
    hessian="gradsq". The posterior is N(m, 1/(ess*(h + delta))): see
    `keras_dpopt.posterior_predict`.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.1.
        ess: Effective sample size, positive. `None`, the default, takes the number N of
            training records of the fit.
        hess_init: h at first, positive. Defaults to 1.0, as IVON's. If h stays there,
            lower it.
        weight_decay: delta, positive, inside the preconditioned step and the posterior,
            not decoupled. Defaults to 1e-4.
        beta_1: b1 in [0, 1). Defaults to 0.9.
        beta_2: b2 in [0, 1]. Defaults to 0.999: private runs have about a thousand
            steps, in which IVON's own 0.99999 would leave h where it is.
        hessian: "gradsq", or "price": h_hat = ess*(h+delta)*mean_s((theta_s-m)*g_s),
            which the noise does not bias.
        curvature_scale: In the place of `ess` in h_hat of "gradsq", positive. The
            squared gradient of a mean over B records estimates the curvature over B,
            so that `ess` overestimates it by ess/B.
        mc_samples: S, how many samples of theta are averaged in each record before its
            clip. Defaults to 1.
        clip_radius: xi: entries of the preconditioned step are clipped to [-xi, xi].
            Defaults to infinity.
        rescale_lr: See alpha. Defaults to `True`.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        The sample depends on earlier releases alone, so each step is one Gaussian
        release with L2 sensitivity C, as in `DPSGD`. With hessian="price" and several
        samples the record is the pair (mean_s g_s, mean_s e_s*g_s) under one clip.

    Deviations from the paper:
        The paper does not say whether it corrects the momentum's bias, rescales the
        learning rate or draws several samples: as IVON here. Under pure noise
        E[v_hat] = 0.484*(sigma*C/B)^2, a floor that clipping at zero leaves. With
        several samples "gradsq" squares the mean of the samples' gradients (one release
        has no mean of squares). h + delta is kept within [1e-30, 1e30]. Training
        metrics are those of the sampled weights.

    Example:
        >>> optimizer = DPIVON(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.get_config()["hessian"]
        'gradsq'
    """

    def __init__(
        self,
        learning_rate=0.1,
        *,
        ess: float | None = None,
        hess_init=1.0,
        weight_decay=1e-4,
        beta_1=0.9,
        beta_2=0.999,
        hessian="gradsq",
        curvature_scale: float | None = None,
        mc_samples=1,
        clip_radius=math.inf,
        rescale_lr=True,
        **kwargs,
    ):
        products = hessian == "price" and mc_samples != 1
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=posterior_queries.PrecisionQuery(ess, mc_samples, products),
            mechanism=None,
            filter=None,
            rule=posterior_rules.IVON(
                ess=ess,
                hess_init=hess_init,
                weight_decay=weight_decay,
                beta_1=beta_1,
                beta_2=beta_2,
                hessian=hessian,
                curvature_scale=curvature_scale,
                clip_radius=clip_radius,
                rescale_lr=rescale_lr,
            ),
            noise_correction="unfiltered" if hessian == "gradsq" else None,
            weight_decay=None,  # delta is the rule's, not decoupled
            **kwargs,
        )

    def posterior_scale(self):
        """Returns the posterior's standard deviations, a tensor a variable."""
        ess = self.rule.ess or float(self._train_size.numpy())
        return [
            keras.ops.rsqrt(ess * slots["precision"].value)
            for slots in self._state.per_variable
        ]

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        rule = self.rule
        config.update(
            ess=rule.ess,
            hess_init=rule.hess_init,
            weight_decay=rule.weight_decay,
            beta_1=rule.beta_1,
            beta_2=rule.beta_2,
            hessian=rule.hessian,
            curvature_scale=rule.curvature_scale,
            mc_samples=self.query.samples,
            clip_radius=rule.clip_radius,
            rescale_lr=rule.rescale_lr,
        )
        return config
