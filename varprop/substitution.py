"""Passes of a network with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

Result = TypeVar("Result")


def substituted(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    function: Callable[..., Result],
    /,
    *args: Any,
    **options: Any,
) -> Result:
    """function(net, *args, **options) with these tensors in the place of those with their names.

    A tensor that several modules share is exchanged in all of them.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> substituted(net, {"weight": torch.ones(1, 2)}, nn.Module.__call__, torch.ones(1, 2))
    tensor([[2.]])
    """
    places = {f"net.{place}": tensor for place, tensor in _places(net, tensors).items()}
    result: Result = functional_call(_Bound(net), places, (function, *args), options, tie_weights=False)
    return result


class _Bound(nn.Module):
    """A network to which `functional_call` applies any function."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return function(self.net, *args, **options)


def _places(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by every place where they belong, each place by one name.

    `functional_call` would exchange the tensors of a module with two names twice, and in the end put the
    substitutes back.
    """
    named = dict(net.named_parameters(remove_duplicate=False)) | dict(
        net.named_buffers(remove_duplicate=False)
    )
    substitutes = {named[name]: tensor for name, tensor in tensors.items()}
    places = {}
    for path, module in net.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            if tensor in substitutes:
                places[f"{path}.{name}" if path else name] = substitutes[tensor]
    return places
