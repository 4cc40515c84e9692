"""Recurrent layers, unrolled. The correlation of the steps, which share weights, is ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import moments
from ...gaussian import Activation, Gaussian, as_gaussian
from ...posterior import Layer, random_tensor
from ..base import Method, NoRuleError, Value, is_plain
from ..facts import Table, rule

State = tuple[Gaussian, ...]
_RELU = nn.ReLU()
_sigmoid, _tanh = partial(moments.quadrature, torch.sigmoid), partial(moments.quadrature, torch.tanh)


# --------------------------------------------------------------------------------------------------- one step


def _rnn_step(act: Callable[[Gaussian], Gaussian], x: Gaussian, h: Gaussian, state: State) -> State:
    return (act(x + h),)


def _lstm_step(x: Gaussian, h: Gaussian, state: State) -> State:
    """Gates by quadrature, assumed independent of each other and of the cell (Eq. 22)."""
    i, f, g, o = _split(x + h, 4)
    cell = _product(_sigmoid(f), state[1]) + _product(_sigmoid(i), _tanh(g))
    return _product(_sigmoid(o), _tanh(cell)), cell


def _gru_step(x: Gaussian, h: Gaussian, state: State) -> State:
    """The update gate mixes the old state and the new one; all three are assumed independent (Eq. 23)."""
    (xr, xz, xn), (hr, hz, hn) = _split(x, 3), _split(h, 3)
    z, new, old = _sigmoid(xz + hz), _tanh(xn + _product(_sigmoid(xr + hr), hn)), state[0]
    keep = 1 - z.mean
    mean = keep * new.mean + z.mean * old.mean
    var = (
        (keep.square() + z.var) * new.var + z.second_moment * old.var + z.var * (old.mean - new.mean).square()
    )
    return (Gaussian.of(mean, var),)


def _product(a: Gaussian, b: Gaussian) -> Gaussian:
    return moments.product(a, b)  # type: ignore[return-value]


def _split(x: Gaussian, n: int) -> list[Gaussian]:
    return [Gaussian.of(m, v) for m, v in zip(x.mean.chunk(n, -1), x.var.chunk(n, -1), strict=True)]


def _step(method: Method, module: Layer) -> Callable[[Gaussian, Gaussian, State], State]:
    """The step function of a cell or a recurrent layer."""
    match module:
        case nn.LSTM() | nn.LSTMCell():
            return _lstm_step
        case nn.GRU() | nn.GRUCell():
            return _gru_step
    return partial(_rnn_step, partial(method, _RELU) if module.nonlinearity == "relu" else _tanh)


# ------------------------------------------------------------------------------------------- cells and layers


def _affine(module: Layer, kind: str, suffix: str, x: Activation) -> Gaussian:
    """The affine map of the inputs ("ih") or of the state ("hh") (Eq. 1)."""
    weight, bias = (
        random_tensor(module, f"weight_{kind}{suffix}"),
        random_tensor(module, f"bias_{kind}{suffix}"),
    )
    return as_gaussian(moments.affine(F.linear, x, weight, bias))  # type: ignore[arg-type]


def _state(module: Layer, given: Value, shape: tuple[int, ...], like: Tensor) -> State:
    """The initial state, by default zero and deterministic; an LSTM also has a cell state."""
    long = isinstance(module, nn.LSTM | nn.LSTMCell)
    if given is not None:
        return tuple(as_gaussian(x) for x in (given if long else (given,)))
    projected = getattr(module, "proj_size", 0) or module.hidden_size
    sizes = (projected, module.hidden_size) if long else (module.hidden_size,)
    return tuple(as_gaussian(like.new_zeros(*shape, size)) for size in sizes)


@rule("approximate", 22)
def cell(method: Method, module: Layer, x: Activation, state: Value = None) -> Value:
    if is_plain(module, x, *(state if isinstance(state, tuple) else (state,))):
        return module(x, state)
    state = _state(module, state, tuple(x.shape[:-1]), as_gaussian(x).mean)
    out = _step(method, module)(_affine(module, "ih", "", x), _affine(module, "hh", "", state[0]), state)
    return out if isinstance(module, nn.LSTMCell) else out[0]


@rule("approximate", 22)
def layers(method: Method, module: Layer, x: Activation, state: Value = None) -> tuple[Value, Value]:
    """Layers and directions in turn, unrolled over the sequence; output and last states as in torch."""
    if is_plain(module, x, *(state if isinstance(state, tuple) else (state,))):
        plain: tuple[Value, Value] = module(x, state)
        return plain
    if not isinstance(x, Tensor | Gaussian):
        raise NoRuleError(
            f"{method.name} has no rule for {type(module).__name__} on a {type(x).__name__}; "
            "give it padded sequences."
        )
    time = 0 if len(x.shape) == 2 or not module.batch_first else 1
    directions = 2 if module.bidirectional else 1
    steps = as_gaussian(x).map(lambda t: t.movedim(time, 0))
    shape = (module.num_layers * directions, *steps.shape[1:-1])
    start = _state(module, state, shape, steps.mean)
    ends = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            first = tuple(s.map(partial(torch.select, dim=0, index=index)) for s in start)
            out, end = _unrolled(
                method, module, f"_l{layer}{'_reverse' * direction}", steps, first, reverse=direction == 1
            )
            outputs.append(out)
            ends.append(end)
        steps = _join(torch.cat, outputs, -1)
        if layer < module.num_layers - 1 and module.training and module.dropout:
            keep = 1 - module.dropout
            steps = moments.mask(steps, keep) * (1 / keep)
    last = tuple(_join(torch.stack, [end[k] for end in ends], 0) for k in range(len(start)))
    return steps.map(lambda t: t.movedim(0, time)), last if isinstance(module, nn.LSTM) else last[0]


def _unrolled(
    method: Method, module: Layer, suffix: str, x: Gaussian, state: State, reverse: bool
) -> tuple[Gaussian, State]:
    step, inputs, outputs = _step(method, module), _affine(module, "ih", suffix, x), []
    order = range(x.shape[0])
    projection = random_tensor(module, f"weight_hr{suffix}")
    for t in reversed(order) if reverse else order:
        now = inputs.map(partial(torch.select, dim=0, index=t))
        state = step(now, _affine(module, "hh", suffix, state[0]), state)
        if projection is not None:
            state = (as_gaussian(moments.affine(F.linear, state[0], projection)), *state[1:])
        outputs.append(state[0])
    return _join(torch.stack, outputs[::-1] if reverse else outputs, 0), state


def _join(join: Callable[..., Tensor], parts: list[Gaussian], dim: int) -> Gaussian:
    return Gaussian.of(join([p.mean for p in parts], dim), join([p.var for p in parts], dim))


RECURRENT: Table = {
    nn.RNN: replace(layers, equation=16),
    nn.LSTM: layers,
    nn.GRU: replace(layers, equation=23),
    nn.RNNCell: replace(cell, equation=16),
    nn.LSTMCell: cell,
    nn.GRUCell: replace(cell, equation=23),
}
