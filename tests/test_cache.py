"""Variances and squares of weights that are kept are never those of other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.randomisation import Form


def network(posterior: Form = "full") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 2)
    return vp.variational(nn.Sequential(*layers), logvar=-4.0, posterior=posterior, biases=True).eval()


X = torch.linspace(-1, 1, 72).view(2, 1, 6, 6)


def passed(net: nn.Module, x: Tensor = X) -> vp.Gaussian:
    with torch.no_grad():
        f: vp.Gaussian = vp.DVI(net, x)
    return f


def assert_same(f: vp.Gaussian, g: vp.Gaussian) -> None:
    assert torch.equal(f.mean, g.mean)
    assert torch.equal(f.var, g.var)


@pytest.mark.parametrize("posterior", ["full", "factored", "horseshoe"])
def test_a_pass_with_a_cache_is_the_same(posterior: Form) -> None:
    net, cache = network(posterior), vp.WeightCache()
    expected = passed(net)
    for _ in range(2):
        with cache:
            assert_same(passed(net), expected)


def test_the_second_pass_computes_nothing_from_the_weights() -> None:
    net = network()
    weights, seen = {id(p) for p in net.parameters()}, []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function in (torch.exp, torch.square) and id(args[0]) in weights:
                seen.append(function)
            return function(*args, **(kwargs or {}))

    cache = vp.WeightCache()
    for _ in range(2):
        seen.clear()
        with cache, Watch():
            passed(net)
    assert not seen
    with Watch():
        passed(net)
    assert seen


def by_optimiser(net: nn.Module) -> None:
    optimiser = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
    vp.DVI(net, X).var.sum().backward()
    optimiser.step()


def by_hand(net: nn.Module) -> None:
    with torch.no_grad():
        net.get_parameter("3.weight").mul_(2)


def by_state(net: nn.Module) -> None:
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})


def by_another_parameter(net: nn.Module) -> None:
    net[3].weight_logvar = nn.Parameter(torch.zeros(5, 48))  # type: ignore[index]


def by_fit(net: nn.Module) -> None:
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=2)
    vp.fit(elbo, (X, torch.ones(2, 2)), epochs=1, progress=False)
    net.eval()


@pytest.mark.parametrize(
    "change", [by_optimiser, by_hand, by_state, by_another_parameter, by_fit, nn.Module.double]
)
def test_a_change_of_the_weights_is_noticed(change: Callable[[nn.Module], object]) -> None:
    net, cache = network(), vp.WeightCache()
    with cache:
        before = passed(net)
    change(net)
    x = X.to(next(net.parameters()).dtype)
    with cache:
        after = passed(net, x)
    assert_same(after, passed(net, x))
    assert not torch.equal(after.var.float(), before.var)


def test_weights_of_two_networks_are_not_mixed_up() -> None:
    net, cache = network(), vp.WeightCache()
    other = copy.deepcopy(net)
    by_hand(other)
    with cache:
        passed(net)
        assert_same(passed(other), passed(copy.deepcopy(other)))
    both = len(cache._kept)
    del net
    assert len(cache._kept) == both / 2


def test_gradients_do_not_see_kept_values() -> None:
    net, cache = network(), vp.WeightCache()
    with cache:
        passed(net)
        vp.DVI(net, X).var.sum().backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if name.endswith("logvar"))


def test_a_cache_is_open_in_one_thread_only() -> None:
    net, cache = network(), vp.WeightCache()
    with cache, ThreadPoolExecutor(1) as pool:
        pool.submit(passed, net).result()
    assert not cache._kept


def test_compiled_passes_ignore_the_cache() -> None:
    net, cache = network(), vp.WeightCache()
    run = torch.compile(lambda x: vp.DVI(net, x), fullgraph=True, backend="eager")
    with cache, torch.no_grad():
        f = run(X)
        by_hand(net)
        g = run(X)
    assert not torch.equal(f.var, g.var)


def test_a_frozen_weight_is_kept_while_others_are_trained_and_none_that_vmap_sees() -> None:
    net, x = network(), torch.linspace(-1, 1, 36).view(1, 1, 6, 6)
    logvar = next(p for name, p in net.named_parameters() if name.endswith("weight_logvar"))
    logvar.requires_grad_(False)
    expected = vp.DVI(net, x)
    with vp.WeightCache():
        mapped = torch.func.vmap(lambda x: vp.DVI(net, x).var)(x.unsqueeze(0))[0]
        for _ in range(2):
            f = vp.DVI(net, x)
            assert_same(f, expected)
            (f.mean + f.var).sum().backward()  # weights that are trained have gradients in every pass
    torch.testing.assert_close(mapped, expected.var)
    assert logvar.grad is None
    assert all(p.grad is not None for p in net.parameters() if p is not logvar)
