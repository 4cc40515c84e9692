"""Probabilistic backpropagation against an implementation of its own: plain NumPy, gradients by the complex step."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.special
import torch
from torch import nn

import varprop as vp


def network(*sizes, **options):
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return vp.variational(nn.Sequential(*layers[:-1]).double(), biases=True, **options)


def regression(n, inputs, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, inputs))
    y = np.sin(x.sum(1, keepdims=True)) + 0.1 * rng.normal(size=(n, 1))
    return x, y


# ------------------------------------------------------------------------------- the same algorithm, written a second time


class NumpyPBP:
    """Layers are matrices [weight | bias] of means and variances."""

    def __init__(self, means):
        self.m = [m.copy() for m in means]
        self.v = [np.full(m.shape, 6 / 5) for m in means]
        self.a = self.b = self.ap = self.bp = 6.0
        self.site_mean = [np.zeros(m.shape) for m in means]
        self.site_precision = [np.full(m.shape, 5 / 6) for m in means]
        self.site_a = [np.zeros(m.shape) for m in means]
        self.site_b = [np.zeros(m.shape) for m in means]

    @staticmethod
    def forward(m, v, x):
        h_m, h_v = x, np.zeros_like(x)
        for layer, (M, V) in enumerate(zip(m, v, strict=True)):
            if layer > 0:
                t = a_m / np.sqrt(a_v)  # noqa: F821
                Phi, phi = scipy.special.ndtr(t), np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi)
                SR = phi + t * Phi
                h_m, h_v = np.sqrt(a_v) * SR, a_v * (Phi + t * SR - SR**2)  # noqa: F821
            h_m, h_v = np.append(h_m, 1.0), np.append(h_v, 0.0)
            n = len(h_m)
            a_m, a_v = M @ h_m / np.sqrt(n), (V @ (h_v + h_m**2) + (M * M) @ h_v) / n
        return a_m[0], a_v[0]

    @staticmethod
    def log_normal(y, m, v):
        return -0.5 * np.log(2 * np.pi * v) - (y - m) ** 2 / (2 * v)

    def gradients(self, x, y):
        """d log Z / dm and dv of every weight: the imaginary part of log Z at m + ih, divided by h."""
        h, noise = 1e-30, self.b / (self.a - 1)

        slopes = ([np.zeros(w.shape) for w in self.m], [np.zeros(w.shape) for w in self.m])
        for which in (0, 1):
            for layer, w in enumerate(self.m):
                for entry in np.ndindex(w.shape):
                    moments = [[w.astype(complex) for w in ws] for ws in (self.m, self.v)]
                    moments[which][layer][entry] += 1j * h
                    m, v = self.forward(*moments, x.astype(complex))
                    slopes[which][layer][entry] = self.log_normal(y, m, v + noise).imag / h
        return slopes

    @staticmethod
    def gamma(a, b, z, z1, z2):
        new_a = 1 / (np.exp(z + z2 - 2 * z1) * (a + 1) / a - 1)
        new_b = 1 / (np.exp(z2 - z1) * (a + 1) / b - np.exp(z1 - z) * a / b)
        return new_a, new_b

    def visit(self, x, y):
        a, b = self.a, self.b
        mo, vo = self.forward(self.m, self.v, x)
        for m, v, g_m, g_v in zip(self.m, self.v, *self.gradients(x, y), strict=True):
            new_m, new_v = m + v * g_m, v - v**2 * (g_m**2 - 2 * g_v)
            keep = (new_v <= 1e-100) | ~np.isfinite(new_v)
            m[:], v[:] = np.where(keep, m, new_m), np.where(keep, v, new_v)
        self.a, self.b = self.gamma(a, b, *(self.log_normal(y, mo, vo + b / k) for k in (a - 1, a, a + 1)))

    def refine_prior(self):
        for layer, matrix in enumerate(self.m):
            outputs, inputs = matrix.shape
            order = [(j, i) for j in range(outputs) for i in range(inputs - 1)] + [(j, inputs - 1) for j in range(outputs)]
            for entry in order:
                self.refine(layer, entry)

    def refine(self, layer, e):
        m, v, mn, vn, an, bn = (s[layer] for s in (self.m, self.v, self.site_mean, self.site_precision, self.site_a, self.site_b))
        vc = 1 / (1 / v[e] - vn[e])
        mc = vc * (m[e] / v[e] - mn[e])
        ac, bc = self.ap - an[e], self.bp + bn[e]
        if not (0 < vc < 1e6 and bc > 0 and ac > 1):
            return
        v0, v1, v2 = (vc + bc / k for k in (ac - 1, ac, ac + 1))
        z = [-0.5 * np.log(vi) - mc**2 / (2 * vi) for vi in (v0, v1, v2)]
        dm, dv = -mc / v0, -1 / (2 * v0) + mc**2 / (2 * v0**2)
        m[e], v[e] = mc + vc * dm, vc - vc**2 * (dm**2 - 2 * dv)
        self.ap, self.bp = self.gamma(ac, bc, *z)
        mn[e], vn[e] = m[e] / v[e] - mc / vc, 1 / v[e] - 1 / vc
        an[e], bn[e] = (self.ap - 1) - (ac - 1), -self.bp + bc


def matrices(net):
    """[weight | bias] of means and of variances."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    join = lambda w, b: torch.cat([w, b.unsqueeze(-1)], 1).detach().numpy()  # noqa: E731
    means = [join(layer.weight, layer.bias) for layer in layers]
    return means, [join(layer.weight_logvar.exp(), layer.bias_logvar.exp()) for layer in layers]


@pytest.mark.parametrize("sizes", [(3, 5, 1), (3, 4, 3, 1)])
def test_epochs_equal_the_numpy_implementation(sizes):
    x, y = regression(12, sizes[0])
    net = network(*sizes)
    pbp = vp.AssumedDensityFilter(net)
    pbp.load()
    reference = NumpyPBP(matrices(net)[0])
    rng = np.random.default_rng(1)
    for _ in range(2):
        order = rng.permutation(len(x))
        for i in order:
            reference.visit(x[i], y[i, 0])
        pbp.update(torch.tensor(x[order]), torch.tensor(y[order]))
        reference.refine_prior()
        pbp.refresh()
        pbp.load()
        for ours, theirs in zip(matrices(net), (reference.m, reference.v), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-8)
        gammas = [*pbp.belief.noise, *pbp.prior]
        np.testing.assert_allclose([g.item() for g in gammas], [reference.a, reference.b, reference.ap, reference.bp], rtol=1e-8)
