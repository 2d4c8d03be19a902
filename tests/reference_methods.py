"""Every method in float64 NumPy, from the equations of SPEC.md and from nothing else.

What `held_out_test.py` holds the library to, on a problem that no golden value is of.
"""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Toy:
    """l_i(th) = sum_j 0.5*H_ij*(th_j - c_ij)^2 + 0.25*q*(th_j - c_ij)^4.

    `noise(t, k)` and `draw(t, k)` are the k-th vectors of normals of step t, of the
    mechanism and of the sampled weights.
    """

    theta0: np.ndarray
    curvature: np.ndarray
    centers: np.ndarray
    quartic: float
    clip: float
    sigma: float
    batch_size: int
    noise: Callable
    draw: Callable

    def gradients(self, theta):
        distance = theta - self.centers
        return self.curvature * distance + self.quartic * distance**3

    def hessians(self, theta):
        """The diagonals; the rest is zero."""
        return self.curvature + 3 * self.quartic * (theta - self.centers) ** 2

    @property
    def sigma_w(self):
        return self.sigma * self.clip / self.batch_size

    def private(self, records, t, first=0, sigma=None):
        """(0.1): records of one or several vectors' length, one clip."""
        norms = np.linalg.norm(records, axis=1, keepdims=True)
        total = (records * np.minimum(1, self.clip / norms)).sum(axis=0)
        vectors = records.shape[1] // len(self.theta0)
        z = np.concatenate([self.noise(t, first + k) for k in range(vectors)])
        sigma = self.sigma if sigma is None else sigma
        return (total + sigma * self.clip * z) / self.batch_size


def unit(vector):
    norm = np.linalg.norm(vector)
    return vector / norm if norm > 0 else np.zeros_like(vector)


def train(toy, rate, observe, change, smooth=lambda t, g: g, decay=0.0):
    """Yields theta_1, theta_2, ..: observe, filter, update, decay."""
    theta, last, g = toy.theta0, np.zeros_like(toy.theta0), np.zeros_like(toy.theta0)
    for t in range(10**6):
        g = observe(toy, t, theta, last, g)
        new = (1 - rate(t) * decay) * theta + change(t, rate(t), smooth(t, g), g)
        last, theta = new - theta, new
        yield theta


# -------------------------------------------------- where the gradient is taken: g_t


def at_theta(toy, t, theta, last, g):
    return toy.private(toy.gradients(theta), t)


def two_points(kappa, gamma):
    """Section 7(a)."""
    a = (1 - kappa) / (kappa * gamma)

    def observe(toy, t, theta, last, g):
        u = a * toy.gradients(theta + gamma * last) + (1 - a) * toy.gradients(theta)
        return toy.private(u, t)

    return observe


def after_ascent(rho, along_update=False):
    """Section 16, DP-SAT and its momentum variant."""

    def observe(toy, t, theta, last, g):
        e = rho * unit(-last if along_update else g)
        return toy.private(toy.gradients(theta + e), t)

    return observe


def two_queries(rho):
    """Section 16, DP-SAM."""

    def observe(toy, t, theta, last, g):
        p = toy.private(toy.gradients(theta), t)
        return toy.private(toy.gradients(theta + rho * unit(p)), t, first=1)

    return observe


def bias_aware(lam, r=None):
    """Section 17; exact without r."""

    def observe(toy, t, theta, last, g):
        here = toy.gradients(theta)
        records = []
        for i, g_i in enumerate(here):
            if r is None:
                records.append(g_i + lam * toy.hessians(theta)[i] * unit(g_i))
            else:
                there = toy.gradients(theta + r * unit(g_i))[i]
                records.append((1 - lam / r) * g_i + lam / r * there)
        return toy.private(np.array(records), t)

    return observe


# ----------------------------------------------------------------- temporal filters


def ema(kappa, first_gradient):
    """Section 7(a), both inits of 7(b)."""
    state = None

    def smooth(t, g):
        nonlocal state
        if t == 0:
            state = g if first_gradient else kappa * g
        else:
            state = (1 - kappa) * state + kappa * g
        return state

    return smooth


def innovation(omega):
    """Section 10(a), in the equivalent form of the second order."""
    past = [0.0, 0.0]

    def smooth(t, g):
        f = (2 - 2 * omega) * past[-1] - (1 - omega) * past[-2] + omega * g
        past.append(f)
        return f

    return smooth


