"""Each peer as its documentation uses it: a training step, and a prediction as normals or classes.

Only the peer's own environment imports it, so everything is imported where it is needed. A peer keeps its own
defaults for priors and posteriors. Numbers get a noise that is learned with the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.operators import declare_torchvision

from ..networks import Case

LEARNING_RATE = 0.01
"""Of Adam, with numbers; with classes it is a tenth."""


class Peer:
    """A plain network, trained to maximum likelihood; the peers change what they have to."""

    samples: tuple[int, ...] = (1,)
    """How many Monte Carlo samples a prediction takes; a single pass is 1."""

    def __init__(self, case: Case, n_data: int) -> None:
        self.classes, self.n_data = case.classes, n_data
        self.net = self.build(case)
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.optimiser = self.make_optimiser()

    def build(self, case: Case) -> nn.Module:
        return case.net()

    def make_optimiser(self) -> torch.optim.Optimizer:
        rate = LEARNING_RATE if self.classes is None else LEARNING_RATE / 10
        return torch.optim.Adam(self.parameters(), lr=rate, fused=True)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.net.parameters(), *([self.log_noise] if self.classes is None else [])]

    def kl(self) -> Tensor | float:
        return 0.0

    def fit_error(self, f: Tensor, var: Tensor | float, y: Tensor) -> Tensor:
        """The negative log-likelihood of an output with this variance."""
        if self.classes is not None:
            return F.cross_entropy(f, y)
        return 0.5 * (self.log_noise + ((f - y).square() + var) * torch.exp(-self.log_noise)).mean()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fit_error(self.net(x), 0.0, y) + self.kl() / self.n_data

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimiser.zero_grad()
        self.loss(x, y).backward()
        self.optimiser.step()

    def epoch(self, statistic_of: tuple[Tensor, Tensor]) -> None:
        """What has to be done after an epoch."""

    def finish(self, x: Tensor, y: Tensor) -> None:
        """What has to be done after training."""

    def outputs(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor | float]:
        """Means and variances of the network's output, with the samples in front."""
        return torch.stack([self.net(x) for _ in range(samples)]), 0.0

    @torch.no_grad()
    def predict(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Means and variances of a mixture, or log-probabilities of classes twice."""
        mean, var = self.outputs(x, samples)
        if self.classes is None:
            return mean, (var + torch.exp(self.log_noise)).expand_as(mean)
        # The usual approximation of a softmax of normal logits; without a variance it is the softmax.
        scale = (1 + math.pi / 8 * torch.as_tensor(var)).rsqrt()
        probs = (mean * scale).softmax(-1).mean(0).log()
        return probs, probs

    def log_likelihood(self, x: Tensor, y: Tensor, samples: int) -> float:
        """Of test data, averaged."""
        mean, var = self.predict(x, samples)
        if self.classes is not None:
            return float(mean.gather(-1, y.unsqueeze(-1)).mean())
        densities = -0.5 * ((mean - y).square() / var + var.log() + math.log(2 * math.pi))
        return float((densities.logsumexp(0) - math.log(len(mean))).mean())


class Sampled(Peer):
    """Weights are sampled at each pass."""

    samples = 10, 30, 100


def replaced(net: nn.Module, layer_of: Callable[[Any], nn.Module]) -> nn.Module:
    """The network with other linear layers and convolutions."""
    for name, child in net.named_children():
        if isinstance(child, nn.Linear | nn.Conv2d):
            setattr(net, name, layer_of(child))
        else:
            replaced(child, layer_of)
    return net


class BayesianTorch(Sampled):
    def build(self, case: Case) -> nn.Module:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

        net = case.net()
        options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
        dnn_to_bnn(net, {**options, "type": "Reparameterization", "moped_enable": False})
        return net

    def kl(self) -> Tensor:
        from bayesian_torch.models.dnn_to_bnn import get_kl_loss

        return get_kl_loss(self.net)


class TorchBNN(Sampled):
    def build(self, case: Case) -> nn.Module:
        import torchbnn

        def layer_of(layer: Any) -> nn.Module:
            if isinstance(layer, nn.Linear):
                return torchbnn.BayesLinear(0, 0.1, layer.in_features, layer.out_features)
            sizes = layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding
            return torchbnn.BayesConv2d(0, 0.1, *sizes)

        self.divergence = torchbnn.BKLLoss(reduction="sum", last_layer_only=False)
        return replaced(case.net(), layer_of)

    def kl(self) -> Tensor:
        return self.divergence(self.net).squeeze()


class Blitz(Sampled):
    def build(self, case: Case) -> nn.Module:
        from blitz.modules import BayesianConv2d, BayesianLinear

        def layer_of(layer: Any) -> nn.Module:
            if isinstance(layer, nn.Linear):
                return BayesianLinear(layer.in_features, layer.out_features)
            options = {"stride": layer.stride, "padding": layer.padding}
            return BayesianConv2d(layer.in_channels, layer.out_channels, layer.kernel_size, **options)

        return replaced(case.net(), layer_of)

    def kl(self) -> Tensor:
        from blitz.losses import kl_divergence_from_nn

        return kl_divergence_from_nn(self.net)


class Ivon(Sampled):
    def make_optimiser(self) -> torch.optim.Optimizer:
        from ivon import IVON

        rate = 10 * LEARNING_RATE
        return IVON(self.parameters(), lr=rate, ess=self.n_data)

    def step(self, x: Tensor, y: Tensor) -> None:
        with self.optimiser.sampled_params(train=True):  # type: ignore[attr-defined]
            self.optimiser.zero_grad()
            self.loss(x, y).backward()
        self.optimiser.step()

    def outputs(self, x: Tensor, samples: int) -> tuple[Tensor, float]:
        found = []
        for _ in range(samples):
            with self.optimiser.sampled_params():  # type: ignore[attr-defined]
                found.append(self.net(x))
        return torch.stack(found), 0.0


class FastBNNs(Peer):
    """Mean and variance in one pass, as here."""

    def build(self, case: Case) -> nn.Module:
        from fastbnns.bnn.base import BNN
        from fastbnns.bnn.losses import KLDivergence

        self.divergence = KLDivergence()
        net: nn.Module = BNN(case.net())
        for p in net.parameters():  # its initial deviations share one entry, which no optimiser can write to
            p.data = p.data.clone(memory_format=torch.contiguous_format)
        return net

    def kl(self) -> Tensor:
        return self.divergence(self.net)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from fastbnns.bnn.types import MuVar

        f = self.net(MuVar(x))
        return f.mu, f.var

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        f, var = self.moments(x)
        if self.classes is not None:  # the logits of a reparametrised sample
            f = f + var.sqrt() * torch.randn_like(f)
        return self.fit_error(f, var, y) + self.kl() / self.n_data

    def outputs(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        f, var = self.moments(x)
        return f.unsqueeze(0), var.unsqueeze(0)


class LaplaceTorch(Peer):
    """A plain network; after training, a Laplace approximation of its last layer."""

    def finish(self, x: Tensor, y: Tensor) -> None:
        from laplace import Laplace
        from torch.utils.data import DataLoader, TensorDataset

        kind = "regression" if self.classes is None else "classification"
        noise = {"sigma_noise": float(torch.exp(self.log_noise / 2))} if self.classes is None else {}
        self.laplace = Laplace(self.net, kind, **noise)
        self.laplace.fit(DataLoader(TensorDataset(x, y), batch_size=128))
        self.laplace.optimize_prior_precision()

    def predict(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        if self.classes is not None:
            probs = self.laplace(x).detach().log()
            return probs, probs
        mean, var = self.laplace(x)
        return mean.detach().unsqueeze(0), (var.squeeze(-1) + torch.exp(self.log_noise)).detach().unsqueeze(0)


class TorchUncertainty(Sampled):
    def build(self, case: Case) -> nn.Module:
        declare_torchvision()
        from torch_uncertainty.layers import BayesConv2d, BayesLinear
        from torch_uncertainty.losses import KLDiv

        def layer_of(layer: Any) -> nn.Module:
            if isinstance(layer, nn.Linear):
                return BayesLinear(layer.in_features, layer.out_features)
            options = {"stride": layer.stride, "padding": layer.padding}
            return BayesConv2d(layer.in_channels, layer.out_channels, layer.kernel_size, **options)

        net = replaced(case.net(), layer_of)
        self.divergence = KLDiv(net)
        return net

    def kl(self) -> Tensor:
        return self.divergence().squeeze()


class VBLL(Peer):
    """A plain network with a variational last layer, whose posterior is in closed form."""

    def build(self, case: Case) -> nn.Module:
        import vbll

        *features, last = case.net().children()
        assert isinstance(last, nn.Linear)
        sizes = last.in_features, last.out_features, 1 / self.n_data
        if case.classes is None:
            return nn.Sequential(*features, vbll.Regression(*sizes))
        return nn.Sequential(*features, vbll.DiscClassification(*sizes, parameterization="diagonal"))

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).train_loss_fn(y)

    @torch.no_grad()
    def predict(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        predicted = self.net(x).predictive
        if self.classes is not None:
            return predicted.probs.log(), predicted.probs
        return predicted.mean.unsqueeze(0), predicted.variance.unsqueeze(0)


class PyTAGI(Peer):
    """Closed-form updates of every weight, without torch; classes are leaves of a binary tree."""

    def build(self, case: Case) -> nn.Module:
        from pytagi import Utils
        from pytagi import nn as tagi

        self.tools, size = Utils(), case.shape[-1]
        outputs = 2 if case.classes is None else self.tools.get_hierarchical_softmax(case.classes).len
        layers: list[Any] = []
        plain = [layer for layer in case.net().children() if not isinstance(layer, nn.Flatten)]
        for layer in plain:
            if isinstance(layer, nn.ReLU):
                layers.append(tagi.ReLU())
            elif isinstance(layer, nn.Conv2d):
                sizes = layer.in_channels, layer.out_channels, layer.kernel_size[0]
                first = {} if layers else {"in_width": size, "in_height": size}
                layers.append(tagi.Conv2d(*sizes, stride=layer.stride[0], **first))
            else:
                width = outputs if layer is plain[-1] else layer.out_features
                layers.append(tagi.Linear(layer.in_features, width))
        if case.classes is None:
            layers.append(tagi.EvenExp())  # the second output is the variance of the noise
        self.tagi = tagi.Sequential(*layers)
        self.tagi.set_threads(1)
        self.updater = tagi.OutputUpdater(self.tagi.device)
        return nn.Module()

    def make_optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.log_noise])  # never used: the updates are its own

    def step(self, x: Tensor, y: Tensor) -> None:
        self.largest = max(len(x), getattr(self, "largest", 0))
        self.tagi(x.flatten().numpy())
        states = self.tagi.output_z_buffer, self.tagi.input_delta_z_buffer
        if self.classes is None:
            self.updater.update_heteros(states[0], y.flatten().numpy(), states[1])
        else:
            seen, at, _ = self.tools.label_to_obs(y.numpy(), self.classes)
            self.updater.update_using_indices(states[0], seen, np.ones_like(seen), at, states[1])
        self.tagi.backward()
        self.tagi.step()

    def predict(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """In batches, because one that is larger than the first would end the process."""
        parts = [self.predict_batch(rows) for rows in x.split(self.largest)]
        means, variances = (torch.cat(part, dim=-2) for part in zip(*parts, strict=True))
        return means, variances

    def predict_batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = (torch.from_numpy(a) for a in self.tagi(x.flatten().numpy()))
        if self.classes is not None:
            tree = self.tools.get_hierarchical_softmax(self.classes)
            rows = zip(mean.view(len(x), -1).numpy(), var.view(len(x), -1).numpy(), strict=True)
            found = [self.tools.obs_to_label_prob(m, v, tree, self.classes) for m, v in rows]
            probs = torch.from_numpy(np.stack(found))[:, : self.classes]
            probs = (probs / probs.sum(1, keepdim=True)).clamp(min=1e-12)
            return probs.log(), probs
        mean, var = mean.view(len(x), 2), var.view(len(x), 2)
        return mean[None, :, :1], (var[:, :1] + mean[:, 1:]).unsqueeze(0)


class Varprop(Peer):
    """This library, with what it recommends: for classes a tenth of the divergence, as its classifier has."""

    method = "dvi"
    tempered = 0.1

    def build(self, case: Case) -> nn.Module:
        import varprop as vp

        net = vp.variational(case.net())
        likelihood = vp.likelihoods.Normal() if case.classes is None else vp.likelihoods.Categorical()
        method, prior = vp.METHODS[self.method], vp.priors.FanIn(4.0)
        n_data = self.n_data if case.classes is None else self.n_data / self.tempered
        return vp.ELBO(net, method, likelihood, prior, n_data=n_data)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y)

    def epoch(self, statistic_of: tuple[Tensor, Tensor]) -> None:
        x, y = statistic_of
        with torch.no_grad():
            elbo: Any = self.net
            statistic = elbo.likelihood.statistic(elbo.latent(x), y)
            if statistic is not None:
                elbo.likelihood.update(statistic)

    def predict(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        elbo: Any = self.net
        p = elbo.predict(x)
        if self.classes is not None:
            return p.probs.log(), p.probs
        return p.mean.unsqueeze(0), p.var.unsqueeze(0)


class VarpropVBP(Varprop):
    method = "vbp"


OURS: dict[str, type[Peer]] = {"plain": Peer, "varprop DVI": Varprop, "varprop VBP": VarpropVBP}
ADAPTERS: dict[str, type[Peer]] = {
    "fastbnns": FastBNNs,
    "bayesian-torch": BayesianTorch,
    "laplace-torch": LaplaceTorch,
    "torchbnn": TorchBNN,
    "blitz": Blitz,
    "ivon": Ivon,
    "vbll": VBLL,
    "pytagi": PyTAGI,
    "torch-uncertainty": TorchUncertainty,
}
