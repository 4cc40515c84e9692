"""Networks that torch.fx cannot follow are recorded, and a graph that does not hold is never walked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import varprop as vp
from varprop import Gaussian
from varprop.graph import store
from varprop.graph.store import Graph, graph_of

from .networks import Function
from .sampling import difference, draws


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def graph(net: nn.Module, *x: Tensor, **options: object) -> Graph:
    kinds = tuple(key for key in vp.DVI.rules if isinstance(key, type) and key is not nn.Module)
    return graph_of(net, kinds, (x, options))


def random(net: nn.Module, logvar: float = -4.0) -> nn.Module:
    torch.manual_seed(0)
    return vp.variational(net, logvar).eval()


class Net(nn.Module):
    """A forward that torch.fx cannot follow, and two layers to use in it."""

    def __init__(self, body: Callable[[Net, Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 6), nn.Linear(6, 3), body
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> object:
        for _ in range(len(x.shape) - 1):  # the length of a shape is unknown to torch.fx
            x = x + 0
        return self.body(self, x)


def by_shape(net: Net, x: Tensor) -> Tensor:
    h = F.relu(net.a(x))
    return net.b(h if h.shape[0] % 2 else 2 * h)


def written(net: Net, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 6)
    out[:, :3] = net.a(x)[:, 3:]
    out[:, 3:] += 1
    return net.b(out)


def joined(net: Net, x: Tensor) -> Tensor:
    return net.b(torch.cat([net.a(x)[:, 3:], torch.ones(len(x), 3)], 1))


def operators(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    h = 1 - h / 2
    h += 3
    first, *rest = h.unbind(1)
    return net.b(torch.stack([first, *rest], 1).T.mT.T.T)


def by_parts(net: Net, x: Tensor) -> Tensor:
    return net.b(torch.cat([*net.a(x).split(2, 1)][::-1], 1))


@pytest.mark.parametrize("body", [by_shape, operators, by_parts])
def test_a_recorded_network_agrees_with_sampling(body: Callable[[Net, Tensor], object]) -> None:
    net, x = random(Net(body)), torch.randn(3, 4)
    assert graph(net, x).way == "recorded"
    assert difference(vp.correlated(net, x), draws(net, x)) == ""


def test_values_written_at_an_index() -> None:
    net, x = random(Net(written)), torch.randn(3, 4)
    same = copy.deepcopy(net)
    same.body = joined
    for f, g in ((vp.DVI(net, x), vp.DVI(same, x)), (vp.correlated(net, x), vp.correlated(same, x))):
        torch.testing.assert_close((f.mean, f.var), (g.mean, g.var))


def test_every_pass_writes_into_a_constant_anew() -> None:
    def counted(net: Net, x: Tensor) -> Tensor:
        count = x.new_zeros(4)
        count += x[0]
        count.scatter_add_(0, torch.tensor([0, 1, 1, 2]), x[0])
        return net.b(F.relu(net.a(x + count)))

    net, x = random(Net(counted)), torch.ones(2, 4)
    first, second = vp.DVI(net, x), vp.DVI(net, x)
    torch.testing.assert_close(first.mean, second.mean, rtol=0.0, atol=0.0)
    torch.testing.assert_close(vp.VBP(net, x).mean, net(x))


def test_functions_of_torch_that_another_package_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    select = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *args: select(*args))
    x = Gaussian(torch.arange(4.0), torch.arange(4.0))
    net = Function(lambda x: x.index_select(0, torch.tensor([2, 0])))
    assert vp.DVI(net, x).var.tolist() == [2.0, 0.0]


def test_recorded_and_traced_graphs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = (
                nn.Conv2d(2, 2, 3, padding=1),
                nn.BatchNorm2d(2),
                nn.Linear(2, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head((F.relu(self.norm(self.conv(x))) + x).flatten(2).mean(-1))

    net, x = random(Block()), torch.rand(2, 2, 5, 5)
    traced = vp.DVI(net, x)
    assert graph(net, x).way == "traced"
    monkeypatch.setattr(store, "trace", lambda *_: None)
    again = copy.deepcopy(net)
    torch.testing.assert_close(pytree.tree_leaves(vp.DVI(again, x)), pytree.tree_leaves(traced))
    assert graph(again, x).way == "recorded"


def test_a_recording_is_made_anew_for_other_shapes_and_only_some_are_kept() -> None:
    net = random(Net(by_shape))
    for rows in (1, 2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(vp.VBP(net, x).mean, net(x))
    names = store._known(net)
    for rows in range(1, store.RECORDINGS + 5):
        vp.VBP(net, torch.randn(rows, 4))
    recordings = [name for name in names.values() if name]
    assert len(recordings) == store.RECORDINGS
    assert all(hasattr(store.GRAPHS, name) for name in recordings)


def test_a_decision_by_values_is_checked_in_every_pass() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.b(net.a(x)) if x.sum() > 0 else net.b(2 * net.a(x))

    net, x = random(Net(body)), torch.rand(3, 4)
    for given in (x, -x, x):
        torch.testing.assert_close(vp.VBP(net, given).mean, net(given))


def test_a_mask_whose_size_depends_on_values_is_checked() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        return net.b(net.a(chosen)).sum(0, keepdim=True) / len(chosen)

    net = random(Net(body))
    few, many = torch.tensor([1.0, -1.0, -1.0, 2.0]), torch.tensor([1.0, 1.0, -1.0, 2.0])
    for first in (few, many, few):
        x = torch.cat([first.unsqueeze(1), torch.ones(4, 3)], 1)
        torch.testing.assert_close(vp.VBP(net, x).mean, net(x))


def test_a_graph_of_torch_fx_that_is_wrong_is_not_walked() -> None:
    class Kind(nn.Module):
        """Asks for the type of its input, which is a symbol while torch.fx traces."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if isinstance(x, Tensor) else x

    net, x = random(Kind()), torch.randn(3, 4)
    assert graph(net, x).way == "recorded"
    torch.testing.assert_close(vp.VBP(net, x).mean, net(x))


