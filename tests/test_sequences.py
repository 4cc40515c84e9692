"""Embeddings, attention, transformer encoders and recurrent layers, against sampling and torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.gaussian import Gaussian, mean_of

from .sampling import assert_agrees, difference, draws, moments


@pytest.fixture(autouse=True)
def without_the_fast_path() -> Iterator[None]:
    """torch's fused attention cannot be vectorised over samples."""
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def close(f: Gaussian, samples: Tensor, mean_error: float, var_error: float) -> None:
    (mean, _), (var, _) = moments(samples)
    seen = var > 0.01 * var.max()  # a unit that is almost always closed has too few samples
    assert ((f.mean - mean).abs() / var.sqrt())[seen].mean() < mean_error
    assert (f.var / var)[seen].log().abs().mean() < var_error


def flat(out: object) -> list[Tensor]:
    """The means of everything that a module returns."""
    if isinstance(out, Tensor | Gaussian):
        return [mean_of(out)]
    return [] if out is None else [t for part in out for t in flat(part)]  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------- embedding


def test_an_embedding_looks_up_means_and_variances() -> None:
    layer = vp.variational(nn.Embedding(7, 3).double(), logvar=-2.0)
    assert_agrees(vp.DVI, layer, torch.tensor([[0, 3], [6, 6]]))


def test_padding_is_deterministic() -> None:
    layer = vp.variational(nn.Embedding(5, 3, padding_idx=2))
    f = vp.VBP(layer, torch.tensor([1, 2]))
    assert f.var[0].min() > 0
    assert f.var[1].abs().max() == 0
    assert f.mean[1].abs().max() == 0


def test_padding_adds_nothing_to_the_divergence() -> None:
    padded, plain = (
        vp.variational(nn.Embedding(n, 3, padding_idx=i), logvar=-2.0) for n, i in ((5, 2), (4, None))
    )
    rows = torch.tensor([0, 1, 3, 4])
    with torch.no_grad():
        plain.weight.copy_(padded.weight[rows])
        plain.weight_logvar.copy_(padded.weight_logvar[rows])
    for prior in (
        vp.priors.Normal(2.0),
        vp.priors.LogUniform(),
        vp.priors.EmpiricalBayes(),
        vp.priors.Centred(),
    ):
        first, second = (
            vp.ELBO(vp.centred(net), vp.VBP, vp.likelihoods.Normal(), prior, n_data=1).kl()
            for net in (padded, plain)
        )
        torch.testing.assert_close(first, second)
    (slope,) = torch.autograd.grad(
        vp.ELBO(padded, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=1).kl(),
        padded.weight_logvar,
    )
    assert slope[2].abs().max() == 0
    assert slope[0].abs().min() > 0
    assert vp.posterior.draw(padded, 4)["weight"][:, 2].abs().max() == 0
    ((_, q),) = vp.posteriors(padded)
    assert q.var[2].abs().max() == 0
    assert vp.summary(padded, vp.VBP, torch.tensor([0, 2])).operations[0].random == 12


class Bags(nn.Module):
    """Bags of words, with a fixed index."""

    def __init__(self, bag: nn.EmbeddingBag, index: Tensor, *others: Tensor) -> None:
        super().__init__()
        self.bag, self.index, self.others = bag, index, others

    def forward(self, x: Tensor) -> Tensor:
        return x * self.bag(self.index, *self.others)


WORDS = torch.tensor([[0, 3, 3, 6], [6, 6, 6, 1], [2, 1, 0, 2]])
BAGS: dict[str, tuple[dict[str, object], tuple[Tensor, ...]]] = {
    "sum": ({"mode": "sum"}, (WORDS,)),
    "mean": ({"mode": "mean"}, (WORDS,)),
    "mean with padding": ({"mode": "mean", "padding_idx": 6}, (WORDS,)),
    "sum with padding": ({"mode": "sum", "padding_idx": -1}, (WORDS,)),
    "weighted": ({"mode": "sum"}, (WORDS, None, torch.linspace(-1, 2, 12).view(3, 4).double())),
    "offsets": ({"mode": "mean"}, (WORDS.flatten(), torch.tensor([0, 5, 5, 10]))),
    "last offset": (
        {"mode": "sum", "include_last_offset": True, "padding_idx": 0},
        (WORDS.flatten(), torch.tensor([0, 3, 12])),
    ),
}