def low_pass(a, b):
    """Section 9(a)."""
    ms, gs, cs = [], [], []

    def smooth(t, g):
        gs.append(g)
        past = lambda xs: [  # noqa: E731
            (a_j, xs[t - j]) for j, a_j in enumerate(a, 1) if j <= t
        ]
        now = [b_j for j, b_j in enumerate(b) if j <= t]
        ms.append(
            sum(b_j * gs[t - j] for j, b_j in enumerate(now))
            - sum(a_j * m for a_j, m in past(ms))
        )
        cs.append(sum(now) - sum(a_j * c for a_j, c in past(cs)))
        return ms[t] / cs[t]

    return smooth


def noise_gains(make_filter, steps):
    """Var(filtered noise)/Var(noise) at each step: squared weights of all inputs."""
    smooth = make_filter()
    return [np.sum(smooth(t, row) ** 2) for t, row in enumerate(np.eye(steps))]


# --------------------------------------------------------------------- update rules


def sgd(momentum=0.0, nesterov=False):
    """Section 1, in Keras' form."""
    v = 0.0

    def change(t, eta, f, g):
        nonlocal v
        v = momentum * v - eta * f
        return momentum * v - eta * f if nesterov else v

    return change


def adam(b1, b2, eps=0.0, variances=None, floor=None, start=0, of_raw=False):
    """Sections 2, 4, 8 and 10; `variances[t]` is the noise's in what v is made of."""
    m = v = n = 0.0

    def change(t, eta, f, g):
        nonlocal m, v, n
        k = t + 1
        m = b1 * m + (1 - b1) * f
        v = b2 * v + (1 - b2) * (g if of_raw else f) ** 2
        v_bar = v / (1 - b2**k)
        if variances is not None:
            n = b2 * n + (1 - b2) * variances[t]
            v_bar = np.maximum(v_bar - (n / (1 - b2**k) if k > start else 0), floor)
        return -eta * (m / (1 - b1**k)) / (np.sqrt(v_bar) + eps)

    return change


def rmsprop(b2, nu):
    """Section 6."""
    v = 0.0

    def change(t, eta, f, g):
        nonlocal v
        v = b2 * v + (1 - b2) * f**2
        return -eta * f / (np.sqrt(v) + nu)

    return change


# ----------------------------------------------------------------- posterior methods


def ivon(
    toy,
    rate,
    ess,
    h0,
    delta,
    b1,
    b2,
    samples,
    price=False,
    scale=None,
    xi=np.inf,
    rescale=True,
):
    """Sections 11 and 12, in h and not in h + delta."""
    m, h, mom = toy.theta0, h0, 0.0
    for t in range(10**6):
        draws = [toy.draw(t, s) for s in range(samples)]
        gs = [toy.gradients(m + e / np.sqrt(ess * (h + delta))) for e in draws]
        g = np.mean(gs, axis=0)
        if price:
            # One sample's product is made after the noise, several in the record.
            product = np.mean([e * x for e, x in zip(draws, gs, strict=True)], axis=0)
            if samples > 1:
                g, product = np.split(toy.private(np.hstack([g, product]), t), 2)
            else:
                g = toy.private(g, t)
                product = draws[0] * g
            h_hat = ess * (h + delta) * product / np.sqrt(ess * (h + delta))
        else:
            g = toy.private(g, t)
            h_hat = (scale or ess) * np.maximum(g**2 - toy.sigma_w**2, 0)
        mom = b1 * mom + (1 - b1) * g
        h = (
            b2 * h
            + (1 - b2) * h_hat
            + 0.5 * (1 - b2) ** 2 * (h - h_hat) ** 2 / (h + delta)
        )
        alpha = rate(t) * (h0 + delta if rescale else 1)
        preconditioned = (mom / (1 - b1 ** (t + 1)) + delta * m) / (h + delta)
        m = m - alpha * np.clip(preconditioned, -xi, xi)
        yield m


def sgld(toy, rate, n, precision, temperature, least):
    """Section 13."""
    theta = toy.theta0
    for t in range(10**6):
        own = 2 * toy.batch_size * np.sqrt(temperature / rate(t)) / (n * toy.clip)
        g = toy.private(toy.gradients(theta), t, sigma=max(own, least))
        theta = theta - rate(t) / 2 * (n * g + precision * theta)
        yield theta


def bayes_by_backprop(toy, rate, n, s0, rho0):
    """Section 14."""
    mu, rho = toy.theta0, np.full_like(toy.theta0, rho0)
    for t in range(10**6):
        s, slope, e = np.log1p(np.exp(rho)), 1 / (1 + np.exp(-rho)), toy.draw(t, 0)
        g = toy.gradients(mu + s * e)
        of_mu, of_rho = np.split(toy.private(np.hstack([g, g * e * slope]), t), 2)
        mu = mu - rate(t) * (of_mu + mu / s0**2 / n)
        rho = rho - rate(t) * (of_rho + (-1 / s + s / s0**2) * slope / n)
        yield mu