def test_operations_of_aten_follow_the_rules_of_their_functions() -> None:
    net, x = random(Net(lambda net, x: net.b(torch.ops.aten.relu.default(net.a(x)) * 2))), torch.randn(3, 4)
    same = copy.deepcopy(net)
    same.body = lambda net, x: net.b(F.relu(net.a(x)) * 2)
    f, g = vp.DVI(net, x), vp.DVI(same, x)
    torch.testing.assert_close((f.mean, f.var), (g.mean, g.var))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda net, x: net.b(net.a(x)) if net.a(x).sum() > 0 else x, "it decides by a value that is random"),
        (lambda net, x: net.b(torch.from_numpy(net.a(x).numpy())), "it hands values to NumPy"),
    ],
)
def test_what_cannot_be_followed_is_an_error(body: Callable[[Net, Tensor], object], reason: str) -> None:
    with pytest.raises(
        vp.NoRuleError, match=f"(?s)cannot take the graph of .*Net, because {reason}.*Net: rule"
    ):
        vp.DVI(random(Net(body)), torch.randn(2, 4))


class Packing(nn.Module):
    """The average state of sequences of different lengths."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.packs, self.layer = packs, nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packs:
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states, _ = rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        else:
            inside = torch.arange(x.shape[1]) < lengths.unsqueeze(-1)
            states = self.layer(x)[0] * inside.unsqueeze(-1)
        return states.sum(1) / lengths.unsqueeze(-1)


def test_packed_sequences_have_a_way_out_that_the_error_names() -> None:
    packing, padding = vp.variational(Packing(packs=True)), vp.variational(Packing(packs=False))
    padding.load_state_dict(packing.state_dict())
    x, lengths = torch.randn(2, 5, 3), torch.tensor([3, 5])
    with pytest.raises(vp.NoRuleError, match=r"packs sequences for `layer` \(give that layer padded ones"):
        vp.DVI(packing, x, lengths)
    torch.testing.assert_close(padding(x, lengths), packing(x, lengths))
    assert vp.DVI(padding, x, lengths).var.min() > 0


def test_the_networks_own_error_is_the_users_to_see() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        vp.DVI(random(Net(by_shape)), torch.randn(2, 5))


def test_recording_leaves_statistics_and_random_numbers_alone() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        net.seen += 1
        return net.b(F.dropout(net.a(x), 0.5, net.training))

    net, x = random(Net(body)).train(), torch.randn(3, 4)
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    graph(net, x)
    assert torch.equal(torch.rand(()), expected)
    assert net.seen == 0


@dataclass
class Answer:
    logits: Tensor
    extra: Tensor | None = None


pytree.register_pytree_node(Answer, lambda a: ([a.logits, a.extra], None), lambda leaves, _: Answer(*leaves))


class Model(nn.Module):
    """Keyword inputs, one of them plain, and an output of a type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Answer:
        h = self.table(ids) * scale
        if mask is not None and not bool(mask.all()):
            h = h * mask.unsqueeze(-1)
        return Answer(self.head(h.mean(1)), h)