@pytest.mark.parametrize("name", BAGS)
def test_bags_of_an_embedding_agree_with_sampling(name: str) -> None:
    options, inputs = BAGS[name]
    net = vp.variational(Bags(nn.EmbeddingBag(7, 3, **options).double(), *inputs), logvar=-2.0)
    x = torch.ones(()).double()
    f = vp.DVI(net, x)
    torch.testing.assert_close(f.mean, net(x))
    weights = vp.posterior.draw(net, 4000)["bag.weight"]
    with torch.no_grad():
        samples = torch.stack([torch.func.functional_call(net, {"bag.weight": w}, (x,)) for w in weights])
    assert not difference(f, samples)


def test_a_bag_in_a_network_trains_samples_compiles_and_saves(tmp_path) -> None:
    net = vp.variational(nn.Sequential(nn.EmbeddingBag(7, 4, padding_idx=0), nn.ReLU(), nn.Linear(4, 1)))
    for method in (vp.CVBP, vp.LOCAL_REPARAM):
        vp.ELBO(net, method, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=3)(
            WORDS, torch.ones(3, 1)
        ).backward()
        assert net[0].weight_logvar.grad[1:].abs().sum() > 0
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=3)
    vp.save(elbo, tmp_path)
    assert torch.equal(vp.load(tmp_path).predict(WORDS).var, elbo.predict(WORDS).var)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: vp.DVI(net, x), fullgraph=True, backend="eager")(WORDS)
    torch.testing.assert_close(compiled.var, vp.DVI(net, WORDS).var)
    vp.replicas.fit([elbo, copy.deepcopy(elbo)], WORDS.expand(2, 3, 4), torch.ones(2, 3, 1), epochs=1)


def test_a_bag_with_mode_max_has_no_rule() -> None:
    with pytest.raises(vp.NoRuleError, match='EmbeddingBag with mode="max"; add one'):
        vp.VBP(vp.variational(nn.EmbeddingBag(7, 3, mode="max")), WORDS)


def test_an_embedding_in_a_network_trains_samples_and_saves(tmp_path) -> None:
    net = vp.variational(nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 1)), init="he")
    assert [name for name, _ in vp.posteriors(net)] == ["0.weight", "2.weight"]
    x, y = torch.randint(6, (10, 2)), torch.randn(10, 1)
    for method in (vp.VBP, vp.LOCAL_REPARAM):
        elbo = vp.ELBO(net, method, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=10)
        elbo(x, y).backward()
        assert net[0].weight_logvar.grad.abs().sum() > 0
    elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=10)
    vp.save(elbo, tmp_path)
    assert torch.equal(vp.load(tmp_path).predict(x).var, elbo.predict(x).var)
    samples = torch.stack([vp.LOCAL_REPARAM(net[0], x) for _ in range(4000)])
    close(vp.DVI(net[0], x), samples, 0.05, 0.1)


def test_layers_without_groups_have_no_horseshoe() -> None:
    with pytest.raises(ValueError, match="layer '0', Embedding, has no horseshoe posterior"):
        vp.variational(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)), posterior="horseshoe")


# -------------------------------------------------------------------------------------------------- attention


class SelfAttention(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # need_weights=False would select a fused kernel


def self_attention(method: vp.Method, module: SelfAttention, x: object) -> object:
    return method(module.attention, x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("logvar", [-6.0, -4.0])
def test_attention_is_close_to_sampling(logvar: float) -> None:
    net = vp.variational(SelfAttention(nn.MultiheadAttention(8, 2, batch_first=True)).eval(), logvar=logvar)
    names = [name for name, _ in vp.posteriors(net)]
    assert names == ["attention.in_proj_weight", "attention.out_proj.weight"]
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        close((vp.DVI | {SelfAttention: self_attention})(net, x), draws(net, x, 4000), 0.08, 0.35)


def test_attention_to_independent_values_is_close_to_sampling() -> None:
    scores, values = (
        Gaussian(torch.randn(s).double(), torch.rand(s).double()) for s in ((4, 6, 6), (4, 6, 3))
    )
    samples = scores.sample((20_000,)).softmax(-1) @ values.sample((20_000,))
    close(vp.moments.attend(scores, values)[0], samples, 0.03, 0.08)
    kept = torch.rand(20_000, 4, 6, 6) > 0.25
    dropped = (scores.sample((20_000,)).softmax(-1) * kept / 0.75) @ values.sample((20_000,))
    close(vp.moments.attend(scores, values, dropped=0.25)[0], dropped, 0.03, 0.08)


def test_equal_values_get_no_variance_from_the_scores() -> None:
    scores = Gaussian(torch.randn(6, 6).double(), torch.rand(6, 6).double())
    out, weights = vp.moments.attend(scores, torch.full((6, 2), 1e3).double())
    assert out.var.max() < 1e-9
    assert weights.var.min() > 0


def test_scores_without_variance_have_the_gradient_of_the_delta_method() -> None:
    m, values = torch.randn(4, 6).double(), torch.randn(6, 3).double()
    v = torch.zeros_like(m).requires_grad_()
    out, weights = vp.moments.attend(Gaussian.of(m, v), values)
    (gradient,) = torch.autograd.grad(out.var.sum(), v)
    a, y = weights.mean.detach(), out.mean.detach()
    expected = a.square() * (values - y.unsqueeze(1)).square().sum(-1)
    torch.testing.assert_close(gradient, expected)


MASKS = {
    "none": {},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5)},
    "boolean": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "of each head": {"attn_mask": torch.randn(4, 5, 5)},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False, False, True, True, True]])},
    "all heads": {"average_attn_weights": False},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_without_variance_attention_equals_torch(options: dict[str, object], batch_first: bool) -> None:
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=batch_first).eval()
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    if not batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    expected = module(q, k, v, **options)
    vp.variational(module, logvar=-40.0)
    out = vp.VBP(module, Gaussian(q, torch.zeros_like(q)), k, v, **options)
    for ours, theirs in zip(flat(out), flat(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    out[0].mean.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_attention_without_a_batch_dimension_or_random_weights() -> None:
    module, x = nn.MultiheadAttention(4, 2).eval(), torch.randn(3, 4)
    expected = module(x, x, x)
    for ours in (
        vp.VBP(module, x, x, x),
        vp.VBP(vp.variational(module, logvar=-40.0), x, x, x),
        vp.DETERMINISTIC(module, x, x, x),
    ):
        for a, b in zip(flat(ours), flat(expected), strict=True):
            torch.testing.assert_close(a, b)


def test_unsupported_attention_is_refused() -> None:
    x = torch.randn(3, 1, 4)
    with pytest.raises(vp.NoRuleError, match="add_bias_kv"):
        vp.VBP(vp.variational(nn.MultiheadAttention(4, 2, add_bias_kv=True)), x, x, x)
    with pytest.raises(vp.NoRuleError, match="MultiheadAttention, which contains random weights"):
        vp.LOCAL_REPARAM(vp.variational(nn.MultiheadAttention(4, 2)), x, x, x)


# ----------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()])
def test_without_variance_a_transformer_encoder_equals_torch(norm_first: bool, activation: object) -> None:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, activation=activation, norm_first=norm_first, batch_first=True
    )
    net = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False).eval()
    x, mask = torch.randn(2, 4, 8), nn.Transformer.generate_square_subsequent_mask(4)
    expected = net(x, mask=mask)
    vp.variational(net, logvar=-40.0)
    torch.testing.assert_close(vp.VBP(net, x, mask=mask).mean, expected, rtol=1e-4, atol=1e-4)