IDS = torch.tensor([[1, 2, 2], [3, 4, 5]])


def test_keyword_inputs_and_outputs_with_names() -> None:
    net, mask = random(Model()), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    for options in ({}, {"mask": torch.ones(2, 3)}, {"mask": mask}, {"scale": 2.0}):
        f = vp.VBP(net, IDS, **options)
        assert isinstance(f, Answer)
        torch.testing.assert_close(f.logits.mean, net(IDS, **options).logits)
        assert isinstance(f.extra, Gaussian)
    summary = vp.summary(net, vp.DVI, IDS, mask=mask)
    assert len(summary.operations) >= 4
    assert str(summary).splitlines()[0].endswith("operations, recorded")


def test_correlations_of_a_network_that_decides_by_values() -> None:
    net, mask = random(Model()), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    f = vp.correlated(net, IDS, mask=mask, output="logits")
    for row in (0, 1):
        alone = vp.correlated(net, IDS[row : row + 1], mask=mask[row : row + 1], output="logits")
        torch.testing.assert_close((f.mean[row], f.var[row]), (alone.mean[0], alone.var[0]))


def test_the_chosen_output_is_trained_and_predicted() -> None:
    net, prior = random(Model()), vp.priors.Normal(10.0)
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Categorical(), prior, n_data=2, output="logits")
    for x in ({"ids": IDS}, (IDS,), IDS):
        assert elbo(x, torch.tensor([0, 1])).isfinite()
    torch.testing.assert_close(
        elbo.predict({"ids": IDS}, batch_size=1).probs, elbo.predict({"ids": IDS}).probs
    )


def test_training_with_inputs_by_name_is_training_with_tensors() -> None:
    words, y = torch.randint(9, (10, 3)), torch.randint(2, (10,))
    losses = []
    for rows in (
        [({"ids": ids}, label) for ids, label in zip(words, y, strict=True)],
        [*zip(words, y, strict=True)],
    ):
        net = random(Model())
        for name, parameter in net.named_parameters():
            parameter.data.fill_(-6.0 if "logvar" in name else 0.1)
        prior, classes = vp.priors.Normal(10.0), vp.likelihoods.Categorical()
        elbo = vp.ELBO(net, vp.DVI, classes, prior, n_data=10, output="logits")
        losses.append(vp.fit(elbo, DataLoader(rows, batch_size=4), epochs=2)[["loss", "data_fit"]])
    pd.testing.assert_frame_equal(*losses)


def with_token(net: Net, x: Tensor) -> Tensor:
    return net.b(F.relu(net.a(x) + net.a.bias.expand(len(x), -1)))


@pytest.mark.parametrize("body", [by_shape, with_token])
def test_compiling_a_recorded_network(body: Callable[[Net, Tensor], object]) -> None:
    net, x = random(Net(body)), torch.randn(3, 4)
    net.b.weight.requires_grad_(False)
    compiled = torch.compile(lambda x: vp.DVI(net, x).var, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), vp.DVI(net, x).var)


def test_a_function_of_a_tensor_alone_still_runs() -> None:
    net = Function(lambda x: torch.nn.functional.one_hot(x, 3))
    assert vp.VBP(net, torch.tensor([1])).tolist() == [[0, 1, 0]]


class Mine(nn.Module):
    """A linear layer that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.scale, x, self.weight)


def test_weights_of_other_layers_are_random_too() -> None:
    net, x = random(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Mine())), torch.randn(3, 3)
    assert [name for name, _ in vp.posteriors(net)] == ["0.weight", "2.weight"]
    assert difference(vp.DVI(net, x), draws(net, x)) == ""


class Language(nn.Module):
    """A table of words that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


def test_layers_that_share_a_weight_share_its_posterior() -> None:
    net = random(Language(), logvar=-2.0)
    assert [name for name, _ in vp.posteriors(net)] == ["table.weight"]
    assert net.head.weight_logvar is net.table.weight_logvar
    samples = draws(net, IDS[:, :2])
    f = vp.correlated(net, IDS[:, :2])
    assert 0.85 < (f.var.sum() / samples.var(0).sum()).item() < 1.15
    with pytest.raises(ValueError, match="share their weight"):
        vp.variational(Language(), posterior="factored")