def test_a_transformer_encoder_layer_has_gradients_and_compiles() -> None:
    net = vp.variational(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), logvar=-4.0)
    x = torch.randn(2, 4, 8)
    f = vp.DVI(net, x)
    (f.mean.sum() + f.var.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(lambda x: vp.DVI(net, x), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled.var, f.var)


# ------------------------------------------------------------------------------------------------- recurrence

CELLS = {
    "tanh": lambda: nn.RNNCell(3, 5),
    "relu": lambda: nn.RNNCell(3, 5, nonlinearity="relu"),
    "lstm": lambda: nn.LSTMCell(3, 5),
    "gru": lambda: nn.GRUCell(3, 5),
}


def step(kind: str, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step as torch documents it, from W x + b and W h + b."""
    if kind == "lstm":
        i, f, g, o = (x + h).chunk(4, -1)
        cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell
    if kind == "gru":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        z = (xz + hz).sigmoid()
        return ((1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * state[0],)
    return ((x + h).tanh() if kind == "tanh" else (x + h).relu(),)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_close_to_sampling(kind: str) -> None:
    cell = vp.variational(CELLS[kind](), logvar=-4.0, biases=True)
    assert [name for name, _ in vp.posteriors(cell)] == ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    x, state = torch.randn(4, 3), (torch.randn(4, 5), torch.randn(4, 5))
    with torch.no_grad():
        weights = {name: Gaussian(q.mean, q.var).sample((8000,)) for name, q in vp.posteriors(cell)}
        parts = (
            torch.einsum("noi,bi->nbo", weights[f"weight_{part}"], value)
            + weights[f"bias_{part}"].unsqueeze(1)
            for part, value in (("ih", x), ("hh", state[0]))
        )
        samples = step(kind, *parts, state)
        out = vp.DVI(cell, x, state if kind == "lstm" else state[0])
        for f, sample in zip(out if kind == "lstm" else (out,), samples, strict=True):
            close(f, sample, 0.03, 0.06)


@pytest.mark.parametrize("kind", CELLS)
def test_without_variance_a_cell_equals_torch(kind: str) -> None:
    cell, x = CELLS[kind](), torch.randn(4, 3)
    state = torch.randn(4, 5)
    state = (state, 2 * state) if isinstance(cell, nn.LSTMCell) else state
    expected = [cell(x), cell(x, state)]
    vp.variational(cell, logvar=-40.0)
    for ours, theirs in zip(flat([vp.VBP(cell, x), vp.VBP(cell, x, state)]), flat(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


LAYERS = [
    nn.RNN(3, 5, nonlinearity="relu"),
    nn.RNN(3, 5, 2, bidirectional=True),
    nn.LSTM(3, 5, 2, batch_first=True),
    nn.LSTM(3, 5, bidirectional=True, proj_size=4),
    nn.GRU(3, 5, 2, bias=False, bidirectional=True, batch_first=True),
]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_without_variance_a_recurrent_layer_equals_torch(layer: nn.RNNBase, given: bool) -> None:
    layer, x = copy.deepcopy(layer), torch.randn(2, 4, 3)
    batch = 2 if layer.batch_first else 4
    numbers = layer.num_layers * (1 + layer.bidirectional)
    state = tuple(torch.randn(numbers, batch, size) for size in (layer.proj_size or 5, 5))
    state = (state if isinstance(layer, nn.LSTM) else state[1],) if given else ()
    expected = layer(x, *state)
    plain = vp.VBP(layer, x, *state)
    vp.variational(layer, logvar=-40.0)
    for out in (plain, vp.VBP(layer, x, *state), vp.DETERMINISTIC(layer, x, *state)):
        for ours, theirs in zip(flat(out), flat(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_is_its_cell_unrolled() -> None:
    layer = vp.variational(nn.LSTM(3, 5), logvar=-3.0)
    cell = vp.variational(nn.LSTMCell(3, 5))
    cell.load_state_dict({name.replace("_l0", ""): value for name, value in layer.state_dict().items()})
    x, state = torch.randn(6, 2, 3), None
    for t in range(6):
        state = vp.DVI(cell, x[t], state)
    output, (h, c) = vp.DVI(layer, x)
    for ours, theirs in (
        (output.map(lambda t: t[-1]), state[0]),
        (h.map(lambda t: t[0]), state[0]),
        (c.map(lambda t: t[0]), state[1]),
    ):
        torch.testing.assert_close(ours.mean, theirs.mean)
        torch.testing.assert_close(ours.var, theirs.var)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_have_gradients_and_compile(kind: type[nn.RNNBase]) -> None:
    net = vp.variational(kind(3, 4, 2, dropout=0.3), logvar=-4.0)
    x = torch.randn(2, 2, 3)
    f, _ = vp.DVI(net, x)
    (f.mean.sum() + f.var.sum()).backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    torch.compiler.reset()
    # torch requires `allow_rnn` to compile any module of these types.
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(lambda x: vp.DVI(net, x)[0], fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled.var, f.var)


def test_packed_sequences_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
    with pytest.raises(vp.NoRuleError, match="GRU on a PackedSequence; give it padded sequences"):
        vp.VBP(vp.variational(nn.GRU(3, 2)), packed)
